"""Learns a model's cache layout by watching one small forward.

The config is not asked for shapes, types or windows: autocast, tensor parallelism, offload, quantised weights and
windows that live only in masks all make it lie. What the forward hands to `update`, and the mask that arrives at each
attention call, can't.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged.cache.layout import AttentionSpan, CacheLayer, CacheLayout
from hf_paged.cache.row_cache import found_states, row_layers
from hf_paged.cache.state_storage import StateSpec
from hf_paged.cache.step_cache import PackedLayer, TaggingCache
from hf_paged.cache.storage import KVSpec
from hf_paged.compat import cache_keyword
from hf_paged.engine.attention_swap import paged_attention
from hf_paged.errors import PagedError, UnsupportedModelError
from hf_paged.kernels.metadata import PackedStep, current_step, packed_step

_PROBE_TOKENS = 2

# What models call a table of learned absolute positions.
_POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")


class _ProbeCache(TaggingCache):
    """Records what each layer updates with."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers)
        self.specs: dict[int, KVSpec] = {}
        self.updates: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Records shapes, types and device; returns the tensors, the key tagged."""
        if layer_idx in self.specs:
            raise UnsupportedModelError(f"Layer {layer_idx} updates its cache twice in one forward.")
        self.specs[layer_idx] = KVSpec.of(key_states, value_states)
        self.updates[layer_idx] = key_states, value_states
        step = current_step()
        assert step is not None
        step.updated.append(layer_idx)
        return self.tag(key_states, layer_idx), value_states

    def layer(self, layer_idx: int) -> CacheLayer:
        """What is known of a layer before it attends: its spec."""
        return CacheLayer(self.specs[layer_idx], AttentionSpan(), 0)


class _Probe:
    """Learns how far back each layer sees, from the mask that stock attention would have used."""

    def __init__(self, cache: _ProbeCache) -> None:
        self._cache = cache
        self._masks: list[tuple[torch.Tensor, AttentionSpan]] = []
        self.attended: list[int] = []
        self.spans: dict[int, AttentionSpan] = {}
        self.gathered: set[int] = set()

    def saw_mask(self, mask: torch.Tensor, mask_function: Callable[..., torch.Tensor], local_size: int | None) -> None:
        """Keeps the mask, to be recognised by its memory when it arrives at a layer."""
        self._masks.append((mask, _span_of(mask_function, local_size)))

    def saw_attention(
        self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
    ) -> None:
        """Notes which layer's keys are read, whether they are still what the cache was given, and how far back."""
        layer_idx = self._layer_of(key, value)
        if options.get("is_causal") is False:
            raise UnsupportedModelError("Its attention is not causal.")
        span = self._span(mask, options.get("sliding_window"))
        if self.spans.setdefault(layer_idx, span) != span:
            raise UnsupportedModelError(f"Layers that share the keys of layer {layer_idx} see differently far back.")
        self.attended.append(layer_idx)

    def _layer_of(self, key: torch.Tensor, value: torch.Tensor) -> int:
        cache, layer_idx = getattr(key, "_paged", (None, -1))
        if cache is None and self._cache.updates:  # made of what the last layer updated with, or so its check shows
            layer_idx = next(reversed(self._cache.updates))
            self.gathered.add(layer_idx)
        elif cache is not self._cache:
            raise UnsupportedModelError("Its keys don't come from the cache.")
        else:
            cached_key, cached_value = self._cache.updates[layer_idx]
            if key is cached_key and value is not cached_value:  # latents are expanded: neither is what was cached
                self.gathered.add(layer_idx)
        return int(layer_idx)

    def _span(self, mask: torch.Tensor | None, sliding_window: int | None) -> AttentionSpan:
        if mask is None:
            return AttentionSpan(window=sliding_window)
        memory = mask.untyped_storage().data_ptr()
        for known, span in self._masks:
            if known.untyped_storage().data_ptr() == memory:
                return span
        raise UnsupportedModelError("It makes or changes its attention masks itself.")


