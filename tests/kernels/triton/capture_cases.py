"""What the compiler is told of small kernels, as JSON. A process of its own: the suite's interprets kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from hf_paged.kernels.triton.architectures import architecture
from hf_paged.kernels.triton.capture import captured_launches
from hf_paged.kernels.triton.compile_report import compile_all, plan
from hf_paged.kernels.triton.launch_table import current_arch
from hf_paged.kernels.triton.main_configurations import MainConfiguration

META = torch.device("meta")


@triton.jit
def product_kernel(a, b, out, scale, stride, count, bias, size: tl.constexpr, depth: tl.constexpr):
    rows = tl.arange(0, size)
    columns = tl.arange(0, depth)
    left = tl.load(a + rows[:, None] * stride + columns[None, :])
    right = tl.load(b + columns[:, None] * stride + rows[None, :])
    result = tl.dot(left, right) * scale + count
    if bias is not None:
        result += tl.load(bias)
    tl.store(out + rows[:, None] * stride + rows[None, :], result)


@triton.jit
def sum_kernel(a, out, size: tl.constexpr):
    tl.store(out, tl.sum(tl.load(a + tl.arange(0, size)), axis=0))


def launch_product(stride: int = 64, count: int = 3, pool: int = 64, num_warps: int = 4, **options: int) -> None:
    a = torch.empty(pool, 64, dtype=torch.bfloat16, device=META)
    out = torch.empty(64, 64, device=META)
    product_kernel[(1,)](
        a, a, out, 0.5, stride, count, None, size=64, depth=64, num_warps=num_warps, num_stages=2, **options
    )  # fmt: skip


def launch_sum() -> None:
    sum_kernel[(1,)](torch.empty(64, device=META), torch.empty(1, device=META), 64)


def captured(target: str, launch: Callable[[], None]) -> dict[str, Any]:
    with captured_launches(architecture(target)) as launches:
        launch()
    (found,) = launches
    names = list(found.signature)
    return {
        "kernel": found.name,
        "signature": found.signature,
        "constants": {names[path[0]]: value for path, value in found.constants.items()},
        "known": {names[path[0]]: [name for name, _ in facts] for path, facts in found.attributes.items()},
        "num_warps": found.options["num_warps"],
        "num_stages": found.options["num_stages"],
    }


def after_an_error() -> dict[str, Any]:
    before = (driver._active, triton.knobs.runtime.jit_cache_hook)
    arch = ""
    try:
        with captured_launches(architecture("gfx942")):
            arch = current_arch(torch.device("cpu"))
            raise RuntimeError
    except RuntimeError:
        pass
    return {
        "arch_inside": arch,
        "arch_outside": current_arch(torch.device("cpu")),
        "is_restored": (driver._active, triton.knobs.runtime.jit_cache_hook) == before,
    }


def shared_tasks() -> list[str]:
    configurations = [
        MainConfiguration("first", lambda: launch_product(count=3)),
        MainConfiguration("same code", lambda: launch_product(count=5)),
        MainConfiguration("other code", lambda: launch_product(count=16)),
    ]
    return [task.configuration for task in plan(configurations, [architecture("sm_90")])]


def launch_spilling() -> None:
    # As few registers as a kernel can be made to have
    if current_arch(META) == "sm_90":
        launch_product(num_warps=2, maxnreg=64)
    else:
        launch_product(num_warps=1, waves_per_eu=8)


def compiled(*launches: Callable[[], None]) -> list[dict[str, Any]]:
    configurations = [MainConfiguration(launch.__name__, launch) for launch in launches]
    tasks = plan(configurations, [architecture("sm_90"), architecture("gfx942")])
    return [row.as_json() for row in compile_all(tasks)]


if __name__ == "__main__":
    result = {
        "sm_90": captured("sm_90", launch_product),
        "gfx942": captured("gfx942", lambda: launch_product(pool=2**24)),
        "stride of 1": captured("sm_90", lambda: launch_product(stride=1, count=2**40)),
        "error": after_an_error(),
        "tasks": shared_tasks(),
        "compiled": compiled(launch_product, launch_spilling, launch_sum),
    }
    sys.stdout.write(json.dumps(result))
