"""Runs one packed step: swaps the attention in, opens the scope, calls the model, swaps it back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged.cache.allocator import BlockAllocator, BlockCopy
from hf_paged.cache.layout import CacheLayout
from hf_paged.cache.row_cache import RowCache, row_layers
from hf_paged.cache.step_cache import StepCache
from hf_paged.cache.storage import KVSpec, LayerStorage
from hf_paged.compat import cache_keyword
from hf_paged.config import QUANTISED_KV_DTYPES, PagedConfig
from hf_paged.engine.adapters import AdapterSwap
from hf_paged.engine.attention_swap import model_lock, paged_attention, switchable_configs
from hf_paged.engine.batch import LogitsRows, PackedBatch, pack
from hf_paged.engine.by_row import equal_rows, joined, state_rows
from hf_paged.engine.probe import accepts_logits_to_keep, probe_layout
from hf_paged.engine.prompt_embeds import embed_inputs, why_no_embeds
from hf_paged.engine.rotary_regimes import find_regimes, own_frequencies
from hf_paged.errors import PackedStepError, UnsupportedModelError
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
            self._configs: list[Any] = self._switchable(model)
            self.layout: CacheLayout = probe_layout(model, self._configs)
        self.device = self.layout.device
        self.backend = resolve_backend(config.attention_backend, self.device)
        self.cache: StepCache | None = None
        self.prefills_whole = False  # see `by_row.py`
        self.rows_on_demand = False  # states get their memory when a sequence first needs one, not with the pool
        self._keeps_logits = accepts_logits_to_keep(model)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._cache_keyword = cache_keyword(model)
        self.linears = LinearSwap(config.linear_backend)
        self.fused = FusedSwap(config.linear_backend)
        self.adapters = AdapterSwap()
        self.regimes = find_regimes(model)
        self._embeds_checked = False
        self._why_no_embeds: str | None = None
        self.look_at_linears()

    @staticmethod
    def _switchable(model: PreTrainedModel) -> list[Any]:
        try:
            return switchable_configs(model)
        except UnsupportedModelError:
            if row_layers(model.config) is None:
                raise
            return []  # perhaps it has no attention at all: the probe will see

    @property
    def mode(self) -> str:
        """How the model runs: "direct", "gather" or "by row"."""
        return self.layout.mode

    def look_at_linears(self) -> None:
        """Finds what of the model may run natively; once a call, since a model may have got other layers."""
        with self.lock:
            self.linears.look(self._get_model())
            self.fused.look(self._get_model(), self.linears)

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
            allocator.group_blocks(spec, num_blocks) * self.group_bytes_per_block(group, allocator.block_size)
            for group, spec in enumerate(self.layout.groups)
        )

    def group_bytes_per_block(self, group: int, block_size: int) -> int:
        """Bytes of one block in all layers of a group; in a group of states, those of one sequence."""
        if group == self.layout.state_group:
            return sum(spec.num_bytes for spec in self.layout.states.values())
        return block_size * self.group_bytes_per_token(group)

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
            layers = row_layers(self._get_model().config) if self.layout.states else None
            if layers is None:
                self.cache = StepCache(self.layout, storages, self.backend)
            else:
                self.cache = RowCache(
                    self.layout, storages, self.backend, layers, 0 if self.rows_on_demand else sizes[-1]
                )
            return
        for index, storage in self.cache.storages.items():
            size = sizes[self.layout.layers[index].group]
            if size > storage.num_blocks:
                storage.grow(size)
        if isinstance(self.cache, RowCache) and not self.rows_on_demand:
            self.cache.grow_rows(sizes[-1])

    def run(self, output: SchedulerOutput) -> tuple[torch.Tensor, tuple[LogitsRows, ...]]:
        """Computes one step.

        Returns:
            Logits `[R, vocab]` float32 and what the rows are.

        Raises:
            PackedStepError: a layer didn't go through the cache as it did when the layout was made.
        """
        assert self.cache is not None
        if isinstance(self.cache, RowCache):
            return self._run_by_row(self.cache, output)
        batch = self._pack(output)
        with self.lock, torch.no_grad():
            return self._forward(batch), batch.rows

    def _pack(self, output: SchedulerOutput) -> PackedBatch:
        num_groups = len(self.layout.groups) - bool(self.layout.states)  # no token goes to a slot of a state
        batch = pack(output, self._config.block_size, num_groups, self.device)
        long_tokens = self.regimes.long_tokens(output.scheduled, self.device)
        return batch if long_tokens is None else replace(batch, long_tokens=long_tokens)

    def _run_by_row(self, cache: RowCache, output: SchedulerOutput) -> tuple[torch.Tensor, tuple[LogitsRows, ...]]:
        parts, all_logits = [], []
        group = len(self.layout.groups) - 1
        with self.lock, torch.no_grad():
            cache.drop_left()
            self._make_room(cache, max(state_rows(output.scheduled, group)) + 1)
            for part in equal_rows(output, prefills_whole=self.prefills_whole):
                batch = self._pack(part.output)
                rows = torch.tensor(state_rows(part.output.scheduled, group), device=self.device)
                with cache.open_rows(rows, is_first=part.is_first):
                    all_logits.append(self._forward(batch, len(part.output.scheduled)))
                parts.append(batch.rows)
            cache.write_back()
        return torch.cat(all_logits), joined(parts, [len(logits) for logits in all_logits])

    def copy_blocks(self, copies: Sequence[Sequence[BlockCopy]]) -> None:
        """Does a step's block copies, one list a group, before its forward."""
        assert self.cache is not None
        if any(copies):
            with self.lock, torch.no_grad():
                if isinstance(self.cache, RowCache):
                    self._make_room(self.cache, max((copy[1] for copy in copies[-1]), default=-1) + 1)
                self.cache.copy_blocks(copies)

    @staticmethod
    def _make_room(cache: RowCache, num_rows: int) -> None:
        # the lowest free row is taken first, so that as many rows are in use as sequences have run at once
        if num_rows > cache.num_rows:
            cache.grow_rows(max(num_rows, 2 * cache.num_rows))

    def _forward(self, batch: PackedBatch, num_rows: int = 1) -> torch.Tensor:
        model = self._get_model()
        step = PackedStep(self.cache, batch.metadata)
        keeps_logits = self._keeps_logits and num_rows == 1
        inputs: dict[str, Any] = {"input_ids": batch.input_ids.view(num_rows, -1), self._cache_keyword: self.cache}
        if self.takes_positions:
            inputs["position_ids"] = batch.position_ids.view(num_rows, -1)
        if keeps_logits:
            inputs["logits_to_keep"] = batch.logits_to_keep
        with (
            self.adapters.installed(model, batch.adapters),
            paged_attention(self._configs, model),
            self.linears.installed(),
            self.fused.installed(),
            own_frequencies(model, self.regimes.limit, batch.long_tokens),
            packed_step(step),
        ):
            if batch.embeds:  # here, where the embedding layer has its rows' adapters
                inputs["inputs_embeds"] = embed_inputs(model, inputs.pop("input_ids"), batch.embeds)
            result = model(use_cache=True, return_dict=True, **inputs)
        self._check_step(step.updated, step.attended)
        logits: torch.Tensor = result.logits.flatten(0, 1)
        if not keeps_logits:
            logits = logits[batch.logits_to_keep.to(logits.device)]
        return logits.float()

    def _check_step(self, updated: Sequence[int], attended: Sequence[int]) -> None:
        if tuple(attended) != self.layout.attended or len(updated) != len(self.layout.layers):
            raise PackedStepError(
                f"A forward of {type(self._get_model()).__name__} updated layers {list(updated)} and attended to "
                f"{list(attended)}, not as its layout says; run it without cache_implementation='paged'."
            )
