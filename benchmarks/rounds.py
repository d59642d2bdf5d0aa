"""Every peer in every round, each in a process of its own, in an order that rotates from round to round."""

from __future__ import annotations

import compileall
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.job import Job
from benchmarks.names import OURS
from benchmarks.peer import Settings
from benchmarks.summary import Round, Row, make_rows
from benchmarks.workloads import Workload, WorkloadRequest, answers_of, complete

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WORKER = "benchmarks.worker"

err = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Foreign:
    """A peer of another environment: its interpreter, the module that it runs, and its own form of the model."""

    python: Path
    module: str
    model_folder: Path


@dataclass(frozen=True)
class Setting:
    """Where and how peers run."""

    model_folder: Path
    threads: int
    settings: Settings = field(default_factory=Settings)
    foreign: Mapping[str, Foreign] = field(default_factory=dict)


def run_rounds(workload: Workload, names: Sequence[str], num_rounds: int, setting: Setting) -> list[Row]:
    """The rows of a table: a peer each.

    Raises:
        RuntimeError: a peer failed, or returned another number of tokens than was asked for.
    """
    for package in ("hf_paged", "benchmarks"):
        compileall.compile_dir(ROOT / package, quiet=1)  # a checkout starts as an installed package does
    results: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(num_rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            title = f"{workload.name}, round {number + 1} of {num_rounds}: {name}"
            with err.status(title):
                result = work(name, workload.requests, setting)
            _check_counts(name, result, workload)
            results[name].append(result)
            if not err.is_terminal:
                err.print(f"{title}: {result['seconds']:.1f} s")
    rows = make_rows(results, workload)
    _add_gaps(rows, results, workload, setting)
    return rows


def work(name: str, requests: Sequence[WorkloadRequest], setting: Setting) -> Round:
    """What a process of its own says of a peer, or of a task of the worker.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    foreign = setting.foreign.get(name)
    python, module = (str(foreign.python), foreign.module) if foreign else (sys.executable, WORKER)
    folder = foreign.model_folder if foreign else setting.model_folder
    with tempfile.TemporaryDirectory() as place:
        result_file = Path(place) / "result.json"
        job = Job(
            name,
            str(folder.resolve()),
            setting.threads,
            setting.settings,
            tuple(requests),
            str(result_file),
            time.time(),
        )
        process = subprocess.run(
            [python, "-m", module],
            input=job.to_json(),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(setting.threads)},
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode or not result_file.exists():
            raise RuntimeError(f"{name} ended with {process.returncode}:\n{process.stderr[-4000:]}")
        result: Round = json.loads(result_file.read_text(encoding="utf-8"))
        return result


def _check_counts(name: str, result: Round, workload: Workload) -> None:
    counts = [len(tokens) for tokens in result["tokens"]]
    wanted = [request.num_output_tokens for request in workload.requests for _ in range(request.num_sequences)]
    if counts != wanted:
        raise RuntimeError(f"{name} returned {counts} tokens where {wanted} were asked for.")


def _add_gaps(rows: list[Row], results: Mapping[str, Sequence[Round]], workload: Workload, setting: Setting) -> None:
    """Where an engine's tokens first differ from ours: how close stock's two best tokens are there."""
    differences = [item for row in rows if row["equality"] for item in row["equality"]["first_differences"]]
    if not differences:
        return
    ours = answers_of(workload.requests, results[OURS][0]["tokens"])
    whole = complete(workload.requests, ours)
    histories = []
    for item in differences:
        request = whole[item["request"]]
        assert request is not None  # all are answered
        said = tuple(ours[item["request"]][0][: item["position"]])
        histories.append(WorkloadRequest(request.prompt_ids + said, 1))
    with err.status("looking at the first differences"):
        gaps = work("gaps", histories, setting)["gaps"]
    for item, gap in zip(differences, gaps, strict=True):
        item["gap"] = gap


def about(benchmark: str, command: str, num_rounds: int, setting: Setting) -> dict[str, Any]:
    """What every result file says of its run. Call it before the run: the load average is that of now."""
    from hf_paged.commands.env import collect_environment

    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "machine": collect_environment(),
        "load_average_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "model": _model_name(setting.model_folder),
        "dtype": "float32",
        "threads": setting.threads,
        "settings": vars(setting.settings),
        "num_rounds": num_rounds,
    }


def command_line(module: str) -> str:
    """What was typed, for others to read: of a path on this machine only the name."""
    shown = [Path(item).name if os.path.isabs(item) else item for item in sys.argv[1:]]
    return shlex.join(["python", "-m", module, *shown])


def about_workload(workload: Workload) -> dict[str, Any]:
    """A workload's name and counts."""
    return {
        "name": workload.name,
        "num_requests": len(workload.requests),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": workload.num_output_tokens,
        "is_sampled": workload.is_sampled,
    }


def write_result(result: Mapping[str, Any], folder: Path, suffix: object) -> Path:
    """Writes a result file, whose name sorts by date."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = result["date"][:19].replace(":", "").replace("-", "")
    path = folder / f"{result['benchmark']}-{stamp}Z-{suffix}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def embedded_folder() -> Path:
    """The embedded model's folder; ends the command with a sentence where it isn't installed."""
    from hf_paged.embedded import EmbeddedModelError, embedded_model_folder

    try:
        return embedded_model_folder()
    except EmbeddedModelError as error:
        raise SystemExit(f"error: {error}") from None


def _model_name(folder: Path) -> str:
    # the embedded model's folder also says which file it came from
    from hf_paged.embedded import MODEL_NAME

    return MODEL_NAME if folder.name.startswith(f"{MODEL_NAME}-") else folder.name


def num_cores() -> int:
    """Cores that this process may use, each counted once."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def commit() -> str | None:
    """The commit, with a note when tracked files differ from it; None outside of a repository."""
    try:
        found = _git("rev-parse", "--short=12", "HEAD")
        return f"{found} with changes" if _git("status", "--porcelain", "--untracked-files=no") else found
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
