"""Other launches than the table's, for decode and prefill: what a new row of the launch table is chosen from.

Only when asked for: `--parts tune`, which first compiles everything in several processes (`tune_compile`). Each row
times one launch on one shape; the report shows the fastest of each shape beside the table's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import decode, prefill
from benchmarks.gpu.part import Row, Setting
from benchmarks.gpu.pools import LLAMA, QWEN, SMALL, Pools

TABLE = "table"
PARTS = {"decode": decode, "prefill": prefill}
Shape = tuple[Any, ...]  # heads, two lengths, block size, storage
Launch = tuple[int, ...]

# tile, split, warps, stages
DECODE_LAUNCHES: list[Launch] = [
    *((tile, 512, warps, stages) for tile in (64, 128, 32) for warps in (4, 8, 2) for stages in (3, 4, 2)),
    *((tile, split, 4, 3) for split in (1024, 256) for tile in (64, 128)),
]
# rows, tile, warps, stages
PREFILL_LAUNCHES: list[Launch] = [
    (rows, tile, warps, stages) for rows in (128, 64) for tile in (64, 128, 32) for warps in (8, 4) for stages in (3, 2)
]
DECODE_SHAPES: list[Shape] = [
    (LLAMA, 64, 4096, 16, "bf16"),
    (LLAMA, 64, 4096, 16, "fp8"),
    (QWEN, 64, 4096, 16, "bf16"),
    (LLAMA, 8, 4096, 16, "bf16"),
    (LLAMA, 1, 32768, 16, "bf16"),
]
PREFILL_SHAPES: list[Shape] = [(LLAMA, 8192, 8192, 16, "bf16"), (LLAMA, 512, 33280, 16, "bf16")]


def rows(setting: Setting) -> list[Row]:
    """Both kernels in turn, the table's own launch of each shape first."""
    pools = Pools(1024, SMALL, setting) if setting.smoke else Pools(2 * 64 * 4096, LLAMA, setting)
    return [
        Row(_name(kernel, shape, launch), functools.partial(_measure, setting, pools, kernel, shape, launch))
        for kernel, shape, launch in combinations(setting)
    ]


def compile_rows(setting: Setting) -> list[Row]:
    """The same launches, each called once."""
    pools = Pools(1024, SMALL, setting) if setting.smoke else Pools(64 * 4096, LLAMA, setting)
    return [
        Row(_name(kernel, shape, launch), functools.partial(_compile, setting, pools, kernel, shape, launch))
        for kernel, shape, launch in combinations(setting)
    ]


def combinations(setting: Setting) -> list[tuple[str, Shape, Launch | None]]:
    """Kernel, shape and launch of every row; None is the table's launch."""
    shapes = {"decode": DECODE_SHAPES, "prefill": PREFILL_SHAPES}
    launches = {"decode": DECODE_LAUNCHES, "prefill": PREFILL_LAUNCHES}
    if setting.smoke:
        shapes = {"decode": [(SMALL, 2, 40, 16, "bf16")], "prefill": [(SMALL, 12, 20, 16, "bf16")]}
        launches = {"decode": [(16, 32, 1, 1)], "prefill": [(16, 16, 1, 1)]}
    found: list[tuple[str, Shape, Launch | None]] = []
    for index in range(-1, max(map(len, launches.values()))):
        for kernel in PARTS:
            if index < len(launches[kernel]):
                launch = launches[kernel][index] if index >= 0 else None
                found += [(kernel, shape, launch) for shape in shapes[kernel]]
    return found


def _name(kernel: str, shape: Shape, launch: Launch | None) -> str:
    return f"{kernel} {', '.join(map(str, (shape[0].name, *shape[1:])))}: {_launch_name(launch)}"


def _launch_name(launch: Launch | None) -> str:
    return TABLE if launch is None else " ".join(map(str, launch))


def _measure(setting: Setting, pools: Pools, kernel: str, shape: Shape, launch: Launch | None) -> dict[str, Any]:
    measure: Callable[..., dict[str, Any]] = PARTS[kernel].measure_shape
    with _launched(kernel, launch):
        result = measure(setting, pools, *shape)
    return {"kernel": kernel, "shape": [shape[0].name, *shape[1:]], "launch": _launch_name(launch), **result}


def _compile(setting: Setting, pools: Pools, kernel: str, shape: Shape, launch: Launch | None) -> dict[str, Any]:
    with _launched(kernel, launch), torch.inference_mode():
        PARTS[kernel].calls_of(setting, pools, *shape)[0][0]()
    return {}


@contextmanager
def _launched(kernel: str, launch: Launch | None) -> Iterator[None]:
    """Inside, one attention kernel is launched otherwise than by the table."""
    if launch is None:
        yield
        return
    from hf_paged.kernels.triton import decode as decode_kernel
    from hf_paged.kernels.triton import launch_table
    from hf_paged.kernels.triton import prefill as prefill_kernel

    if kernel == "decode":
        with mock.patch.object(decode_kernel, "decode_launch", return_value=launch_table.DecodeLaunch(*launch)):
            yield
    else:
        with mock.patch.object(prefill_kernel, "prefill_launch", return_value=launch_table.PrefillLaunch(*launch)):
            yield
