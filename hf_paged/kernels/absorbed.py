"""Latent attention on the compressed cache: the up-projection goes into the query and the output, not onto the keys.

    cached, a token    latent c [R], rotary key r [P]
    stock              k = W_uk c, v = W_uv c     of every cached token, for every head, in every step
    here               q . k      = (q W_uk) . c  so the query is projected down once, and attends to c itself
                       sum p v    = W_uv sum p c  and the result is projected up once

`kv_b_proj.weight` holds `W_uk` and `W_uv` of each head one after the other. They are views of it, taken at each call:
the weight may change between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.kernels.backend import AttentionBackend
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams

if TYPE_CHECKING:
    from hf_paged.cache.storage import KVSpec

UP_PROJECTION = "kv_b_proj"  # what latent attention modules call the matrix that expands latents to K and V


@dataclass(frozen=True, eq=False)
class LatentCall:
    """A latent attention call that can be absorbed: what its weight and its queries are made of."""

    up_key: torch.Tensor  # [H, N, R], a view of the weight
    up_value: torch.Tensor  # [H, V, R], the same

    def attend(
        self,
        query: torch.Tensor,
        backend: AttentionBackend,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attention of query `[H, T, N + P]` over the latents in `blocks` -> `[T, H, V]`."""
        num_plain = self.up_key.shape[1]
        plain, rotary = query[..., :num_plain], query[..., num_plain:]
        latent = torch.bmm(plain.to(self.up_key.dtype), self.up_key).to(query.dtype)  # [H, T, R]
        out = backend.attend_latent(latent.transpose(0, 1), rotary.transpose(0, 1), blocks, metadata, params)
        out = out.transpose(0, 1).to(self.up_value.dtype)  # [H, T, R]
        return torch.bmm(out, self.up_value.transpose(1, 2)).transpose(0, 1)


def absorb(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: KVSpec
) -> LatentCall | str:
    """What an attention call of a module with a `kv_b_proj` is made of, or why it can't be absorbed.

    Args:
        module: the attention module.
        query: `[1, H, T, N + P]`, the last P of it rotary.
        key: `[1, H, T, N + P]`, of the new tokens only, expanded by the module.
        value: `[1, H, T, V]`, the same.
        spec: what the module's cache layer stores: latents of R numbers as keys, rotary keys of P as values.

    Returns:
        The call, or half a sentence.
    """
    projection = getattr(module, UP_PROJECTION)
    reason = why_not_plain(projection)
    if reason is not None:
        return f"{UP_PROJECTION} {reason}"
    weight: torch.Tensor = projection.weight
    num_heads, rank = query.shape[1], spec.key_head_dim
    num_plain, num_values = query.shape[-1] - spec.value_head_dim, value.shape[-1]
    fits = (
        spec.num_key_heads == spec.num_value_heads == 1
        and key.shape == query.shape
        and value.shape[:3] == key.shape[:3]
        and num_plain > 0
        and weight.shape == (num_heads * (num_plain + num_values), rank)
    )
    if not fits:
        return (
            f"{UP_PROJECTION} {tuple(weight.shape)} doesn't make keys {tuple(key.shape)} and values "
            f"{tuple(value.shape)} of what is cached"
        )
    by_head = weight.detach().view(num_heads, num_plain + num_values, rank)
    return LatentCall(by_head[:, :num_plain], by_head[:, num_plain:])


def why_not_plain(projection: Any) -> str | None:
    """Why a projection isn't just its weight, as the end of a sentence, or None when it is."""
    if type(projection) is not torch.nn.Linear:
        return f"is a {type(projection).__name__} of {type(projection).__module__}, not a plain Linear"
    if projection.bias is not None:
        return "has a bias"
    if type(projection.weight) not in (torch.nn.Parameter, torch.Tensor) or not projection.weight.is_floating_point():
        return f"has a weight of type {type(projection.weight).__name__}, {projection.weight.dtype}"
    if projection.weight.dtype.itemsize < 2:  # float8: the scales are elsewhere
        return f"has a quantised weight, {projection.weight.dtype}"
    if projection._forward_hooks or projection._forward_pre_hooks:
        return "has forward hooks"
    if "forward" in vars(projection) and not _only_moves_inputs(projection):
        return "has a forward of its own, as offloaded or patched layers do"
    return None


def _only_moves_inputs(projection: Any) -> bool:
    # Accelerate wraps every layer of a model that is spread over devices; without offload the weight stays in place.
    hook = getattr(projection, "_hf_hook", None)
    return hook is not None and getattr(hook, "offload", True) is False
