"""The functions that Transformers calls under the name "hf_paged": attention, and the mask that goes with it.

    in a packed step   tagged keys   -> the cache's backend, on blocks
                       anything else -> an error: falling back would mix the packed sequences
    outside of one                   -> the same as sdpa, or as the model's own eager code for softcap and sinks
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_paged.errors import PackedStepError
from hf_paged.kernels.metadata import AttentionParams, PackedStep, current_step

if TYPE_CHECKING:
    from hf_paged.cache.step_cache import StepCache

# The names that models give to a position bias of their own, which a block pool knows nothing of.
_BIASES = ("position_bias", "alibi")


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of query `[B, Hq, T, D]` over key `[B, H, L, D]` and value `[B, H, L, Dv]`.

    Returns:
        The output `[B, T, Hq, Dv]`, and attention weights only where the model's eager code ran.

    Raises:
        PackedStepError: in a packed step, for keys that are not this cache's, a mask, or a bias.
    """
    step = current_step()
    if step is None:
        return _plain_attention(module, query, key, value, attention_mask, scaling, dropout, options)
    if step.probe is not None:
        step.probe.saw_attention(key, attention_mask, options)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    cache, layer_idx = _tag(step, key, attention_mask, options)
    storage = cache.storages[layer_idx]
    layer = cache.layer(layer_idx)
    step.attended.append(layer_idx)
    output = cache.backend.attend(
        query[0].transpose(0, 1),
        storage.keys,
        storage.values,
        step.metadata(layer.group, storage.spec.device),
        AttentionParams(
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=layer.span.window,
            chunk=layer.span.chunk,
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        ),
    )
    return output.unsqueeze(0), None


def _tag(
    step: PackedStep, key: torch.Tensor, attention_mask: torch.Tensor | None, options: dict[str, Any]
) -> tuple[StepCache, int]:
    cache, layer_idx = getattr(key, "_paged", (None, -1))
    if cache is None or cache is not step.cache:
        raise PackedStepError(
            "An attention call in a packed step reads keys that did not come from its cache; "
            "run this model without cache_implementation='paged'."
        )
    if attention_mask is not None or any(options.get(name) is not None for name in _BIASES):
        raise PackedStepError(
            "An attention call in a packed step brings a mask or a position bias of its own; "
            "run this model without cache_implementation='paged'."
        )
    return cache, layer_idx


def _plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None or (options.get("softcap") is None and options.get("s_aux") is None):
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    mask = _additive_mask(module, query, key, attention_mask, options)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return eager(  # type: ignore[no-any-return]
        module, query, key, value, mask, scaling=scaling, dropout=dropout, **options
    )


def _additive_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor | None:
    # sdpa's masks are boolean, or left out where its is_causal flag says the same; eager code adds a float mask
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if mask is None and is_causal and num_queries > 1:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
        ~mask, torch.finfo(query.dtype).min
    )


def paged_mask(
    *args: Any, mask_function: Callable[..., torch.Tensor] | None = None, local_size: int | None = None, **options: Any
) -> torch.Tensor | None:
    """No mask in a packed step, where the metadata says who sees what; else what sdpa gets."""
    step = current_step()
    if mask_function is not None:
        options["mask_function"] = mask_function
    if step is None:
        return sdpa_mask(*args, local_size=local_size, **options)  # type: ignore[no-any-return]
    if step.probe is None or mask_function is None:
        return None
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    step.probe.saw_mask(mask, mask_function, local_size)
    return mask
