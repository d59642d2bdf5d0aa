"""Paged prefill: ragged queries against cached context and their own tokens, causal. Bound by matrix products.

    program (query block, kv head)

      sequence a, 5 queries    ├ block 0 ┼ block 1 ┼ 2 ┤           BLOCK_Q tokens a block; a sequence's last is short
      sequence b, 2 queries                             ├ 3 ┤
      rows of a block          token 0: G query heads │ token 1: G heads │ …
      keys                     .....│ seen by all rows │ diagonal │         masks only where a row's view ends

There is one program for every block that T tokens of S sequences could need, T // BLOCK_Q + S: the grid follows from
shapes alone, and a program finds its sequence by binary search.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.triton.arguments import block_arguments, block_constants, feature_constants
from hf_paged.kernels.triton.launch_table import MAX_DECODE_QUERIES, converts_e4m3, current_arch, prefill_launch
from hf_paged.kernels.triton.shared import attend_keys, first_visible, start_softmax


@triton.jit
def sequence_of_block(query_start_loc, block, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence s that query block `block` belongs to: the last one with start // BLOCK_Q + s <= block."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        first_block = tl.load(query_start_loc + middle) // BLOCK_Q + middle
        if first_block <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _prefill_kernel(
    out, query, keys, values, key_scales, value_scales,
    key_stride, value_stride, key_scale_stride, value_scale_stride,
    sinks, query_start_loc, seq_lens, block_table,
    query_token_stride, query_head_stride, out_stride, table_stride,
    scale, softcap, window, chunk, num_sequences,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    MIN_QUERIES: tl.constexpr, BLOCK_Q: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    CONVERTS_E4M3: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest context of a prompt first: it ends last
    sequence = sequence_of_block(query_start_loc, block, num_sequences, BLOCK_Q)
    sequence_start = tl.load(query_start_loc + sequence)
    num_queries = tl.load(query_start_loc + sequence + 1) - sequence_start
    first_query = (block - sequence_start // BLOCK_Q - sequence) * BLOCK_Q
    if (num_queries < MIN_QUERIES) | (first_query >= num_queries):
        return
    num_keys = tl.load(seq_lens + sequence)

    row = tl.arange(0, M)
    is_row = (row < BLOCK_Q * GROUP) & (first_query + row // GROUP < num_queries)
    last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    index = tl.minimum(first_query + row // GROUP, last_query)
    head = kv_head * GROUP + row % GROUP
    token = (sequence_start + index).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    query_tile = tl.load(
        query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + dims[None, :],
        mask=is_row[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    position = num_keys - num_queries + index
    first_position = num_keys - num_queries + first_query
    last_position = num_keys - num_queries + last_query
    first_read = first_visible(first_position, window, chunk, HAS_WINDOW, HAS_CHUNK)

    # Tiles that every row sees whole lie between the last row's first key and the first row's own.
    first_key = first_read // TILE * TILE
    full_begin = first_key
    if HAS_WINDOW or HAS_CHUNK:
        full_begin = tl.cdiv(first_visible(last_position, window, chunk, HAS_WINDOW, HAS_CHUNK), TILE) * TILE
    full_end = (first_position + 1) // TILE * TILE
    full_begin = tl.minimum(full_begin, tl.cdiv(last_position + 1, TILE) * TILE)
    full_end = tl.maximum(full_end, full_begin)

    table = block_table + sequence.to(tl.int64) * table_stride
    keys += kv_head * D
    values += kv_head * DV
    if KEY_FORMAT != "plain":
        key_scales += kv_head
    if VALUE_FORMAT != "plain":
        value_scales += kv_head
    highest, total = start_softmax(sinks, head, is_row, True, M, HAS_SINKS)
    result = tl.zeros([M, BLOCK_DV], tl.float32)
    if HAS_WINDOW or HAS_CHUNK:
        highest, total, result = attend_keys(
            query_tile, highest, total, result, first_key, full_begin, first_read, last_position + 1, position,
            table, keys, values, key_scales, value_scales,
            key_stride, value_stride, key_scale_stride, value_scale_stride, scale, softcap, window, chunk,
            D, BLOCK_D, DV, BLOCK_DV, TILE, BLOCK_SIZE, KEY_FORMAT, VALUE_FORMAT, CONVERTS_E4M3,
            HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, True, True,
        )  # fmt: skip
    highest, total, result = attend_keys(
        query_tile, highest, total, result, full_begin, full_end, first_read, last_position + 1, position,
        table, keys, values, key_scales, value_scales,
        key_stride, value_stride, key_scale_stride, value_scale_stride, scale, softcap, window, chunk,
        D, BLOCK_D, DV, BLOCK_DV, TILE, BLOCK_SIZE, KEY_FORMAT, VALUE_FORMAT, CONVERTS_E4M3,
        HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, True, False,
    )  # fmt: skip
    highest, total, result = attend_keys(
        query_tile, highest, total, result, full_end, last_position + 1, first_read, last_position + 1, position,
        table, keys, values, key_scales, value_scales,
        key_stride, value_stride, key_scale_stride, value_scale_stride, scale, softcap, window, chunk,
        D, BLOCK_D, DV, BLOCK_DV, TILE, BLOCK_SIZE, KEY_FORMAT, VALUE_FORMAT, CONVERTS_E4M3,
        HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, True, True,
    )  # fmt: skip

    value_dims = tl.arange(0, BLOCK_DV)
    tl.store(
        out + token[:, None] * out_stride + head[:, None] * DV + value_dims[None, :],
        (result / total[:, None]).to(out.dtype.element_ty),
        mask=is_row[:, None] & (value_dims < DV)[None, :],
    )


def attend_prefill(
    out: torch.Tensor, query: torch.Tensor, blocks: KVBlocks, metadata: AttentionMetadata, params: AttentionParams
) -> None:
    """Attends for the sequences with more than MAX_DECODE_QUERIES new tokens; others are left alone.

    Args:
        out: `[T, Hq, Dv]`, contiguous, written to.
        query: `[T, Hq, D]`, its last dimension contiguous.
        blocks, metadata, params: as in `AttentionBackend.attend`.
    """
    group = query.shape[1] // blocks.keys.shape[2]
    arch = current_arch(query.device)
    launch = prefill_launch(arch, query.element_size(), max(query.shape[2], out.shape[2]), blocks.is_quantised)
    rows = max(launch.rows, triton.next_power_of_2(group))
    block_q = rows // group
    num_sequences = metadata.seq_lens.shape[0]
    _prefill_kernel[(blocks.keys.shape[2], query.shape[0] // block_q + num_sequences)](
        out, query, *block_arguments(blocks),
        params.sinks, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
        query.stride(0), query.stride(1), out.stride(0), metadata.block_table.stride(0),
        params.scale, params.softcap or 0.0, params.window or 0, params.chunk or 0, num_sequences,
        GROUP=group, **block_constants(blocks), **feature_constants(params), MIN_QUERIES=MAX_DECODE_QUERIES + 1,
        BLOCK_Q=block_q, M=rows, TILE=launch.tile, CONVERTS_E4M3=converts_e4m3(arch),
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
