"""Paged decode: sequences with one new token, or a few, against long cached contexts. Bound by memory.

program (kv head, split, sequence)

  rows    token 0: the G query heads of the kv head │ token 1: G heads │ …   padded to a power of two
  keys    one split of the sequence's                                        each tile read once for all rows
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.triton.arguments import block_arguments, block_constants, feature_constants
from hf_paged.kernels.triton.launch_table import (
    MAX_DECODE_QUERIES,
    MAX_SPLITS,
    converts_e4m3,
    current_arch,
    decode_launch,
)
from hf_paged.kernels.triton.shared import attend_keys, first_visible, start_softmax
from hf_paged.kernels.triton.splits import Partials, join_splits, most_splits, split_length, store_split

# From this many rows on a matrix product pays; it takes 16 rows at least, and float32 has no tensor cores to fill.
_MIN_DOT_ROWS = {2: 1, 4: 5}


@triton.jit
def _decode_kernel(
    out, partial_out, partial_stats, query, keys, values, key_scales, value_scales,
    key_stride, value_stride, key_scale_stride, value_scale_stride,
    sinks, query_start_loc, seq_lens, block_table,
    query_token_stride, query_head_stride, out_stride, table_stride,
    scale, softcap, window, chunk, num_splits,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    MAX_QUERIES: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    CONVERTS_E4M3: tl.constexpr, USE_DOT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    first_token = tl.load(query_start_loc + sequence)
    num_queries = tl.load(query_start_loc + sequence + 1) - first_token
    if (num_queries > MAX_QUERIES) | (num_queries == 0):
        return
    num_keys = tl.load(seq_lens + sequence)
    first_read = first_visible(num_keys - num_queries, window, chunk, HAS_WINDOW, HAS_CHUNK)
    first_key = first_read // TILE * TILE
    length = split_length(num_keys - first_key, TILE, SPLIT, MAX_SPLITS)
    begin = first_key + split * length
    if begin >= num_keys:
        return

    row = tl.arange(0, M)
    index = row // GROUP  # of the row's token among the sequence's
    is_row = index < num_queries
    index = tl.minimum(index, num_queries - 1)
    head = kv_head * GROUP + row % GROUP
    token = (first_token + index).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    query_tile = tl.load(
        query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + dims[None, :],
        mask=is_row[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    highest, total = start_softmax(sinks, head, is_row, split == 0, M, HAS_SINKS)
    highest, total, result = attend_keys(
        query_tile, highest, total, tl.zeros([M, BLOCK_DV], tl.float32),
        begin, tl.minimum(begin + length, num_keys), first_read, num_keys, num_keys - num_queries + index,
        block_table + sequence.to(tl.int64) * table_stride,
        keys + kv_head * D, values + kv_head * DV, key_scales if KEY_FORMAT == "plain" else key_scales + kv_head,
        value_scales if VALUE_FORMAT == "plain" else value_scales + kv_head,
        key_stride, value_stride, key_scale_stride, value_scale_stride, scale, softcap, window, chunk,
        D, BLOCK_D, DV, BLOCK_DV, TILE, BLOCK_SIZE, KEY_FORMAT, VALUE_FORMAT, CONVERTS_E4M3,
        HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, USE_DOT, True,
    )  # fmt: skip
    store_split(
        out + token[:, None] * out_stride + head[:, None] * DV + tl.arange(0, BLOCK_DV)[None, :],
        partial_out, partial_stats, (sequence * MAX_QUERIES + index) * (GROUP * NUM_KV_HEADS) + head, is_row,
        split, num_splits, num_keys - first_key <= length, highest, total, result, DV, BLOCK_DV,
    )  # fmt: skip


def attend_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    blocks: KVBlocks,
    metadata: AttentionMetadata,
    params: AttentionParams,
    max_queries: int,
    max_keys: int,
) -> None:
    """Attends for the sequences with at most MAX_DECODE_QUERIES new tokens; others are left alone.

    Args:
        out: `[T, Hq, Dv]`, contiguous, written to.
        query: `[T, Hq, D]`, its last dimension contiguous.
        blocks, metadata, params: as in `AttentionBackend.attend`.
        max_queries: most new tokens of such a sequence in the batch.
        max_keys: most keys of such a sequence; a larger number costs programs that end at once.
    """
    num_heads, num_kv_heads = query.shape[1], blocks.keys.shape[2]
    group = num_heads // num_kv_heads
    arch = current_arch(query.device)
    launch = decode_launch(arch, query.element_size(), max(query.shape[2], out.shape[2]), blocks.is_quantised)
    if max_queries > 1:
        max_queries = MAX_DECODE_QUERIES
    num_rows = max_queries * group
    use_dot = num_rows >= _MIN_DOT_ROWS[query.element_size()]
    num_sequences = metadata.seq_lens.shape[0]
    num_splits = most_splits(max_keys, max_queries, launch.tile, launch.split, params)
    partials = Partials.empty(num_sequences * max_queries * num_heads, num_splits, out.shape[2], out.device)
    _decode_kernel[(num_kv_heads, num_splits, num_sequences)](
        out, partials.out, partials.stats, query, *block_arguments(blocks),
        params.sinks, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
        query.stride(0), query.stride(1), out.stride(0), metadata.block_table.stride(0),
        params.scale, params.softcap or 0.0, params.window or 0, params.chunk or 0, num_splits,
        GROUP=group, **block_constants(blocks), **feature_constants(params), MAX_QUERIES=max_queries,
        M=max(16 if use_dot else 1, triton.next_power_of_2(num_rows)),
        TILE=launch.tile, SPLIT=launch.split, MAX_SPLITS=MAX_SPLITS,
        CONVERTS_E4M3=converts_e4m3(arch), USE_DOT=use_dot,
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if num_splits > 1:
        join_splits(
            out, partials, metadata.query_start_loc, metadata.seq_lens, max_queries=max_queries, tile=launch.tile,
            split=launch.split, window=params.window, chunk=params.chunk,
        )  # fmt: skip
