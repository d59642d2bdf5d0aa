"""A cache that the caller gives: its K and V become a sequence's first tokens, and what is computed then goes back.

columns of the cache     . . a a a a            row a: 2 of padding, 4 tokens       given: positions 0 to 3
the call's ids           . . a a a a x y        x and y are computed                 num_tokens 6
blocks of row a          [ a a a a ] [ x y . . ]
back into the cache                  x y and what was generated, all but the last token

Nothing says that the K and V are those of the tokens in `input_ids`: stock doesn't ask, so neither does the engine.
Such sequences neither look for cached prefixes nor leave any, and after a preemption they begin from the cache again.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_paged.cache.allocator import BlockGroup
from hf_paged.cache.layout import CacheLayout
from hf_paged.cache.paged_cache import PagedKVCache, PagedLayer, PagedSlidingLayer
from hf_paged.cache.step_cache import StepCache
from hf_paged.cache.storage import KVSpec
from hf_paged.engine.model_runner import ModelRunner
from hf_paged.scheduler.output import ScheduledSequence

_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, PagedLayer, PagedSlidingLayer)


@dataclass(frozen=True)
class GivenRow:
    """Row `row` of a cache, from column `first_column` on: `num_tokens` tokens, at least one."""

    cache: Cache
    row: int
    first_column: int
    num_tokens: int


def why_not_given(cache: Any, layout: CacheLayout, num_rows: int, first_columns: SequenceOf[int]) -> str | None:
    """Why sequences of a model can't go on from a cache, or None if they can.

    Args:
        cache: what the caller gave.
        layout: the model's.
        num_rows: rows of the call.
        first_columns: the first column of each row that isn't padding.
    """
    if type(cache) not in (DynamicCache, PagedKVCache) or getattr(cache, "offloading", False):
        return f"a {type(cache).__name__} of one's own"
    if layout.states:
        return "a cache with recurrent states"
    if any(type(layer) not in _PLAIN_LAYERS for layer in cache.layers):
        return "a cache with other layers than those of plain attention"
    if any(getattr(layer, "record_past", False) for layer in cache.layers):
        return "a cache that records what falls behind its windows"
    length = int(cache.get_seq_length())
    if length == 0:
        return None
    for layer_idx, held in layout.layers.items():
        layer: Any = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
        if layer is None or int(layer.get_seq_length()) != length:
            return "a cache whose layers differ in length"
        keys, values = layer.keys, layer.values
        if keys.shape[0] != num_rows:
            return f"a cache of {keys.shape[0]} rows for {num_rows} rows of ids"
        if KVSpec.of(keys, values) != held.spec:
            return "a cache of other shapes or types than the model's"
        missing = length - keys.shape[2]  # columns behind the layer's window
        group = layout.groups[held.group]
        if any(missing > first + _first_needed(group, length - first) for first in first_columns):
            return "a cache that has given up tokens which the model still sees"
    return None


def _first_needed(group: BlockGroup, num_tokens: int) -> int:
    return group.first_needed_token(max(0, num_tokens))


def load_given(runner: ModelRunner, scheduled: SequenceOf[ScheduledSequence]) -> None:
    """Writes the K and V that sequences were given into blocks that they have just got, before their first forward."""
    rows: dict[int, list[ScheduledSequence]] = {}
    for item in scheduled:
        given = item.sequence.request.given
        if given is not None and item.sequence.num_computed_tokens == given.num_tokens:
            rows.setdefault(id(given.cache), []).append(item)
    with torch.no_grad():
        for items in rows.values():
            assert runner.cache is not None
            _load(runner.cache, items)


def _load(pool: StepCache, items: SequenceOf[ScheduledSequence]) -> None:
    cache = items[0].sequence.request.given.cache
    for layer_idx, held in pool.layout.layers.items():
        layer, storage = cache.layers[layer_idx], pool.storages[layer_idx]
        device, size = storage.spec.device, storage.block_size
        keys, values = layer.keys, layer.values  # gathered at each call
        missing = layer.get_seq_length() - keys.shape[2]
        new_keys, new_values, slots = [], [], []
        for item in items:
            given, table = item.sequence.request.given, item.sequence.block_tables[held.group]
            positions = torch.arange(table.num_released * size, given.num_tokens, device=device)
            columns = positions + given.first_column - missing
            new_keys.append(_tokens(keys[given.row], columns))
            new_values.append(_tokens(values[given.row], columns))
            blocks = torch.tensor(table.blocks, device=device)
            slots.append(blocks[positions // size] * size + positions % size)
        pool.backend.write(storage.blocks, torch.cat(new_keys), torch.cat(new_values), torch.cat(slots))


def _tokens(row: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    # [H, L, D] -> [n, H, D]; zeros for what is behind the window but in a block with what isn't: masked, but never NaN
    found = row.index_select(1, columns.clamp_min(0).to(row.device)).transpose(0, 1)
    return found.masked_fill((columns < 0)[:, None, None], 0)
