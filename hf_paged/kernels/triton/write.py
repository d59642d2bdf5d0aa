"""Writes new K and V of one layer into their slots, quantising on the way: one launch.

    program (token, part)

      part 0 … Pk-1    some heads of the token's K: load, convert or quantise, store to the token's slot
      part Pk …        some heads of its V

K and V may differ in heads, head dims, storage types and strides. Results equal those of `kernels/quantise.py`, bit by
bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.quantise import LARGEST, SMALLEST_SCALE
from hf_paged.kernels.triton.arguments import as_bytes
from hf_paged.kernels.triton.fp8 import encode_e4m3
from hf_paged.kernels.triton.launch_table import converts_e4m3, current_arch

_PROGRAM_VALUES = 2048  # values of one program: 16 a thread
_NUM_WARPS = 4

_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
# Added to a float32 below 2^22, it leaves the nearest integer, ties to even, in the low bits of the sum.
_ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def _write_kernel(
    keys, values, key_scales, value_scales, key, value, slot_mapping,
    key_token_stride, key_head_stride, key_dim_stride, value_token_stride, value_head_stride, value_dim_stride,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, KEY_LARGEST: tl.constexpr,
    HV: tl.constexpr, DV: tl.constexpr, BLOCK_HV: tl.constexpr, BLOCK_DV: tl.constexpr, VALUE_LARGEST: tl.constexpr,
    KEY_PARTS: tl.constexpr, CONVERTS_E4M3: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    if part < KEY_PARTS:
        _write_heads(
            keys, key_scales, key + token * key_token_stride, slot, part * BLOCK_H,
            key_head_stride, key_dim_stride, H, D, BLOCK_H, BLOCK_D, KEY_LARGEST, CONVERTS_E4M3,
        )  # fmt: skip
    else:
        _write_heads(
            values, value_scales, value + token * value_token_stride, slot, (part - KEY_PARTS) * BLOCK_HV,
            value_head_stride, value_dim_stride, HV, DV, BLOCK_HV, BLOCK_DV, VALUE_LARGEST, CONVERTS_E4M3,
        )  # fmt: skip


@triton.jit
def _write_heads(
    stored, scales, new, slot, first_head, head_stride, dim_stride,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr, CONVERTS_E4M3: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one token. LARGEST None: stored as they are; else the largest code of the quantised type."""
    head = first_head + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    is_real = (head < H)[:, None] & (dim < D)[None, :]
    # A token's heads may lie far apart: they come transposed.
    x = tl.load(new + head.to(tl.int64)[:, None] * head_stride + dim[None, :] * dim_stride, mask=is_real, other=0.0)
    target = stored + slot * (H * D) + head[:, None] * D + dim[None, :]
    x = x.to(tl.float32)
    if LARGEST is None:
        tl.store(target, x.to(stored.dtype.element_ty), mask=is_real)
    else:
        # As integers magnitudes keep their order, and NaN comes last, which a maximum of floats would drop.
        largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        is_lost = largest >= 0x7F800000
        largest = tl.where(is_lost, 0, largest).to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.div_rn(largest, LARGEST), _SMALLEST_SCALE)
        x = tl.div_rn(tl.where(is_lost[:, None], 0.0, x), scale[:, None])
        if stored.dtype.element_ty == tl.int8:
            code = (x + _ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
        else:
            code = encode_e4m3(x, CONVERTS_E4M3)
        tl.store(target, code, mask=is_real)
        tl.store(scales + slot * H + head, tl.where(is_lost, float("nan"), scale), mask=head < H)


def write_slots(blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Stores new tokens: key `[T, H, D]` and value `[T, Hv, Dv]` in any strides, slot_mapping `[T]` int64."""
    num_tokens = key.shape[0]
    if not num_tokens:
        return
    constants, num_parts = _launch(key.shape[1:], value.shape[1:], blocks.keys.dtype, blocks.values.dtype)
    _write_kernel[(num_tokens, num_parts)](
        as_bytes(blocks.keys), as_bytes(blocks.values), blocks.key_scales, blocks.value_scales,
        key, value, slot_mapping, *key.stride(), *value.stride(),
        **constants, CONVERTS_E4M3=converts_e4m3(current_arch(key.device)), num_warps=_NUM_WARPS,
        enable_fp_fusion=False,  # as torch rounds
    )  # fmt: skip


@cache
def _launch(
    key_shape: torch.Size, value_shape: torch.Size, key_dtype: torch.dtype, value_dtype: torch.dtype
) -> tuple[dict[str, Any], int]:
    block_h, block_d, key_parts = _tile(*key_shape)
    block_hv, block_dv, value_parts = _tile(*value_shape)
    constants = {
        "H": key_shape[0], "D": key_shape[1], "BLOCK_H": block_h, "BLOCK_D": block_d,
        "HV": value_shape[0], "DV": value_shape[1], "BLOCK_HV": block_hv, "BLOCK_DV": block_dv,
        "KEY_LARGEST": LARGEST.get(key_dtype), "VALUE_LARGEST": LARGEST.get(value_dtype), "KEY_PARTS": key_parts,
    }  # fmt: skip
    return constants, key_parts + value_parts


def _tile(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Heads and dims of a program, both padded to a power of two, and programs a token."""
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(num_heads), max(1, _PROGRAM_VALUES // block_d))
    return block_h, block_d, triton.cdiv(num_heads, block_h)
