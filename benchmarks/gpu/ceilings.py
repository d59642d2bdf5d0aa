"""What the card can do at most: bytes moved by a copy, and bf16 matrix products."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.part import Row, Setting
from benchmarks.gpu.timing import measure

COPY = "copy"
MATMUL = "bf16 matrix product"


def rows(setting: Setting) -> list[Row]:
    """Two rows."""
    return [Row(COPY, lambda: _copy(setting)), Row(MATMUL, lambda: _matmul(setting))]


def _copy(setting: Setting) -> dict[str, Any]:
    size = 2**16 if setting.smoke else 2**32
    source = torch.ones(size, dtype=torch.uint8, device=setting.device)
    destination = torch.empty_like(source)
    timing = measure([lambda: destination.copy_(source)], setting.device)
    return {**timing, "bytes": 2 * size, "gb_per_s": 2 * size / timing["us_p50"] / 1e3}


def _matmul(setting: Setting) -> dict[str, Any]:
    size = 64 if setting.smoke else 8192
    left, right = (torch.randn(size, size, device=setting.device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    timing = measure([lambda: torch.mm(left, right, out=out)], setting.device)
    return {**timing, "size": size, "tflop_per_s": 2 * size**3 / timing["us_p50"] / 1e6}
