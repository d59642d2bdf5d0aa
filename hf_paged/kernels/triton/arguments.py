"""Kernel arguments that both attention kernels take from the same places."""

from __future__ import annotations

from typing import Any

import torch
import triton

from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionParams

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """float8 as uint8: kernels convert it themselves, where the hardware doesn't."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def block_arguments(blocks: KVBlocks) -> tuple[Any, ...]:
    """K, V and their scales, then the strides from slot to slot, of which each is in elements."""
    keys, values = as_bytes(blocks.keys), as_bytes(blocks.values)
    return (
        keys, values, blocks.key_scales, blocks.value_scales,
        keys.stride(1), values.stride(1), keys.shape[2], values.shape[2],
    )  # fmt: skip


def block_constants(blocks: KVBlocks) -> dict[str, Any]:
    """Shapes and formats of K and V."""
    head_dim, value_dim = blocks.keys.shape[3], blocks.values.shape[3]
    return {
        "NUM_KV_HEADS": blocks.keys.shape[2],
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "DV": value_dim,
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
        "BLOCK_SIZE": blocks.keys.shape[1],
        "KEY_FORMAT": _format(blocks.keys),
        "VALUE_FORMAT": _format(blocks.values),
    }


def feature_constants(params: AttentionParams) -> dict[str, bool]:
    """What a layer asks for, so that a kernel has no code for the rest."""
    return {
        "HAS_WINDOW": params.window is not None,
        "HAS_CHUNK": params.chunk is not None,
        "HAS_SOFTCAP": params.softcap is not None,
        "HAS_SINKS": params.sinks is not None,
    }


def _format(tensor: torch.Tensor) -> str:
    return "plain" if tensor.dtype in DTYPES else str(tensor.dtype).removeprefix("torch.")
