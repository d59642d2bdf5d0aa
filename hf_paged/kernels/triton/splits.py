"""Split-KV: how the keys of a sequence are cut, and the kernel that joins what the splits found.

    keys of one sequence   ├──── split 0 ────┼──── split 1 ────┼─ split 2 ─┤      begin at a tile; the window's first,
                                 m, l, out         m, l, out      m, l, out       if there is one
                                     └─────────────── join ───────────┘           one split: written directly, no join

A split has a fixed length. It grows only with the sequence's own length, past MAX_SPLITS of them. So the sums of a
sequence are the same whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hf_paged.kernels.metadata import AttentionParams
from hf_paged.kernels.triton.launch_table import MAX_SPLITS
from hf_paged.kernels.triton.shared import first_visible


@triton.jit
def split_length(num_keys, TILE: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys a split, a multiple of TILE, for a sequence with `num_keys` keys from its first tile on."""
    return tl.maximum(SPLIT, tl.cdiv(tl.cdiv(num_keys, MAX_SPLITS), TILE) * TILE)


def most_splits(max_keys: int, max_queries: int, tile: int, split: int, params: AttentionParams) -> int:
    """Splits of the longest sequence there may be: of `max_keys` keys, as far as `max_queries` queries see back."""
    reach = max_keys
    for span in (params.window, params.chunk):
        if span is not None:  # one tile more, since the first one begins before the first key
            reach = min(reach, span + max_queries - 1 + tile)
    return min(MAX_SPLITS, -(-reach // split))


@dataclass(frozen=True, eq=False)
class Partials:
    """What splits leave for the join. R is rows: sequences * queries a sequence, at most, * query heads."""

    out: torch.Tensor  # [R, num_splits, Dv] float32, not yet divided by the sum
    stats: torch.Tensor  # [R, num_splits, 2] float32: the highest score, times log2(e), and the sum of weights
    num_splits: int

    @classmethod
    def empty(cls, num_rows: int, num_splits: int, value_dim: int, device: torch.device) -> Partials:
        """Uninitialised; with a single split there is nothing to join, and nothing is held."""
        if num_splits == 1:
            num_rows = 0
        return cls(
            torch.empty((num_rows, num_splits, value_dim), dtype=torch.float32, device=device),
            torch.empty((num_rows, num_splits, 2), dtype=torch.float32, device=device),
            num_splits,
        )


@triton.jit
def store_split(
    out_pointers, partial_out, partial_stats, rows, is_row, split, num_splits, is_only,
    highest, total, out, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Stores [M, BLOCK_DV] results: as the final ones where the split is the sequence's only one, else for the join."""
    dims = tl.arange(0, BLOCK_DV)
    mask = is_row[:, None] & (dims < DV)[None, :]
    if is_only:
        final = (out / total[:, None]).to(out_pointers.dtype.element_ty)
        tl.store(out_pointers, final, mask=mask)
    else:
        item = rows.to(tl.int64) * num_splits + split
        tl.store(partial_out + item[:, None] * DV + dims[None, :], out, mask=mask)
        tl.store(partial_stats + item * 2, highest, mask=is_row)
        tl.store(partial_stats + item * 2 + 1, total, mask=is_row)


@triton.jit
def _join_kernel(
    out, partial_out, partial_stats, query_start_loc, seq_lens, out_stride, window, chunk, num_splits,
    NUM_HEADS: tl.constexpr, MAX_QUERIES: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1) // MAX_QUERIES
    index = tl.program_id(1) % MAX_QUERIES
    first_token = tl.load(query_start_loc + sequence)
    num_queries = tl.load(query_start_loc + sequence + 1) - first_token
    if (index >= num_queries) | (num_queries > MAX_QUERIES):
        return
    num_keys = tl.load(seq_lens + sequence)
    first_key = first_visible(num_keys - num_queries, window, chunk, HAS_WINDOW, HAS_CHUNK) // TILE * TILE
    count = tl.cdiv(num_keys - first_key, split_length(num_keys - first_key, TILE, SPLIT, MAX_SPLITS))
    if count == 1:
        return

    row = (tl.program_id(1) * NUM_HEADS + head).to(tl.int64)
    splits = tl.arange(0, MAX_SPLITS)
    is_split = splits < count
    items = row * num_splits + splits
    highest = tl.load(partial_stats + items * 2, mask=is_split, other=float("-inf"))
    total = tl.load(partial_stats + items * 2 + 1, mask=is_split, other=0.0)
    weights = tl.exp2(highest - tl.max(highest, axis=0))
    dims = tl.arange(0, BLOCK_DV)
    mask = is_split[:, None] & (dims < DV)[None, :]
    partial = tl.load(partial_out + items[:, None] * DV + dims[None, :], mask=mask, other=0.0)
    joined = tl.sum(partial * weights[:, None], axis=0) / tl.sum(total * weights, axis=0)
    pointers = out + (first_token + index).to(tl.int64) * out_stride + head * DV + dims
    tl.store(pointers, joined.to(out.dtype.element_ty), mask=dims < DV)


def join_splits(
    out: torch.Tensor,
    partials: Partials,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_queries: int,
    tile: int,
    split: int,
    window: int | None,
    chunk: int | None,
) -> None:
    """Joins the splits of every sequence with at most `max_queries` queries and more than one split.

    Args:
        out: `[T, Hq, Dv]`, contiguous; rows that were written directly stay.
        partials: of rows (sequence, query of it, head).
        query_start_loc: `[S + 1]`.
        seq_lens: `[S]`.
        max_queries, tile, split, window, chunk: as the splits were made with.
    """
    num_heads, value_dim = out.shape[1:]
    _join_kernel[(num_heads, seq_lens.shape[0] * max_queries)](
        out, partials.out, partials.stats, query_start_loc, seq_lens, out.stride(0), window or 0, chunk or 0,
        partials.num_splits,
        NUM_HEADS=num_heads, MAX_QUERIES=max_queries, DV=value_dim, BLOCK_DV=triton.next_power_of_2(value_dim),
        TILE=tile, SPLIT=split, MAX_SPLITS=MAX_SPLITS, HAS_WINDOW=window is not None, HAS_CHUNK=chunk is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
