"""Sends requests as they are due, each from a thread of its own, and notes when its tokens come.

open loop     a request starts at its moment, whoever else still waits; its clock starts at that moment, so what the
              sender itself loses is in the times
closed loop   so many users, each of whom sends the next request when the last one is answered
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.workloads import WorkloadRequest


@dataclass(frozen=True)
class Chunk:
    """Tokens that came together. `num_tokens` None: not known; the last chunk may tell the total instead."""

    num_tokens: int | None = 1
    total: int | None = None


class Target(Protocol):
    """What requests are sent to, from any thread."""

    def stream(self, request: WorkloadRequest) -> Iterator[Chunk]:
        """Sends one request; yields as its tokens come."""


@dataclass(frozen=True)
class Record:
    """One request. Times are seconds since the run's start.

    `arrivals` are the moments at which tokens came, `num_tokens` how many came in all, `error` what broke it off.
    """

    due: float
    arrivals: tuple[float, ...]
    num_tokens: int
    error: str | None = None


def open_loop(target: Target, requests: Sequence[WorkloadRequest], times: Sequence[float]) -> list[Record]:
    """Every request at its time; the records are in the order of the requests."""
    start = time.monotonic()
    records: list[Record | None] = [None] * len(requests)

    def send(index: int) -> None:
        records[index] = _send(target, requests[index], start, times[index])

    threads = []
    for index, moment in enumerate(times):
        time.sleep(max(0.0, start + moment - time.monotonic()))
        threads.append(threading.Thread(target=send, args=(index,)))
        threads[-1].start()
    _join(threads)
    return [record for record in records if record is not None]


def closed_loop(target: Target, requests: Sequence[WorkloadRequest], concurrency: int) -> list[Record]:
    """`concurrency` users share the requests; the records are in the order of the requests."""
    start = time.monotonic()
    records: list[Record | None] = [None] * len(requests)
    indices = iter(range(len(requests)))
    lock = threading.Lock()

    def use() -> None:
        while True:
            with lock:
                index = next(indices, None)
            if index is None:
                return
            records[index] = _send(target, requests[index], start, time.monotonic() - start)

    threads = [threading.Thread(target=use) for _ in range(min(concurrency, len(requests)))]
    for thread in threads:
        thread.start()
    _join(threads)
    return [record for record in records if record is not None]


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def _send(target: Target, request: WorkloadRequest, start: float, due: float) -> Record:
    arrivals: list[float] = []
    num_tokens = 0
    total = error = None
    try:
        for chunk in target.stream(request):
            if chunk.num_tokens != 0:
                arrivals.append(time.monotonic() - start)
                num_tokens += chunk.num_tokens or 1
            total = chunk.total if chunk.total is not None else total
    except Exception as failure:  # one request's failure is a record, not the end of the run
        error = f"{type(failure).__name__}: {failure}"
    if error is None and not arrivals:
        error = "no token came"
    return Record(due, tuple(arrivals), num_tokens if total is None else total, error)


Run = Callable[[Target, Sequence[WorkloadRequest]], list[Record]]
