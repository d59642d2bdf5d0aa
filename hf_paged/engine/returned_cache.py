"""The cache that `generate(..., return_dict_in_generate=True)` returns, for a later call to continue from.

rows in the pool         row a: 5 tokens        row b: 3 tokens
as stock has them        a a a a a              padded on the left; the padding is masked in the next call too
                         0 0 b b b
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from hf_paged.cache.block_table import RELEASED
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.cache.row_cache import RowCache, load_rows
from hf_paged.cache.step_cache import StepCache
from hf_paged.kernels.quantise import dequantise, raw_bytes
from hf_paged.request import Sequence, SequenceState


def copy_rows(pool: StepCache, config: Any, sequences: SequenceOf[Sequence], width: int) -> Cache | None:
    """A cache of its own with the K and V of running sequences: a PagedKVCache, or stock's where there are states too.

    Args:
        pool: the engine's cache.
        config: the model's config.
        sequences: the rows, all computed up to their last token but one.
        width: tokens a row, left padding included, as the next call's attention_mask counts them.

    Returns:
        The cache; None if a row was preempted meanwhile, so that its K and V are gone.
    """
    if any(sequence.state is not SequenceState.RUNNING for sequence in sequences):
        return None
    cache: Cache = PagedKVCache(config, block_size=_block_size(pool))
    with torch.no_grad():
        if isinstance(pool, RowCache):
            cache = DynamicCache(config=config)
            rows = torch.tensor([sequence.block_tables[_num_groups(pool)].blocks[0] for sequence in sequences])
            load_rows(cache.layers, {key: storage.read(rows) for key, storage in pool.states.items()})
        for layer_idx, key, value in dense_rows(pool, sequences, 0, width):
            cache.update(key, value, layer_idx)
    return cache


def dense_rows(
    pool: StepCache, sequences: SequenceOf[Sequence], start: int, width: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Layers with their K `[B, H, width - start, D]` and V of running sequences, as a padded batch has them.

    Args:
        pool: the engine's cache.
        sequences: the rows, all computed up to their last token but one.
        start: columns to leave out.
        width: columns of the batch, padding on the left included.
    """
    num_groups = _num_groups(pool)
    slots = [_slots(sequences, group, width, _block_size(pool))[:, start:] for group in range(num_groups)]
    for layer_idx, storage in sorted(pool.storages.items()):
        rows = slots[pool.layer(layer_idx).group].to(storage.spec.device)
        blocks, spec = storage.blocks, pool.layer(layer_idx).spec
        key = _dense(blocks.key_slots, blocks.key_scale_slots, rows, spec.key_dtype)
        value = _dense(blocks.value_slots, blocks.value_scale_slots, rows, spec.value_dtype)
        yield layer_idx, key, value


def _num_groups(pool: StepCache) -> int:
    return len(pool.layout.groups) - bool(pool.layout.states)


def _block_size(pool: StepCache) -> int:
    return next((storage.block_size for storage in pool.storages.values()), 1)


def _slots(sequences: SequenceOf[Sequence], group: int, width: int, block_size: int) -> torch.Tensor:
    # [B, width]: the slot of every token, -1 for padding and for what went back behind a window
    slots = np.full((len(sequences), width), RELEASED, dtype=np.int64)
    for row, sequence in zip(slots, sequences, strict=True):
        blocks = np.frombuffer(sequence.block_tables[group].blocks, dtype=np.int32).astype(np.int64)
        positions = np.arange(sequence.num_computed_tokens)
        owner = blocks[positions // block_size]
        row[width - len(positions) :] = np.where(
            owner == RELEASED, RELEASED, owner * block_size + positions % block_size
        )
    return torch.from_numpy(slots)


def _dense(stored: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # [num_slots, H, D], [num_slots, H] and [B, L] -> [B, H, L, D]
    index = slots.clamp_min(0)
    rows = dequantise(raw_bytes(stored)[index].view(stored.dtype), None if scales is None else scales[index], dtype)
    return rows.masked_fill((slots == RELEASED)[..., None, None], 0).transpose(1, 2)
