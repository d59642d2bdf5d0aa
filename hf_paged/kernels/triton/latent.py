"""Paged latent attention: all heads read one latent and one rotary key a token, and the latents are the values, too.

    program (head block, split or 0, sequence or query block)

      rows    token 0: HEADS query heads │ token 1: the same heads │ …       BLOCK_Q tokens
      keys    a tile of latents [TILE, R] and of rotary keys [TILE, P]        each read once for all rows

      scores = query_latent . latents + query_rope . rotary keys              out += softmax . the same latents

Sequences with one new token, or a few, are cut into splits, as in splits.py. Longer ones are cut into query blocks, as
in prefill.py, and walk all their keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_paged.errors import PagedError
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.triton.arguments import block_arguments, block_constants, feature_constants
from hf_paged.kernels.triton.latent_launch import MAX_RANK, LatentLaunch, latent_launch
from hf_paged.kernels.triton.launch_table import MAX_DECODE_QUERIES, MAX_SPLITS, converts_e4m3, current_arch
from hf_paged.kernels.triton.prefill import sequence_of_block
from hf_paged.kernels.triton.shared import (
    first_visible,
    load_scales,
    load_tile,
    product,
    relative_scales,
    start_softmax,
    weigh,
)
from hf_paged.kernels.triton.splits import Partials, join_splits, most_splits, split_length, store_split
from hf_paged.kernels.triton.step_shape import StepShape, step_shape

_MIN_ROWS = 16  # of a matrix product


@triton.jit
def _latent_kernel(
    out, partial_out, partial_stats, query_latent, query_rope, latents, rotary_keys, latent_scales, rotary_scales,
    latent_stride, rotary_stride, latent_scale_stride, rotary_scale_stride,
    sinks, query_start_loc, seq_lens, block_table,
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, out_stride, table_stride,
    scale, softcap, window, chunk, num_splits, num_sequences,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    MAX_QUERIES: tl.constexpr, IS_DECODE: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, CONVERTS_E4M3: tl.constexpr,
):  # fmt: skip
    num_rows: tl.constexpr = BLOCK_Q * HEADS
    if IS_DECODE:
        sequence = tl.program_id(2)
        sequence_start = tl.load(query_start_loc + sequence)
        first_query = 0
    else:
        block = tl.num_programs(2) - 1 - tl.program_id(2)  # the longest context of a prompt first: it ends last
        sequence = sequence_of_block(query_start_loc, block, num_sequences, BLOCK_Q)
        sequence_start = tl.load(query_start_loc + sequence)
        first_query = (block - sequence_start // BLOCK_Q - sequence) * BLOCK_Q
    num_queries = tl.load(query_start_loc + sequence + 1) - sequence_start
    if (first_query >= num_queries) | ((num_queries <= MAX_QUERIES) != IS_DECODE):
        return

    num_keys = tl.load(seq_lens + sequence)
    last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    first_position = num_keys - num_queries + first_query
    end_read = num_keys - num_queries + last_query + 1
    first_read = first_visible(first_position, window, chunk, HAS_WINDOW, HAS_CHUNK)
    first_key = first_read // TILE * TILE
    split = tl.program_id(1)
    length = end_read - first_key
    if IS_DECODE:
        length = split_length(end_read - first_key, TILE, SPLIT, MAX_SPLITS)
    begin = first_key + split * length
    if begin >= end_read:
        return

    row = tl.arange(0, num_rows)
    head = tl.program_id(0) * HEADS + row % HEADS
    is_row = (head < NUM_HEADS) & (first_query + row // HEADS <= last_query)
    index = tl.minimum(first_query + row // HEADS, last_query)  # of the row's token among the sequence's
    position = num_keys - num_queries + index
    token = (sequence_start + index).to(tl.int64)
    latent_dims = tl.arange(0, BLOCK_D)
    rotary_dims = tl.arange(0, BLOCK_DV)
    latent_query = tl.load(
        query_latent + token[:, None] * latent_token_stride + head[:, None] * latent_head_stride + latent_dims[None, :],
        mask=is_row[:, None] & (latent_dims < D)[None, :],
        other=0.0,
    )
    rotary_query = tl.load(
        query_rope + token[:, None] * rope_token_stride + head[:, None] * rope_head_stride + rotary_dims[None, :],
        mask=is_row[:, None] & (rotary_dims < DV)[None, :],
        other=0.0,
    )
    table = block_table + sequence.to(tl.int64) * table_stride
    highest, total = start_softmax(sinks, head, is_row, split == 0, num_rows, HAS_SINKS)
    result = tl.zeros([num_rows, BLOCK_D], tl.float32)
    columns = tl.arange(0, TILE)
    for start in tl.range(begin, tl.minimum(begin + length, end_read), TILE):
        key_position = start + columns
        # Past the keys that hold something, a row's worth of them is read again and masked: cheaper than no read.
        read_position = tl.minimum(tl.maximum(key_position, first_read), end_read - 1)
        if BLOCK_SIZE % TILE == 0:
            blocks = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        else:
            blocks = tl.load(table + read_position // BLOCK_SIZE).to(tl.int64)
        slots = blocks * BLOCK_SIZE + read_position % BLOCK_SIZE

        latent = load_tile(
            latents, slots, latent_stride, None, latent_query.dtype, D, BLOCK_D, KEY_FORMAT, CONVERTS_E4M3, False
        )  # fmt: skip
        rotary = load_tile(
            rotary_keys, slots, rotary_stride, None, latent_query.dtype, DV, BLOCK_DV, VALUE_FORMAT, CONVERTS_E4M3,
            False,
        )  # fmt: skip
        rotary_scores = product(rotary_query, tl.trans(rotary))
        scores = product(latent_query, tl.trans(latent))
        if VALUE_FORMAT != "plain":
            rotary_scores *= load_scales(rotary_scales, slots, rotary_scale_stride, None, False)[None, :]
        if KEY_FORMAT != "plain":
            latent_scale = load_scales(latent_scales, slots, latent_scale_stride, None, False)
            scores *= latent_scale[None, :]
        scores += rotary_scores
        weights, decay, highest, total = weigh(
            scores, key_position, position, highest, total, scale, softcap, window, chunk,
            HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, True,
        )  # fmt: skip
        result *= decay[:, None]
        if KEY_FORMAT == "plain":
            result += product(weights.to(latent.dtype), latent)
        else:
            relative, largest = relative_scales(latent_scale)
            weights *= relative[None, :]
            result += product(weights.to(latent.dtype), latent) * largest

    store_split(
        out + token[:, None] * out_stride + head[:, None] * D + latent_dims[None, :],
        partial_out, partial_stats, (sequence * MAX_QUERIES + index) * NUM_HEADS + head, is_row, split, num_splits,
        end_read - first_key <= length, highest, total, result, D, BLOCK_D,
    )  # fmt: skip


def attend_latent(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    blocks: KVBlocks,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> torch.Tensor:
    """See `AttentionBackend.attend_latent`; for float32, float16 and bfloat16 queries.

    Raises:
        PagedError: the latents have more than MAX_RANK numbers.
    """
    rank = blocks.keys.shape[3]
    if rank > MAX_RANK:
        raise PagedError(
            f"The triton backend attends to latents of up to {MAX_RANK} numbers, not {rank}; "
            "choose PagedConfig(attention_backend='torch')."
        )
    query_latent, query_rope = (
        query if query.stride(2) == 1 else query.contiguous() for query in (query_latent, query_rope)
    )
    shape = step_shape(metadata)
    out = torch.empty(query_latent.shape, dtype=query_latent.dtype, device=query_latent.device)
    if shape.max_decode_queries:
        _attend_splits(out, query_latent, query_rope, blocks, metadata, params, shape)
    if shape.has_prefill:
        partials = Partials.empty(0, 1, rank, out.device)
        launch = _launch(out, blocks)
        heads = min(launch.rows, triton.next_power_of_2(out.shape[1]))
        block_q = launch.rows // heads
        num_blocks = out.shape[0] // block_q + metadata.seq_lens.shape[0]
        _run(
            (triton.cdiv(out.shape[1], heads), 1, num_blocks), launch, out, partials, query_latent, query_rope, blocks,
            metadata, params, heads, block_q, max_queries=MAX_DECODE_QUERIES, is_decode=False,
        )  # fmt: skip
    return out


def _attend_splits(
    out: torch.Tensor,
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    blocks: KVBlocks,
    metadata: AttentionMetadata,
    params: AttentionParams,
    shape: StepShape,
) -> None:
    num_heads, rank = out.shape[1:]
    num_sequences = metadata.seq_lens.shape[0]
    launch = _launch(out, blocks)
    block_q = 1 if shape.max_decode_queries == 1 else MAX_DECODE_QUERIES
    heads = max(_MIN_ROWS // block_q, min(launch.rows // block_q, triton.next_power_of_2(num_heads)))
    num_splits = most_splits(shape.max_decode_keys, block_q, launch.tile, launch.split, params)
    partials = Partials.empty(num_sequences * block_q * num_heads, num_splits, rank, out.device)
    _run(
        (triton.cdiv(num_heads, heads), num_splits, num_sequences), launch, out, partials, query_latent, query_rope,
        blocks, metadata, params, heads, block_q, max_queries=block_q, is_decode=True,
    )  # fmt: skip
    if num_splits > 1:
        join_splits(
            out, partials, metadata.query_start_loc, metadata.seq_lens, max_queries=block_q, tile=launch.tile,
            split=launch.split, window=params.window, chunk=params.chunk,
        )  # fmt: skip


def _run(
    grid: tuple[int, int, int],
    launch: LatentLaunch,
    out: torch.Tensor,
    partials: Partials,
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    blocks: KVBlocks,
    metadata: AttentionMetadata,
    params: AttentionParams,
    heads: int,
    block_q: int,
    *,
    max_queries: int,
    is_decode: bool,
) -> None:
    _latent_kernel[grid](
        out, partials.out, partials.stats, query_latent, query_rope, *block_arguments(blocks),
        params.sinks, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
        query_latent.stride(0), query_latent.stride(1), query_rope.stride(0), query_rope.stride(1), out.stride(0),
        metadata.block_table.stride(0), params.scale, params.softcap or 0.0, params.window or 0, params.chunk or 0,
        partials.num_splits, metadata.seq_lens.shape[0],
        NUM_HEADS=out.shape[1], **block_constants(blocks), **feature_constants(params),
        MAX_QUERIES=max_queries, IS_DECODE=is_decode, BLOCK_Q=block_q, HEADS=heads, TILE=launch.tile,
        SPLIT=launch.split, MAX_SPLITS=MAX_SPLITS, CONVERTS_E4M3=converts_e4m3(current_arch(out.device)),
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def _launch(out: torch.Tensor, blocks: KVBlocks) -> LatentLaunch:
    return latent_launch(current_arch(out.device), out.element_size(), blocks.is_quantised)
