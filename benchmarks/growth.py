"""How the host's work grows with its size: block pool, scheduler, packing, sampling.

    python -m benchmarks.growth                   a minute; writes benchmarks/results/growth-DATE.json and .md
    python -m benchmarks.growth --case step       those whose name holds the word

The exponent is that of the last two sizes: 0 is no growth, 1 is growth in proportion. A case that grows faster than it
should is marked, and the command ends with 1; a profile of it is printed.
"""

from __future__ import annotations

import cProfile
import datetime
import io
import math
import os
import pstats
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.growth_cases import CASES, MAX_REPEATS, Case, Operation
from benchmarks.growth_table import markdown
from benchmarks.rounds import RESULTS, command_line, commit, err, write_result

SECONDS = 0.3  # for one size
TOLERANCE = 0.5  # what an exponent may be too high: a state that outgrows the caches adds some 0.3


def main(
    case: Annotated[str, typer.Option(help="Only cases whose name holds this.")] = "",
    output: Annotated[Path, typer.Option(help="Folder of the result file and its table.")] = RESULTS,
) -> None:
    """Measure, write a result file beside its table, print the table."""
    import torch

    cases = [item for item in CASES if case in item.name]
    if not cases:
        raise typer.BadParameter(f"{case!r} is in no case's name.", param_hint="--case")
    torch.set_num_threads(1)  # the host's work; products of many threads are another benchmark's
    result = run(cases, command_line("benchmarks.growth"))
    path = write_result(result, output, len(cases))
    text = markdown(result)
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    print(text)
    err.print(f"Written to {os.path.relpath(path)}, its table beside it")
    steep = [item for item, row in zip(cases, result["rows"], strict=True) if row["is_steep"]]
    for item in steep:
        print(f"\n{item.name} at {item.sizes[-1]:,}:\n{profile(item)}")
    raise typer.Exit(int(bool(steep)))


def run(cases: Sequence[Case], command: str, seconds: float = SECONDS) -> dict[str, Any]:
    """What a result file holds: a row a case."""
    from hf_paged.commands.env import collect_environment

    return {
        "benchmark": "growth",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "machine": collect_environment(),
        "rows": [measure(case, seconds) for case in cases],
    }


def measure(case: Case, seconds: float = SECONDS) -> dict[str, Any]:
    """A case's best time at each of its sizes, and its exponent."""
    times = [best_seconds(case.prepare(size), seconds) for size in case.sizes]
    found = exponent(case.sizes, times)
    return {
        "case": case.name,
        "sizes": list(case.sizes),
        "seconds": times,
        "exponent": found,
        "expected_exponent": case.exponent,
        "is_steep": found > case.exponent + TOLERANCE,
    }


def best_seconds(operation: Operation, seconds: float) -> float:
    """The shortest of up to MAX_REPEATS runs, at least three, within about so many seconds."""
    best = math.inf
    until = time.perf_counter() + seconds
    for number in range(MAX_REPEATS):
        begin = time.perf_counter()
        operation()
        end = time.perf_counter()
        best = min(best, end - begin)
        if number >= 2 and end > until:
            break
    return best


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The power of the size that the time goes with, between the last two sizes."""
    return math.log(times[-1] / times[-2]) / math.log(sizes[-1] / sizes[-2])


def profile(case: Case) -> str:
    """Where the time of a case's largest size goes."""
    operation = case.prepare(case.sizes[-1])
    profiler = cProfile.Profile()
    profiler.runcall(operation)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("cumulative").print_stats(12)
    return text.getvalue()


if __name__ == "__main__":
    typer.run(main)
