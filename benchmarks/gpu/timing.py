"""How long calls take: from CUDA events, with what they read out of the L2 cache, in a CUDA graph where that works.

eager    one call between two events; the launch counts, and for a short kernel it is most of the time
graph    all calls captured into one graph; its time over the number of calls: the kernels, without launches
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

SECONDS_OF_ROW = 0.12  # of measured time, about, for each way
MAX_ROTATION = 64  # calls that take turns, each over memory of its own


def rotation(num_bytes: int, device: torch.device) -> int:
    """How many calls of `num_bytes` each must take turns so that none finds its data in the L2 cache."""
    if device.type != "cuda":
        return 2
    l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20
    return max(1, min(MAX_ROTATION, math.ceil(4 * l2_bytes / num_bytes)))


def measure(calls: Sequence[Callable[[], Any]], device: torch.device) -> dict[str, Any]:
    """Microseconds of one call.

    Args:
        calls: they do the same work on different memory.
        device: on a CPU it is wall-clock time of a few calls.

    Returns:
        us_p20, us_p50, us_p80 of the better of the two ways; "timed_in" names it: "graph", "eager" or "wall clock".
        "eager_us_p50" always, and "no_graph" with the reason where none could be captured.
    """
    if device.type != "cuda":
        return _measure_wall_clock(calls)
    for call in (*calls, *calls[:3]):
        call()
    torch.cuda.synchronize(device)
    eager = _measure_eager(calls, device)
    result: dict[str, Any] = {"eager_us_p50": statistics.median(eager), "timed_in": "eager", "num_calls": len(calls)}
    samples = eager
    try:
        samples = _measure_graph(calls, device)
        result["timed_in"] = "graph"
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        result["no_graph"] = str(error).splitlines()[0][:200]
    return {**result, **_percentiles(samples)}


def _percentiles(samples: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(samples)
    p20, p80 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.2, 0.8))
    return {"us_p20": p20, "us_p50": statistics.median(ordered), "us_p80": p80, "num_samples": len(ordered)}


def _measure_wall_clock(calls: Sequence[Callable[[], Any]]) -> dict[str, Any]:
    samples = []
    for call in calls:
        begin = time.perf_counter()
        call()
        samples.append((time.perf_counter() - begin) * 1e6)
    percentiles = _percentiles(samples)
    return {"eager_us_p50": percentiles["us_p50"], "timed_in": "wall clock", "num_calls": len(calls), **percentiles}


def _measure_eager(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    first = _timed([calls[0]] * 3, device)
    count = _count(statistics.median(first))
    return _timed([calls[index % len(calls)] for index in range(count)], device)


def _measure_graph(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # results stay alive, so that no call writes where another does
    graph.replay()
    first = _timed([graph.replay] * 2, device)
    samples = _timed([graph.replay] * _count(min(first)), device)
    del kept
    return [sample / len(calls) for sample in samples]


def _count(microseconds: float) -> int:
    return max(7, min(100, int(SECONDS_OF_ROW * 1e6 / max(microseconds, 1.0))))


def _timed(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
    for call, (begin, end) in zip(calls, events, strict=True):
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]
