"""What the attention kernels have in common: one walk over the keys of some query rows, tile by tile.

A row is a (token, query head) pair. All rows of a program read the same kv head, so a tile of K and V is loaded once
for the whole GQA group. Keys lie in blocks:

key position   start ......... start + TILE      one tile
block table    [ 7 ][ 2 ][ 9 ][ 4 ]              TILE > BLOCK_SIZE: an id for every BLOCK_SIZE keys
               [        3         ]              TILE <= BLOCK_SIZE: one id

Tiles begin at multiples of TILE, so where a key lies within its block is known before the loop.

Scores are kept times log2(e), since exp2 is what the hardware has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_paged.kernels.triton.fp8 import decode_e4m3

# The interpreter multiplies bfloat16 as the integers that it keeps them in.
WIDENS = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
# Below any score, and finite: a row that sees nothing of a tile must not meet -inf - -inf.
LOWEST_SCORE = tl.constexpr(-1e30)


@triton.jit
def first_visible(position, window, chunk, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr):
    """The first key that a query at `position` sees."""
    first = position * 0
    if HAS_WINDOW:
        first = tl.maximum(first, position - window + 1)
    if HAS_CHUNK:
        first = tl.maximum(first, position // chunk * chunk)
    return first


@triton.jit
def start_softmax(sinks, heads, is_row, is_first, M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Running maximum and sum of M rows. A sink is a key seen by all whose value is zero; it counts once a row."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        return tl.where(is_first, sink, LOWEST_SCORE), tl.where(is_first, tl.full([M], 1.0, tl.float32), 0.0)
    return tl.full([M], LOWEST_SCORE, tl.float32), tl.full([M], 0.0, tl.float32)


@triton.jit
def load_tile(
    pointer, slots, slot_stride, readable, dtype: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    FORMAT: tl.constexpr, CONVERTS_E4M3: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows of K or V of one head, `[TILE, BLOCK_DIM]` in `dtype`, zero where not readable; scales not applied."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = pointer + slots[:, None] * slot_stride + dims[None, :]
    if MASKED and DIM < BLOCK_DIM:
        raw = tl.load(pointers, mask=readable[:, None] & (dims < DIM)[None, :], other=0)
    elif MASKED:
        raw = tl.load(pointers, mask=readable[:, None], other=0)
    elif DIM < BLOCK_DIM:
        raw = tl.load(pointers, mask=(dims < DIM)[None, :], other=0)
    else:
        raw = tl.load(pointers)
    if FORMAT == "float8_e4m3fn":
        return decode_e4m3(raw, CONVERTS_E4M3).to(dtype)
    if FORMAT == "int8":  # by way of float32, as hardware does: the interpreter knows no other way to bfloat16
        return raw.to(tl.float32).to(dtype)
    return raw.to(dtype)


@triton.jit
def product(left, right):
    """Matrix product with float32 sums; float32 operands are not rounded to tf32."""
    if WIDENS:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def load_scales(pointer, slots, slot_stride, readable, MASKED: tl.constexpr):
    """One float32 a key, `[TILE]`, zero where not readable."""
    if MASKED:
        return tl.load(pointer + slots * slot_stride, mask=readable, other=0.0)
    return tl.load(pointer + slots * slot_stride)


@triton.jit
def relative_scales(scales):
    """Scales `[TILE]` relative to their largest, and that one: small ones would leave float16's range."""
    largest = tl.maximum(tl.max(scales, axis=0), 1e-30)
    return scales / largest, largest


@triton.jit
def weigh(
    scores,  # [M, TILE], query . key
    key_position, position,  # [TILE], [M]
    highest, total,  # [M], so far
    scale, softcap, window, chunk,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax: weights `[M, TILE]`, what earlier sums are worth now, and the new state.

    MASKED False: every row sees every key.
    """
    if HAS_SOFTCAP:  # softcap * tanh(scores / softcap), by way of a sigmoid
        scores = (2 * tl.sigmoid(scores * (2 * scale / softcap)) - 1) * (softcap * LOG2E)
    else:
        scores *= scale * LOG2E
    if MASKED:
        visible = key_position[None, :] <= position[:, None]
        if HAS_WINDOW or HAS_CHUNK:
            first = first_visible(position, window, chunk, HAS_WINDOW, HAS_CHUNK)
            visible &= key_position[None, :] >= first[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_highest[:, None])
    decay = tl.exp2(highest - new_highest)
    return weights, decay, new_highest, total * decay + tl.sum(weights, axis=1)


@triton.jit
def attend_keys(
    query, highest, total, out,  # [M, BLOCK_D], [M], [M], [M, BLOCK_DV]
    begin, end,  # tiles from `begin`, a multiple of TILE, to `end`
    first_read, end_read,  # keys that hold something
    position,  # [M] of the queries
    table, keys, values, key_scales, value_scales,  # table at the sequence's row, the others at the kv head
    key_stride, value_stride, key_scale_stride, value_scale_stride,  # from slot to slot
    scale, softcap, window, chunk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr,
    CONVERTS_E4M3: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    USE_DOT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attends to some tiles with a running softmax. MASKED False: every row sees every key of every tile."""
    columns = tl.arange(0, TILE)
    block_of_column = columns // BLOCK_SIZE
    offset_of_column = columns % BLOCK_SIZE
    for start in tl.range(begin, end, TILE):
        key_position = start + columns
        readable = (key_position >= first_read) & (key_position < end_read)
        if BLOCK_SIZE >= TILE:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            slots = block * BLOCK_SIZE + start % BLOCK_SIZE + columns
        elif MASKED:
            blocks = tl.load(table + start // BLOCK_SIZE + block_of_column, mask=readable, other=0).to(tl.int64)
            slots = blocks * BLOCK_SIZE + offset_of_column
        else:
            blocks = tl.load(table + start // BLOCK_SIZE + block_of_column).to(tl.int64)
            slots = blocks * BLOCK_SIZE + offset_of_column

        key = load_tile(
            keys, slots, key_stride, readable, query.dtype, D, BLOCK_D, KEY_FORMAT, CONVERTS_E4M3, MASKED
        )  # fmt: skip
        if USE_DOT:
            scores = product(query, tl.trans(key))
        else:
            scores = tl.sum(query[:, None, :].to(tl.float32) * key[None, :, :].to(tl.float32), axis=2)
        if KEY_FORMAT != "plain":
            scores *= load_scales(key_scales, slots, key_scale_stride, readable, MASKED)[None, :]
        weights, decay, highest, total = weigh(
            scores, key_position, position, highest, total, scale, softcap, window, chunk,
            HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, MASKED,
        )  # fmt: skip
        out *= decay[:, None]

        value = load_tile(
            values, slots, value_stride, readable, query.dtype, DV, BLOCK_DV, VALUE_FORMAT, CONVERTS_E4M3, MASKED
        )  # fmt: skip
        if VALUE_FORMAT != "plain":
            relative, largest = relative_scales(
                load_scales(value_scales, slots, value_scale_stride, readable, MASKED)
            )  # fmt: skip
            weights *= relative[None, :]
        if USE_DOT:
            update = product(weights.to(query.dtype), value)
        else:
            update = tl.sum(weights[:, :, None] * value[None, :, :].to(tl.float32), axis=1)
        if VALUE_FORMAT != "plain":
            update *= largest
        out += update
    return highest, total, out