def _span_of(mask_function: Callable[..., torch.Tensor], local_size: int | None) -> AttentionSpan:
    size = local_size or 4
    positions = torch.tensor(sorted({0, 1, 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1}))
    query, key = positions[:, None], positions[None, :]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    try:
        seen = mask_function(zero, zero, query[None, None], key[None, None])
        seen = torch.as_tensor(seen).expand(1, 1, len(positions), len(positions))[0, 0]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UnsupportedModelError(f"Its attention mask can't be described by a window: {error}") from error
    causal = key <= query
    spans = {AttentionSpan(): causal}
    if local_size is not None:
        spans[AttentionSpan(window=size)] = causal & (key > query - size)
        spans[AttentionSpan(chunk=size)] = causal & (key // size == query // size)
    for span, expected in spans.items():
        if torch.equal(seen, expected):
            return span
    raise UnsupportedModelError("Its attention mask is neither causal, nor a window, nor chunks.")


def accepts_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the model can compute logits for some positions only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go; offloaded models move them from the CPU themselves."""
    device: torch.device = model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device


def probe_layout(model: PreTrainedModel, configs: list[Any], num_tokens: int = _PROBE_TOKENS) -> CacheLayout:
    """The layout of a model. Hold its lock.

    Args:
        model: any causal language model.
        configs: what `switchable_configs` returned.
        num_tokens: length of the forward; the default is as short as masks allow.

    Raises:
        UnsupportedModelError: the model can't run packed; the message says why.
    """
    name = type(model).__name__
    text_config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} can't run packed. It is an encoder-decoder model.")
    layers = row_layers(model.config)
    is_by_row = layers is not None
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if not (takes_positions or is_by_row):
        raise UnsupportedModelError(f"{name} can't run packed. It takes no position_ids.")
    cache = _ProbeCache(layers or [PackedLayer() for _ in range(text_config.num_hidden_layers)])
    probe = _Probe(cache)
    device = input_device(model)
    positions = torch.arange(num_tokens, device=device)[None]
    options = {"logits_to_keep": positions[0, -1:]} if accepts_logits_to_keep(model) else {}
    try:
        with _uncompiled(), torch.no_grad(), paged_attention(configs, model), packed_step(PackedStep(cache, (), probe)):
            model(
                input_ids=torch.zeros_like(positions),
                use_cache=True,
                return_dict=True,
                **{cache_keyword(model): cache},
                **({"position_ids": positions} if takes_positions else {}),
                **options,
            )
    except torch.OutOfMemoryError:
        raise
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} can't run packed. {error}") from error
    except (PagedError, RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise UnsupportedModelError(f"{name} can't run packed: {error}") from error
    states = {key: StateSpec.of(state) for key, state in found_states(cache.layers).items()}
    if not (cache.specs or states) or set(probe.attended) != set(cache.specs):
        raise UnsupportedModelError(
            f"{name} can't run packed. Its layers don't all update and attend through the cache."
        )
    if cache.specs and not takes_positions:
        raise UnsupportedModelError(f"{name} can't run packed. It takes no position_ids.")
    if is_by_row and not states:
        raise UnsupportedModelError(f"{name} can't run packed. Its recurrent layers leave no states in the cache.")
    return CacheLayout.build(cache.specs, probe.spans, tuple(probe.attended), frozenset(probe.gathered), states)


def _uncompiled() -> AbstractContextManager[object]:
    # Compiled parts of a model run as they were written while they are watched. Importing dynamo takes seconds, and a
    # process that hasn't done so has compiled nothing.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def frequency_limit(config: Any) -> int | None:
    """The positions up to which rotary frequencies don't depend on the longest row of a batch; None if they never do.

    "longrope" and "dynamic" frequencies change, for every row, once any row of the forward is longer than what the
    model was first trained on. A packed step has many rows, so it stays below.
    """
    text_config = config.get_text_config(decoder=True)
    parameters = getattr(text_config, "rope_parameters", None) or {}
    kinds = parameters.values() if all(isinstance(value, dict) for value in parameters.values()) else (parameters,)
    limits = []
    for kind in kinds:
        if kind.get("rope_type") in ("longrope", "dynamic"):
            original = kind.get("original_max_position_embeddings")
            original = original or getattr(text_config, "original_max_position_embeddings", None)
            limits.append(int(original or text_config.max_position_embeddings))
    return min(limits, default=None)


def position_limit(model: PreTrainedModel) -> int | None:
    """How many positions a model with a learned position table has; None for all others, which may go on."""
    own = (type(model.config), type(model.config.get_text_config(decoder=True)))
    towers: list[str] = []  # for images or sound, with tables of their own
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not isinstance(module.config, own):
            towers.append(f"{name}.")
        if name.startswith(tuple(towers)):
            continue
        if isinstance(module, torch.nn.Embedding) and name.rsplit(".", 1)[-1] in _POSITION_TABLES:
            return int(module.num_embeddings) - int(getattr(module, "offset", 0))
    return None
