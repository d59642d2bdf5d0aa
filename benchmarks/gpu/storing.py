"""Cache writes and block copies on the card. They are checked by arithmetic of their own, not by our torch code."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from benchmarks.gpu.comparing import dtype_name, known
from benchmarks.gpu.part import Row, Setting
from hf_paged.kernels.kv_blocks import KVBlocks
from tests.kernels.packed import PoisonedCache

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def write_rows(setting: Setting) -> list[Row]:
    """New tokens, in every pair of storage types that differs in kind."""
    bf16 = torch.bfloat16
    storages = [(d, d, d) for d in FLOAT_DTYPES] + [(bf16, FP8, FP8), (bf16, INT8, INT8), (bf16, FP8, bf16)]
    storages += [(torch.float32, INT8, FP8), (torch.float16, bf16, FP8)]
    sizes = (128, 80)
    if setting.smoke:  # the interpreter cuts off what it stores as bfloat16, so nothing may need rounding to it
        storages, sizes = [(bf16, FP8, bf16), (torch.float32, INT8, FP8)], (16, 24)
    return [
        Row(
            "write " + " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
            functools.partial(_write, setting, *dtypes, *sizes),
        )
        for dtypes in storages
    ]


def _write(
    setting: Setting,
    dtype: torch.dtype,
    key_dtype: torch.dtype,
    value_dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
) -> dict[str, Any]:
    """New tokens at scattered slots are there as exactly as their storage can hold them; nothing else has changed."""
    num_tokens, num_heads, block_size = (5, 2, 8) if setting.smoke else (1021, 8, 16)
    num_blocks = 3 * num_tokens // block_size + 1
    caches = [
        PoisonedCache((num_blocks, block_size, num_heads, dim), storage)
        for dim, storage in ((head_dim, key_dtype), (value_dim, value_dtype))
    ]
    blocks = _blocks_of(caches, setting.device)
    before = [tensor.clone() for tensor in blocks.tensors]
    random = torch.Generator().manual_seed(0)
    slots = torch.randperm(num_blocks * block_size, generator=random)[:num_tokens].to(setting.device)
    # Heads first in memory, as a model has them, and of very different size.
    new = [
        (torch.randn(num_heads, num_tokens, dim, generator=random) * torch.logspace(-3, 2, num_heads)[:, None, None])
        .to(dtype)
        .to(setting.device)
        .transpose(0, 1)
        for dim in (head_dim, value_dim)
    ]
    setting.backend().write(blocks, new[0], new[1], slots)

    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool, device=setting.device)
    untouched[slots] = False
    is_kept = all(
        torch.equal(_bits(now).flatten(0, 1)[untouched], _bits(was).flatten(0, 1)[untouched])
        for now, was in zip(blocks.tensors, before, strict=True)
    )
    stored = ((blocks.keys, blocks.key_scales), (blocks.values, blocks.value_scales))
    shares = [_write_share(given, *pair, slots) for given, pair in zip(new, stored, strict=True)]
    share = max(shares, key=lambda value: (math.isnan(value), value))  # NaN is the worst
    return {
        "kernel": "write",
        "dtype": dtype_name(dtype, blocks),
        "ok": is_kept and share <= 1,
        "others_kept": is_kept,
        "share_of_tolerance": known(share),
    }


def _write_share(given: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> float:
    """The largest error of what is stored, as a share of what rounding to its type may cost."""
    exact = given.double()
    found = _bits(stored).flatten(0, 1)[slots].view(stored.dtype).double()
    if scales is None:
        half_step = exact.abs() * torch.finfo(stored.dtype).eps / 2 + torch.finfo(stored.dtype).tiny
    else:
        found = found * scales.flatten(0, 1)[slots].double()[..., None]
        largest = exact.abs().amax(-1, keepdim=True)
        # int8: half a step of 1/127 of the largest. fp8: three mantissa bits, and steps of 2^-9 near zero.
        half_step = largest / 254 if stored.dtype == INT8 else exact.abs() / 16 + largest / 448 * 2**-10
        half_step = half_step * (1 + 1e-3) + largest * 1e-6
    error = (found - exact).abs()
    return float((error / half_step.clamp_min(1e-30)).max())


def _blocks_of(caches: list[PoisonedCache], device: torch.device) -> KVBlocks:
    scales = [None if cache.scales is None else cache.scales.to(device) for cache in caches]
    return KVBlocks(caches[0].stored.to(device), caches[1].stored.to(device), *scales)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, among which NaN equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def copy_rows(setting: Setting) -> list[Row]:
    """Block copies, by storage types."""
    storages = [(torch.bfloat16, torch.bfloat16), (FP8, FP8), (INT8, INT8), (FP8, torch.bfloat16)]
    return [
        Row(
            "copy " + " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
            functools.partial(_copy, setting, *dtypes),
        )
        for dtypes in (storages[-1:] if setting.smoke else storages)
    ]


def _copy(setting: Setting, key_dtype: torch.dtype, value_dtype: torch.dtype) -> dict[str, Any]:
    """Block copies over several layers: destinations equal their sources bit for bit, other blocks are as before."""
    num_layers, num_blocks, num_copies = (2, 6, 2) if setting.smoke else (5, 300, 97)
    random = torch.Generator().manual_seed(0)
    layers, wanted = [], []
    order = torch.randperm(num_blocks, generator=random).tolist()
    copies = list(zip(order[:num_copies], order[num_copies : 2 * num_copies], strict=True))
    for _ in range(num_layers):
        caches = [PoisonedCache((num_blocks, 16, 2, dim), dtype) for dim, dtype in ((64, key_dtype), (40, value_dtype))]
        for cache in caches:
            cache.fill(torch.arange(num_blocks * 16), torch.randn(num_blocks * 16, 2, cache.stored.shape[3]))
        blocks = _blocks_of(caches, setting.device)
        layers.append(blocks)
        wanted.append([_bits(tensor).clone() for tensor in blocks.tensors])
        for tensor in wanted[-1]:
            for source, destination in copies:
                tensor[destination] = tensor[source]
    setting.backend().copy_blocks(layers, copies)
    is_equal = all(
        torch.equal(_bits(tensor), expected)
        for blocks, expecteds in zip(layers, wanted, strict=True)
        for tensor, expected in zip(blocks.tensors, expecteds, strict=True)
    )
    stored = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in (key_dtype, value_dtype))
    return {"kernel": "copy", "dtype": " and ".join(stored), "ok": is_equal}
