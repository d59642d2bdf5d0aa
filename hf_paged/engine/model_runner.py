"""Runs one packed step: swaps the attention in, opens the scope, calls the model, swaps it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged.cache.allocator import BlockAllocator, BlockCopy
from hf_paged.cache.layout import CacheLayout
from hf_paged.cache.step_cache import StepCache
from hf_paged.cache.storage import KVSpec, LayerStorage
from hf_paged.compat import CACHE_KEYWORD
from hf_paged.config import QUANTISED_KV_DTYPES, PagedConfig
from hf_paged.engine.adapters import AdapterSwap
from hf_paged.engine.attention_swap import model_lock, paged_attention, switchable_configs
from hf_paged.engine.batch import LogitsRows, PackedBatch, pack
from hf_paged.engine.probe import accepts_logits_to_keep, probe_layout
from hf_paged.engine.prompt_embeds import embed_inputs, why_no_embeds
from hf_paged.errors import PackedStepError
from hf_paged.fused.swap import FusedSwap
from hf_paged.kernels.metadata import PackedStep, packed_step
from hf_paged.kernels.registry import resolve_backend
from hf_paged.linears.swap import LinearSwap
from hf_paged.scheduler.output import SchedulerOutput


class ModelRunner:
    """The model, its cache layout and the pool's tensors.

    Args:
        get_model: returns the model. The runner doesn't hold it, so that an engine kept beside a model doesn't keep it.
        config: the engine's settings.

    Raises:
        UnsupportedModelError: the model can't run packed.
        ConfigError: the attention backend is unknown or can't run here, or the linear backend can't.
    """

    def __init__(self, get_model: Callable[[], PreTrainedModel], config: PagedConfig) -> None:
        self._get_model = get_model
        self._config = config
        model = get_model()
        self.lock = model_lock(model)
        with self.lock:
            self._configs: list[Any] = switchable_configs(model)
            self.layout: CacheLayout = probe_layout(model, self._configs)
        self.device = next(iter(self.layout.layers.values())).spec.device
        self.backend = resolve_backend(config.attention_backend, self.device)
        self.cache: StepCache | None = None
        self._keeps_logits = accepts_logits_to_keep(model)
        self.linears = LinearSwap(config.linear_backend)
        self.fused = FusedSwap(config.linear_backend)
        self.adapters = AdapterSwap()
        self._embeds_checked = False
        self._why_no_embeds: str | None = None
        self.look_at_linears()

    def look_at_linears(self) -> None:
        """Finds what of the model may run natively; once a call, since a model may have got other layers."""
        with self.lock:
            self.linears.look(self._get_model())
            self.fused.look(self._get_model())

    def probe(self, num_tokens: int) -> None:
        """Runs a forward of `num_tokens` tokens that touches no pool, to see what a step allocates."""
        with self.lock:
            probe_layout(self._get_model(), self._configs, num_tokens)

    def require_adapter(self, name: str) -> None:
        """Raises RequestError if a request can't name this adapter."""
        with self.lock:
            self.adapters.require(self._get_model(), name, self.probe)

    def why_no_adapters(self) -> str | None:
        """Why requests can't name an adapter each, or None if they can."""
        with self.lock:
            return self.adapters.why_not(self._get_model(), self.probe)

    def why_no_embeds(self) -> str | None:
        """Why prompts can't be given as embeddings, or None if they can. Found out once."""
        if not self._embeds_checked:
            with self.lock:
                self._why_no_embeds = why_no_embeds(self._get_model(), self.device)
            self._embeds_checked = True
        return self._why_no_embeds

    def pool_bytes(self, allocator: BlockAllocator, num_blocks: int) -> int:
        """Bytes of a pool of `num_blocks` blocks of full context, all groups together."""
        return sum(
            allocator.group_blocks(spec, num_blocks) * allocator.block_size * self.group_bytes_per_token(group)
            for group, spec in enumerate(self.layout.groups)
        )

    def group_bytes_per_token(self, group: int) -> int:
        """Bytes of one token in all layers of a group, as stored."""
        return sum(self.stored_spec(index).bytes_per_token for index in self.layout.group_layers(group))

    def stored_spec(self, layer_idx: int, *, quantised: bool = True) -> KVSpec:
        """What the pool holds of a layer: the model's shapes, the config's types.

        Args:
            layer_idx: a layer of the layout.
            quantised: False keeps the model's types where the config asks for quantised ones.
        """
        k_dtype, v_dtype = (
            "auto" if name in QUANTISED_KV_DTYPES and not quantised else name
            for name in (self._config.k_dtype, self._config.v_dtype)
        )
        return self.layout.layers[layer_idx].spec.stored_as(k_dtype, v_dtype)

    def allocate_pool(self, allocator: BlockAllocator, num_blocks: int, *, quantised: bool = True) -> None:
        """Makes the block tensors for `num_blocks` blocks of full context, or makes them larger.

        Args:
            allocator: knows how many blocks of each group that is.
            num_blocks: blocks of full context.
            quantised: see `stored_spec`; for a pool that is made.

        Raises:
            PoolMemoryError: they don't fit; what was there stays usable.
        """
        sizes = [allocator.group_blocks(group, num_blocks) for group in self.layout.groups]
        if self.cache is None:
            storages = {
                index: LayerStorage(
                    self.stored_spec(index, quantised=quantised), sizes[layer.group], allocator.block_size
                )
                for index, layer in self.layout.layers.items()
            }
            self.cache = StepCache(self.layout, storages, self.backend)
            return
        for index, storage in self.cache.storages.items():
            size = sizes[self.layout.layers[index].group]
            if size > storage.num_blocks:
                storage.grow(size)

    def run(self, output: SchedulerOutput) -> tuple[torch.Tensor, tuple[LogitsRows, ...]]:
        """Computes one step.

        Returns:
            Logits `[R, vocab]` float32 and what the rows are.

        Raises:
            PackedStepError: a layer didn't go through the cache as it did when the layout was made.
        """
        assert self.cache is not None
        batch = pack(output, self._config.block_size, len(self.layout.groups), self.device)
        with self.lock, torch.no_grad():
            return self._forward(batch), batch.rows

    def copy_blocks(self, copies: Sequence[Sequence[BlockCopy]]) -> None:
        """Does a step's block copies, one list a group, before its forward."""
        assert self.cache is not None
        if any(copies):
            with self.lock, torch.no_grad():
                self.cache.copy_blocks(copies)

    def _forward(self, batch: PackedBatch) -> torch.Tensor:
        model = self._get_model()
        step = PackedStep(self.cache, batch.metadata)
        with (
            self.adapters.installed(model, batch.adapters),
            paged_attention(self._configs, model),
            self.linears.installed(),
            self.fused.installed(),
            packed_step(step),
        ):
            inputs = {"input_ids": batch.input_ids}
            if batch.embeds:
                inputs = {"inputs_embeds": embed_inputs(model, batch.input_ids, batch.embeds)}
            result = model(
                **inputs,
                position_ids=batch.position_ids,
                use_cache=True,
                return_dict=True,
                **{CACHE_KEYWORD: self.cache},
                **({"logits_to_keep": batch.logits_to_keep} if self._keeps_logits else {}),
            )
        self._check_step(step.updated, step.attended)
        logits: torch.Tensor = result.logits[0]
        if not self._keeps_logits:
            logits = logits[batch.logits_to_keep.to(logits.device)]
        return logits.float()

    def _check_step(self, updated: Sequence[int], attended: Sequence[int]) -> None:
        if tuple(attended) != self.layout.attended or len(updated) != len(self.layout.layers):
            raise PackedStepError(
                f"A forward of {type(self._get_model()).__name__} updated layers {list(updated)} and attended to "
                f"{list(attended)}, not as its layout says; run it without cache_implementation='paged'."
            )
