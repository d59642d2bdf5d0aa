"""What the native kernels are told about a step: items of work, bundled for the threads.

```
sequence    12 queries, 40 keys, G = 3         36 rows: one item a kv head
            1 query, 600 keys                  3 rows; splits of 256 keys: 0..255, 256..511, 512..599, joined at the end
            300 queries, 300 keys              rows 0..95, 96..191, ...; each item ends at its last query's own key

bundle      items, the most expensive first, until they are worth taking: a thread takes one bundle after another
```

The cut of a sequence follows from its own lengths only. A plan serves all layers of a step that share window, chunk and
heads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.spans import first_visible

SPLIT_KEYS = 256  # a fixed length, not a fixed number: sums must not depend on the batch
BUNDLE_COST = 2048  # products of a row and a key, or as much reading; below it, taking a bundle would cost more
ROWS_PER_READ = 6  # reading a key costs as much as this many products
ENOUGH_ITEMS = 4  # for each thread: with more kv heads in an item some would have none

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """What the compiled kernels say of themselves."""

    max_rows: int
    few_rows: int
    key_tile: int  # keys that are used at a time


class HeadsAtOnce(NamedTuple):
    """How many kv heads of few rows one item may have."""

    most: int
    num_threads: int

    def of(self, num_items: int, num_kv_heads: int) -> int:
        """As many as that, or fewer if there are few items of one head."""
        return max(1, min(self.most, num_kv_heads, num_items * num_kv_heads // (ENOUGH_ITEMS * self.num_threads)))


@dataclass(frozen=True, eq=False)
class Plan:
    """Arrays in the layout of the C structures, and where they are."""

    items: IntArray  # [num_items, 12], see `Item` in attention.c
    bundles: IntArray  # [num_bundles + 1]
    joins: IntArray  # [num_joins, 6], see `Join`
    num_partial_rows: int
    block_table: torch.Tensor  # [S, max_blocks] int32, the last dimension contiguous
    addresses: tuple[int, int, int]  # of items, bundles and joins


def plan_of(
    metadata: AttentionMetadata,
    window: int | None,
    chunk: int | None,
    num_kv_heads: int,
    group_size: int,
    limits: Limits,
    heads: HeadsAtOnce,
) -> Plan:
    """The plan of a step, made by the first layer that asks."""
    key = ("native", window, chunk, num_kv_heads, group_size, heads)
    plan = metadata.plans.get(key)
    if not isinstance(plan, Plan):
        plan = metadata.plans[key] = _make_plan(metadata, window, chunk, num_kv_heads, group_size, limits, heads)
    return plan


def _make_plan(
    metadata: AttentionMetadata,
    window: int | None,
    chunk: int | None,
    num_kv_heads: int,
    group_size: int,
    limits: Limits,
    heads_at_once: HeadsAtOnce,
) -> Plan:
    query_lens = np.array(metadata.query_lens, dtype=np.int64)
    kv_lens = np.array(metadata.kv_lens, dtype=np.int64)

    # Segments: runs of rows of one sequence.
    all_rows = query_lens * group_size
    sequence, index = _repeat(-(-all_rows // limits.max_rows))
    row_begin = index * limits.max_rows
    row_end = np.minimum(row_begin + limits.max_rows, all_rows[sequence])
    position = (kv_lens - query_lens)[sequence]
    first_query = position + row_begin // group_size
    key_begin = first_visible(first_query, window, chunk)
    key_end = position + (row_end - 1) // group_size + 1

    # Splits. Sequences of several segments have enough items as they are.
    num_splits = np.where(all_rows[sequence] <= limits.max_rows, -(-(key_end - key_begin) // SPLIT_KEYS), 1)
    num_rows = row_end - row_begin
    partial_rows = np.where(num_splits > 1, num_splits * num_rows, 0) * num_kv_heads
    first_partial = np.cumsum(partial_rows) - partial_rows
    segment, split = _repeat(num_splits)
    is_split = num_splits[segment] > 1
    split_begin = key_begin[segment] + split * SPLIT_KEYS
    split_end = np.where(is_split, np.minimum(split_begin + SPLIT_KEYS, key_end[segment]), key_end[segment])
    token = (np.cumsum(query_lens) - query_lens)[sequence]

    # The most expensive first: the last ones to be taken are short then, and threads end together.
    cost = (num_rows[segment] + ROWS_PER_READ) * (split_end - split_begin)
    order = np.argsort(-cost, kind="stable")
    # Where rows are few, several kv heads are one item.
    heads_each = np.where(num_rows[segment] <= limits.few_rows, heads_at_once.of(len(segment), num_kv_heads), 1)[order]
    which, part = _repeat(-(-num_kv_heads // heads_each))
    order, heads_each = order[which], heads_each[which]
    first_head = part * heads_each
    num_heads = np.minimum(heads_each, num_kv_heads - first_head)
    segment, split, cost = segment[order], split[order], cost[order] * num_heads
    split_begin, split_end, is_split = split_begin[order], split_end[order], is_split[order]

    partial_stride = num_splits[segment] * num_rows[segment]
    partial = first_partial[segment] + first_head * partial_stride + split * num_rows[segment]
    columns = (
        *(sequence[segment], token[segment], position[segment], row_begin[segment], row_end[segment]),
        *(split_begin, split_end, np.where(is_split, partial, -1), partial_stride, split == 0, first_head, num_heads),
    )
    items = np.empty((len(segment), len(columns)), dtype=np.int64)
    for number, column in enumerate(columns):
        items[:, number] = column

    joined = np.flatnonzero(num_splits > 1)
    heads = np.arange(num_kv_heads)
    joins = np.empty((len(joined), num_kv_heads, 6), dtype=np.int64)
    for number, column in enumerate((token[joined], row_begin[joined], row_end[joined])):
        joins[:, :, number] = column[:, None]
    joins[:, :, 3] = heads
    joins[:, :, 4] = first_partial[joined, None] + heads * (num_splits * num_rows)[joined, None]
    joins[:, :, 5] = num_splits[joined, None]

    # A bundle ends where the sum of costs passes a multiple of what one should cost.
    number = (np.cumsum(cost) - cost) // BUNDLE_COST
    bundles = np.concatenate([[0], np.flatnonzero(np.diff(number)) + 1, [len(cost)]]).astype(np.int64)

    table = metadata.block_table
    if table.stride(1) != 1 or table.dtype != torch.int32:
        table = table.to(torch.int32).contiguous()
    addresses = tuple(array.ctypes.data_as(ctypes.c_void_p).value or 0 for array in (items, bundles, joins))
    return Plan(items, bundles, joins, int(partial_rows.sum()), table, addresses)  # type: ignore[arg-type]


def _repeat(counts: IntArray) -> tuple[IntArray, IntArray]:
    """[2, 1, 3] -> which [0, 0, 1, 2, 2, 2], and the how-manieth of it [0, 1, 0, 0, 1, 2]."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
