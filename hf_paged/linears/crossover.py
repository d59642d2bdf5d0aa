"""Up to how many rows the native product is the faster one: measured, once a process, for each shape of weight.

time |                         . '  native: about in proportion to the rows
     |                  .  '  _____
     |  ________.__'____-----         torch: slow to start, then perhaps the better one
     |     . '
     | .
     +----------------|------------ rows
                   crossover
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Final

import torch
import torch.nn.functional as F

from hf_paged.linears.native import NativeProduct

# The native product has won at these few rows for each shape on each machine that was looked at.
SURE_ROWS: Final = 32
STEPS: Final = (48, 64, 96, 128, 192, 256, 384, 512)
UNLIMITED: Final = 1 << 60

_REPEATS = 3
_CLEAR = 1.5  # times as fast: no need to look again
_CLOSE = 1.05  # times torch's time: what is native allocates less, and whole layers run in one call if all of it is
_PRODUCTS = 1 << 27  # multiplications of one trial: more rows are tried on fewer columns

Key = tuple[int, int, torch.dtype, int]
_limits: dict[Key, int] = {}


def measured_limit(weights: Sequence[torch.Tensor], product: NativeProduct, num_threads: int) -> int:
    """The most rows for which the native product is to be used.

    The first call of a shape takes some tens of milliseconds.

    Args:
        weights: `[n, k]` each, of one shape and type: the layers of a model. Each trial takes the next one, so that it
            comes from memory, as in a forward, where there are more than the caches hold.
        product: the native product.
        num_threads: of both.
    """
    n, k = weights[0].shape
    key = n, k, weights[0].dtype, num_threads
    if key not in _limits:
        next_weight = cycle(weights).__next__
        limit = find_limit(lambda rows: _native_wins(next_weight, product, rows, num_threads))
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


def _native_wins(next_weight: Callable[[], torch.Tensor], product: NativeProduct, rows: int, num_threads: int) -> bool:
    n, k = next_weight().shape
    columns = min(n, max(64, _PRODUCTS // (rows * k)))
    x = torch.ones(rows, k, dtype=next_weight().dtype)
    native = torch_time = float("inf")
    for _ in range(_REPEATS):
        part = next_weight().detach()[:columns]
        torch_time = min(torch_time, _seconds(lambda part=part: F.linear(x, part)))  # type: ignore[misc]
        part = next_weight().detach()[:columns]
        native = min(native, _seconds(lambda part=part: product(x, [(part, None)], num_threads)))  # type: ignore[misc]
        if native * _CLEAR < torch_time or torch_time * _CLEAR < native:
            break
    return native < torch_time * _CLOSE


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
