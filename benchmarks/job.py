"""One peer, one round, in a process of its own: the job that it reads and the result that it writes.

    process starts ─ imports ─ weights ─ peer ─ first token ─ warm-up ─│─ workload ─│
    └───────────────────────── cold ──────────┘                        │            │
    └───────────────────────── start-up ──────────────────────────────┘ └─ seconds ─┘
                               └──────────── peak memory above this ────────────────┘

Nothing but the standard library: other engines' environments load this.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.peer import FIRST, WARM_UP, Peer, Report, Settings, Tokens
from benchmarks.workloads import WorkloadRequest, answers_of, complete


@dataclass(frozen=True)
class Job:
    """What a process is asked for. `peer` is a peer's name, or that of a task of the worker."""

    peer: str
    model_folder: str
    threads: int
    settings: Settings
    requests: tuple[WorkloadRequest, ...]
    result_file: str
    started: float  # time.time() of the process's start

    def to_json(self) -> str:
        """For the process's stdin."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse."""
        fields = json.loads(text)
        fields["settings"] = Settings(**fields["settings"])
        fields["requests"] = tuple(
            WorkloadRequest(**{**item, "prompt_ids": tuple(item["prompt_ids"])}) for item in fields["requests"]
        )
        return cls(**fields)

    def write(self, result: dict[str, Any]) -> None:
        """Leaves the result where the job says."""
        Path(self.result_file).write_text(json.dumps(result), encoding="utf-8")


def measure(job: Job, make_peer: Callable[[], Peer], resting_bytes: int) -> dict[str, Any]:
    """Starts the peer, warms it up, gives it the workload.

    Args:
        job: what to run.
        make_peer: makes the peer; what it takes is in the start-up.
        resting_bytes: memory that a process with imports and weights alone holds.
    """
    peer = make_peer()
    peer.run(FIRST)
    cold = time.time() - job.started
    peer.run(WARM_UP)
    startup = time.time() - job.started
    begin = time.perf_counter()
    tokens, report = run_turns(peer, job.requests)
    seconds = time.perf_counter() - begin
    peak = memory.peak_bytes()
    peer.close()
    return {
        "cold_seconds": cold,
        "startup_seconds": startup,
        "seconds": seconds,
        "peak_bytes_above_weights": max(0, peak - resting_bytes),
        "tokens": tokens,
        **asdict(report),
    }


def run_turns(peer: Peer, requests: Sequence[WorkloadRequest]) -> tuple[Tokens, Report]:
    """All requests that can start, then those that follow them, and so on. Times are from a request's own start."""
    answers: list[list[list[int]] | None] = [None] * len(requests)
    reports: list[tuple[list[int], Report]] = []
    while None in answers:
        whole = complete(requests, answers)
        turn = [(index, item) for index, item in enumerate(whole) if item is not None and answers[index] is None]
        tokens, report = peer.run([item for _, item in turn])
        indices = [index for index, _ in turn]
        for index, said in zip(indices, answers_of([item for _, item in turn], tokens), strict=True):
            answers[index] = [list(answer) for answer in said]
        reports.append((indices, report))
    return [answer for said in answers for answer in said or ()], _merged(reports, len(requests))


def _merged(reports: Sequence[tuple[list[int], Report]], num_requests: int) -> Report:
    if len(reports) == 1:
        return reports[0][1]

    def by_request(name: str) -> tuple[float, ...] | None:
        values: list[float | None] = [None] * num_requests
        for indices, report in reports:
            for index, value in zip(indices, getattr(report, name) or (), strict=False):
                values[index] = value
        known = [value for value in values if value is not None]
        return tuple(known) if len(known) == num_requests else None

    def all_of(name: str) -> list[Any] | None:
        values = [getattr(report, name) for _, report in reports]
        return None if None in values else values

    def total(name: str) -> int | None:
        values = all_of(name)
        return None if values is None else sum(values)

    occupancy = all_of("token_occupancy")
    hits = all_of("prefix_hit_rate")
    return Report(
        kv_bytes=max(report.kv_bytes for _, report in reports),
        token_occupancy=None if occupancy is None else sum(occupancy) / len(occupancy),
        done_seconds=by_request("done_seconds") or (),
        first_token_seconds=by_request("first_token_seconds"),
        num_steps=total("num_steps"),
        num_preemptions=total("num_preemptions"),
        num_fallbacks=total("num_fallbacks"),
        prefix_hit_rate=hits[-1] if hits else None,  # counted over a peer's life
    )
