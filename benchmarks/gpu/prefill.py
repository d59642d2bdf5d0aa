"""Paged prefill beside torch's SDPA with its flash kernel: whole prompts, and a chunk behind a long context."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu.part import Row, Setting
from benchmarks.gpu.pools import LLAMA, QWEN, SMALL, Heads, Pool, Pools, random_query, scattered_steps
from benchmarks.gpu.timing import measure, rotation
from hf_paged.kernels.metadata import AttentionParams

SDPA = "sdpa"
BLOCK_SIZES = (16, 64, 256)
LENGTHS = ((8192, 8192), (512, 32768 + 512), (32768, 32768), (1024, 1024))  # queries, keys with them


def rows(setting: Setting) -> list[Row]:
    """Block size 16 and SDPA of both shapes first, then the other block sizes."""
    if setting.smoke:
        pools = Pools(1024, SMALL, setting)
        shapes: list[tuple[Heads, int, int, int, str]] = [
            (SMALL, 20, 20, 16, "bf16"),
            (SMALL, 12, 40, 16, "bf16"),
            (SMALL, 12, 40, 0, SDPA),
        ]
    else:
        pools = Pools(2**18, LLAMA, setting)
        grid = [(heads, *lengths) for lengths in LENGTHS for heads in (LLAMA, QWEN)]
        shapes = [(*place, size, kind) for place in grid for size, kind in ((16, "bf16"), (0, SDPA))]
        shapes += [(*place, 16, "fp8") for place in grid]
        shapes += [(*place, size, "bf16") for size in BLOCK_SIZES[1:] for place in grid]
    return [
        Row(
            f"{heads.name}, {num_queries} on {num_keys - num_queries}, "
            + (SDPA if kind == SDPA else f"block size {block_size}, {kind}"),
            functools.partial(measure_shape, setting, pools, heads, num_queries, num_keys, block_size, kind),
        )
        for heads, num_queries, num_keys, block_size, kind in shapes
    ]


def measure_shape(
    setting: Setting, pools: Pools, heads: Heads, num_queries: int, num_keys: int, block_size: int, kind: str
) -> dict[str, Any]:
    """Times one shape; `kind` is "bf16", "fp8", or SDPA on dense K and V."""
    with torch.inference_mode():
        calls, flash = calls_of(setting, pools, heads, num_queries, num_keys, block_size, kind)
        timing = measure(calls, setting.device)
    num_pairs = num_queries * (num_keys - num_queries) + num_queries * (num_queries + 1) // 2
    flop = 4 * heads.num_heads * heads.head_dim * num_pairs
    return {
        "model": heads.name,
        "num_queries": num_queries,
        "num_cached": num_keys - num_queries,
        "block_size": block_size or None,
        "kind": kind,
        "flash": flash,
        "flop": flop,
        "tflop_per_s": flop / timing["us_p50"] / 1e6,
        **timing,
    }


def calls_of(
    setting: Setting, pools: Pools, heads: Heads, num_queries: int, num_keys: int, block_size: int, kind: str
) -> tuple[list[Callable[[], torch.Tensor]], bool | None]:
    """Calls of one shape over memory of their own each; for SDPA, whether torch's flash kernel takes them."""
    pool = pools.get(torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16)
    query = random_query(num_queries, heads, torch.bfloat16, setting.device)
    num_calls = min(8, rotation(num_keys * pool.bytes_per_token + 2 * query.nbytes, setting.device))
    if kind == SDPA:
        flash, calls = _sdpa_calls(pool, query, num_keys, num_calls)
        return calls, flash
    backend, blocks = setting.backend(), pool.blocks(block_size)
    params = AttentionParams(heads.head_dim**-0.5)
    steps = scattered_steps(num_calls, 1, num_queries, num_keys, block_size, pool)
    return [functools.partial(backend.attend, query, blocks, step, params) for step in steps], None


def _sdpa_calls(
    pool: Pool, query: torch.Tensor, num_keys: int, num_calls: int
) -> tuple[bool, list[Callable[[], torch.Tensor]]]:
    """Whether torch's flash kernel took it, and the calls."""
    num_queries, num_heads = query.shape[:2]
    group_size = num_heads // pool.keys.shape[1]
    dense = query.transpose(0, 1).unsqueeze(0).contiguous()
    options: dict[str, Any] = {"is_causal": True}
    if num_queries < num_keys:
        options = {"attn_mask": causal_lower_right(num_queries, num_keys)}

    def attend(key: torch.Tensor, value: torch.Tensor, kernels: list[SDPBackend]) -> torch.Tensor:
        with sdpa_kernel(kernels):
            out: torch.Tensor = F.scaled_dot_product_attention(dense, key, value, **options)
            return out

    # Repeating K and V for each query head happens before the clock runs.
    places = [slice(index * num_keys, (index + 1) * num_keys) for index in range(num_calls)]
    tensors = [
        [t[place].repeat_interleave(group_size, 1).transpose(0, 1).unsqueeze(0) for t in (pool.keys, pool.values)]
        for place in places
    ]
    kernels = [SDPBackend.FLASH_ATTENTION]
    try:
        attend(tensors[0][0], tensors[0][1], kernels)
    except RuntimeError:
        kernels += [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return len(kernels) == 1, [functools.partial(attend, key, value, kernels) for key, value in tensors]
