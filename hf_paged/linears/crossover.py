"""Up to how many rows the native product is the faster one: measured, once a process, for each shape of weight.

time |                         . '  native: about in proportion to the rows
     |                  .  '  _____
     |  ________.__'____-----         torch: slow to start, then the better one
     |     . '
     | .
     +----------------|------------ rows
                   crossover
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

from hf_paged.linears.native import NativeProduct

# The native product has won at these few rows for each shape on each machine that was looked at.
SURE_ROWS: Final = 8
STEPS: Final = (12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
UNLIMITED: Final = 1 << 60

_REPEATS = 3
_CLEAR = 1.5  # times as fast: no need to look again
_PRODUCTS = 1 << 27  # multiplications of one trial: more rows are tried on fewer columns

Key = tuple[int, int, torch.dtype, int]
_limits: dict[Key, int] = {}


def measured_limit(weight: torch.Tensor, product: NativeProduct, num_threads: int) -> int:
    """The most rows for which the native product is to be used with a weight `[n, k]`.

    The first call of a shape takes some tens of milliseconds.
    """
    n, k = weight.shape
    key = n, k, weight.dtype, num_threads
    if key not in _limits:
        limit = find_limit(lambda rows: _native_wins(weight, product, rows, num_threads))
        _limits.setdefault(key, limit)  # the first of two threads that measured at once
    return _limits[key]


def find_limit(native_wins: Callable[[int], bool]) -> int:
    """The last of `STEPS` at which the native product wins, if it wins at all below it: a search by halves.

    Returns:
        `SURE_ROWS` if it wins at no step, `UNLIMITED` if it still wins at the last.
    """
    low, high = 0, len(STEPS)  # wins before low, loses from high on
    while low < high:
        middle = (low + high) // 2
        if native_wins(STEPS[middle]):
            low = middle + 1
        else:
            high = middle
    if low == len(STEPS):
        return UNLIMITED
    return STEPS[low - 1] if low else SURE_ROWS


def _native_wins(weight: torch.Tensor, product: NativeProduct, rows: int, num_threads: int) -> bool:
    n, k = weight.shape
    part = weight.detach()[: min(n, max(64, _PRODUCTS // (rows * k)))]
    x = torch.ones(rows, k, dtype=weight.dtype)
    native = torch_time = float("inf")
    for _ in range(_REPEATS):
        torch_time = min(torch_time, _seconds(lambda: F.linear(x, part)))
        native = min(native, _seconds(lambda: product(x, [(part, None)], num_threads)))
        if native * _CLEAR < torch_time or torch_time * _CLEAR < native:
            break
    return native < torch_time


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
