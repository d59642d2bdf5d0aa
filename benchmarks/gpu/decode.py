"""Paged decode against the copy ceiling, and beside it torch's SDPA on a dense cache of the same lengths."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.part import Row, Setting
from benchmarks.gpu.pools import LLAMA, QWEN, SMALL, Heads, Pools, random_query, scattered_steps
from benchmarks.gpu.timing import measure, rotation
from hf_paged.kernels.metadata import AttentionParams

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
SDPA = "sdpa"
BLOCK_SIZES = (16, 64, 256)
BATCHES = (64, 8, 256, 1)  # those that the marks are about come first
CONTEXTS = (4096, 32768, 512)


def rows(setting: Setting) -> list[Row]:
    """Block size 16 of both shapes first, then SDPA, then the other block sizes."""
    if setting.smoke:
        pools = Pools(1024, SMALL, setting)
        shapes: list[tuple[Heads, int, int, int, str]] = [
            (SMALL, 3, 40, 16, "bf16"),
            (SMALL, 3, 40, 0, SDPA),
        ]
    else:
        pools = Pools(max(BATCHES) * max(CONTEXTS), LLAMA, setting)  # both shapes have the same kv heads
        grid = [(heads, batch, context) for batch in BATCHES for context in CONTEXTS for heads in (LLAMA, QWEN)]
        shapes = [(*place, 16, dtype) for place in grid for dtype in DTYPES]
        shapes += [(*place, 0, SDPA) for place in grid]
        shapes += [(*place, size, dtype) for size in BLOCK_SIZES[1:] for place in grid for dtype in DTYPES]
    return [
        Row(
            f"{heads.name}, {batch} x {context}, " + (SDPA if kind == SDPA else f"block size {block_size}, {kind}"),
            functools.partial(measure_shape, setting, pools, heads, batch, context, block_size, kind),
        )
        for heads, batch, context, block_size, kind in shapes
    ]


def measure_shape(
    setting: Setting, pools: Pools, heads: Heads, batch: int, context: int, block_size: int, kind: str
) -> dict[str, Any]:
    """Times one shape; `kind` is a storage type of DTYPES, or SDPA on a dense cache."""
    calls, num_bytes = calls_of(setting, pools, heads, batch, context, block_size, kind)
    with torch.inference_mode():
        timing = measure(calls, setting.device)
    return {
        "model": heads.name,
        "batch": batch,
        "context": context,
        "block_size": block_size or None,
        "kind": kind,
        "bytes": num_bytes,
        "gb_per_s": num_bytes / timing["us_p50"] / 1e3,
        **timing,
    }


def calls_of(
    setting: Setting, pools: Pools, heads: Heads, batch: int, context: int, block_size: int, kind: str
) -> tuple[list[functools.partial[torch.Tensor]], int]:
    """Calls of one shape over memory of their own each, and the bytes that one of them has to move."""
    pool = pools.get(DTYPES.get(kind, torch.bfloat16))
    query = random_query(batch, heads, torch.bfloat16, setting.device)
    num_bytes = batch * context * pool.bytes_per_token + 2 * query.nbytes
    num_calls = rotation(num_bytes, setting.device)
    if kind == SDPA:
        return _sdpa_calls(pool.keys, pool.values, query, context, num_calls), num_bytes
    backend, blocks = setting.backend(), pool.blocks(block_size)
    params = AttentionParams(heads.head_dim**-0.5)
    steps = scattered_steps(num_calls, batch, 1, context, block_size, pool)
    return [functools.partial(backend.attend, query, blocks, step, params) for step in steps], num_bytes


def _sdpa_calls(
    keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, context: int, num_calls: int
) -> list[functools.partial[torch.Tensor]]:
    batch = query.shape[0]
    num_calls = min(num_calls, keys.shape[0] // (batch * context))
    if num_calls == 0:
        raise ValueError(f"{batch} x {context} tokens don't fit into a pool of {keys.shape[0]}")
    calls = []
    for index in range(num_calls):
        place = slice(index * batch * context, (index + 1) * batch * context)
        key, value = (t[place].unflatten(0, (batch, context)).transpose(1, 2) for t in (keys, values))
        grouped = query.unsqueeze(2).contiguous()  # [B, Hq, 1, D]
        calls.append(functools.partial(F.scaled_dot_product_attention, grouped, key, value, enable_gqa=True))
    return calls
