"""The functions that Transformers calls under the name "hf_paged": attention, and the mask that goes with it.

in a packed step   tagged keys   -> the cache's backend, on blocks
                   changed keys  -> the same, on blocks made of them, in layers that are known for it
                   latents       -> the same, on the compressed cache: the keys that arrive were expanded from it
                   anything else -> an error: falling back would mix the packed sequences
outside of one                   -> what the model had before the swap; where "hf_paged" is the user's own choice,
                                    the same as sdpa, or as the model's eager code for softcap and sinks
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.errors import PackedStepError, UnsupportedModelError
from hf_paged.kernels.absorbed import UP_PROJECTION, LatentCall, absorb
from hf_paged.kernels.metadata import AttentionParams, PackedStep, current_step
from hf_paged.kernels.rows import by_head, by_token, in_rows
from hf_paged.kernels.swapped import ATTENTION_NAME, own_implementation

if TYPE_CHECKING:
    from hf_paged.cache.step_cache import StepCache

# The names that models give to a position bias of their own, which a block pool knows nothing of.
_BIASES = ("position_bias", "alibi")

# The keyword by which sparse attention says which keys each query may see.
_SELECTED = "indices"


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
    latent = _latent_call(step, module, query, key, value, options)
    if step.probe is not None:
        step.probe.saw_attention(key, value, attention_mask, options)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    cache, layer_idx = _tag(step, key, attention_mask, options)
    storage = cache.storages[layer_idx]
    layer = cache.layer(layer_idx)
    step.attended.append(layer_idx)
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=layer.span.window,
        chunk=layer.span.chunk,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    if layer.is_gathered:
        gathered = step.gathered(layer.group, storage.spec.device)
        blocks = gathered.take_back(key, value)
        output = cache.backend.attend(by_token(query), blocks, gathered.metadata, params)
        return in_rows(output, query.shape[0]), None
    metadata = step.metadata(layer.group, storage.spec.device)
    if latent is not None:
        output = latent.attend(by_head(query), cache.backend, storage.blocks, metadata, params)
    else:
        output = cache.backend.attend(by_token(query), storage.blocks, metadata, params)
    return in_rows(output, query.shape[0]), None


def _latent_call(
    step: PackedStep,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
) -> LatentCall | None:
    """Recognises keys that a latent attention module expanded from what it cached last, and tags them as that layer's.

    Whether they are nothing but expanded is what the model's check against itself proves.
    """
    waiting = step.updated[-1] if step.updated else None
    if hasattr(key, "_paged") or waiting is None or waiting in step.attended or not hasattr(module, UP_PROJECTION):
        return None
    cache = cast("StepCache", step.cache)
    call: LatentCall | str = "its attention is to selected keys only"
    if options.get(_SELECTED) is None:
        call = absorb(module, query, key, value, cache.layer(waiting).spec)
    if isinstance(call, str):
        reason = f"Its latent attention can't run on the compressed cache: {call}."
        raise UnsupportedModelError(reason) if step.probe is not None else PackedStepError(reason)
    cache.tag(key, waiting)
    return call


def _tag(
    step: PackedStep, key: torch.Tensor, attention_mask: torch.Tensor | None, options: dict[str, Any]
) -> tuple[StepCache, int]:
    cache, layer_idx = getattr(key, "_paged", (None, -1))
    if cache is None and step.updated and cast("StepCache", step.cache).layer(step.updated[-1]).is_gathered:
        cache, layer_idx = step.cache, step.updated[-1]  # the model made new keys of what it was handed
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
    return cast("StepCache", cache), layer_idx


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
    own = own_implementation(getattr(module, "config", None))
    if own == "eager" and eager is not None:  # swapped out by another thread; so was the mask
        return _call(eager, module, query, key, value, attention_mask, scaling, dropout, options)
    if own != ATTENTION_NAME and own in ALL_ATTENTION_FUNCTIONS:
        attention = ALL_ATTENTION_FUNCTIONS[own]
        return _call(attention, module, query, key, value, attention_mask, scaling, dropout, options)
    if eager is None or (options.get("softcap") is None and options.get("s_aux") is None):
        return _call(sdpa_attention_forward, module, query, key, value, attention_mask, scaling, dropout, options)
    mask = _additive_mask(module, query, key, attention_mask, options)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return _call(eager, module, query, key, value, mask, scaling, dropout, options)


def _call(
    attention: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    output, weights = attention(module, query, key, value, mask, scaling=scaling, dropout=dropout, **options)
    return output, weights


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


def paged_mask(*args: Any, **options: Any) -> torch.Tensor | None:
    """No mask in a packed step, where the metadata says who sees what; else what the model's own attention gets."""
    step = current_step()
    if step is None:
        own = own_implementation(options.get("config"))
        make = sdpa_mask if own == ATTENTION_NAME else ALL_MASK_ATTENTION_FUNCTIONS[own]
        mask: torch.Tensor | None = make(*args, **options)
        return mask
    if step.probe is None:
        return None
    watched = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    step.probe.saw_mask(watched, options["mask_function"], options.get("local_size"))
    return watched
