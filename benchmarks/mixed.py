"""The workload "mixed" through stock Transformers and through hf_paged, in one run on one machine.

    python -m benchmarks.mixed                     32 requests, 3 rounds: the table of the README
    python -m benchmarks.mixed --requests 128 --rounds 5

A round runs every engine once, each in a process of its own, in an order that rotates from round to round.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.peers import OURS, PEERS, Settings
from benchmarks.summary import HEADER, Round, caption, cells, make_rows, markdown
from benchmarks.worker import GAPS, Job
from benchmarks.workloads import Workload, WorkloadRequest, mixed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

err = Console(stderr=True, highlight=False)


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests in the workload.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the table has their median.")] = 3,
    peers: Annotated[list[str] | None, typer.Option("--peer", help=f"One of {', '.join(PEERS)}; repeat it.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch. Default: a core each.")] = None,
    model: Annotated[Path | None, typer.Option(help="A model folder. Default: the embedded SmolLM2-135M.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
) -> None:
    """Measure all engines on one workload, write a result file, print its table."""
    names = peers or list(PEERS)
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(PEERS)}.", param_hint="--peer")
    folder = model or _embedded()
    result = run(
        mixed(requests),
        model_folder=folder,
        names=names,
        num_rounds=rounds,
        threads=threads or _num_cores(),
        settings=Settings(),
        command=shlex.join(["python", "-m", "benchmarks.mixed", *sys.argv[1:]]),
    )
    path = write(result, output)
    _print(result)
    err.print(f"Written to {os.path.relpath(path)}")
    fallbacks = {row["peer"]: row["num_fallbacks"] for row in result["rows"] if row["num_fallbacks"]}
    if fallbacks:
        err.print(f"[bold red]error:[/] stock's loop ran instead of ours: {fallbacks}")
        raise typer.Exit(1)


def run(
    workload: Workload,
    *,
    model_folder: Path,
    names: list[str],
    num_rounds: int,
    threads: int,
    settings: Settings,
    command: str,
) -> dict[str, Any]:
    """Every peer in every round; returns what a result file holds.

    Raises:
        RuntimeError: a peer failed, or returned another number of tokens than was asked for.
    """
    from hf_paged.commands.env import collect_environment

    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    results: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(num_rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            with err.status(f"round {number + 1} of {num_rounds}: {name}"):
                result = _work(name, workload.requests, model_folder, threads, settings)
            _check_counts(name, result, workload)
            results[name].append(result)
            if not err.is_terminal:
                err.print(f"round {number + 1} of {num_rounds}: {name}: {result['seconds']:.1f} s")
    rows = make_rows(results, workload.num_output_tokens)
    _add_gaps(rows, results, workload, model_folder, threads, settings)
    return {
        "benchmark": "mixed",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "commit": _commit(),
        "machine": collect_environment(),
        "load_average_before": load_before,
        "model": _model_name(model_folder),
        "dtype": "float32",
        "threads": threads,
        "settings": vars(settings),
        "workload": {
            "name": workload.name,
            "num_requests": len(workload.requests),
            "num_prompt_tokens": workload.num_prompt_tokens,
            "num_output_tokens": workload.num_output_tokens,
        },
        "num_rounds": num_rounds,
        "rows": rows,
    }


def _work(
    name: str, requests: tuple[WorkloadRequest, ...], model_folder: Path, threads: int, settings: Settings
) -> Round:
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "result.json"
        job = Job(name, str(model_folder.resolve()), threads, settings, requests, str(result_file), time.time())
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.worker"],
            input=job.to_json(),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
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
    wanted = [request.num_output_tokens for request in workload.requests]
    if counts != wanted:
        raise RuntimeError(f"{name} returned {counts} tokens where {wanted} were asked for.")


def _add_gaps(
    rows: list[dict[str, Any]],
    results: dict[str, list[Round]],
    workload: Workload,
    model_folder: Path,
    threads: int,
    settings: Settings,
) -> None:
    """Where an engine's tokens first differ from ours: how close stock's two best tokens are there."""
    if OURS not in results:
        return
    ours = results[OURS][0]["tokens"]
    differences = [item for row in rows for item in row["equality"]["first_differences"]]
    if not differences:
        return
    histories = tuple(
        WorkloadRequest(
            workload.requests[item["request"]].prompt_ids + tuple(ours[item["request"]][: item["position"]]), 1
        )
        for item in differences
    )
    with err.status("looking at the first differences"):
        gaps = _work(GAPS, histories, model_folder, threads, settings)["gaps"]
    for item, gap in zip(differences, gaps, strict=True):
        item["gap"] = gap


def write(result: dict[str, Any], folder: Path) -> Path:
    """Writes a result file, whose name sorts by date."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = result["date"][:19].replace(":", "").replace("-", "")
    path = folder / f"mixed-{stamp}Z-{result['workload']['num_requests']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def _print(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        print(markdown(result))
        return
    table = Table()
    for index, title in enumerate(HEADER):
        table.add_column(title, justify="right" if index else "left")
    for row in result["rows"]:
        table.add_row(*cells(row))
    console.print(table)
    console.print(caption(result), style="dim")


def _embedded() -> Path:
    from hf_paged.embedded import EmbeddedModelError, embedded_model_folder

    try:
        return embedded_model_folder()
    except EmbeddedModelError as error:
        err.print(f"[bold red]error:[/] {error}")
        raise typer.Exit(1) from None


def _model_name(folder: Path) -> str:
    # the embedded model's folder also says which file it came from
    from hf_paged.embedded import MODEL_NAME

    return MODEL_NAME if folder.name.startswith(f"{MODEL_NAME}-") else folder.name


def _num_cores() -> int:
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def _commit() -> str | None:
    """The commit, with a note when tracked files differ from it; None outside of a repository."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return f"{commit} with changes" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    typer.run(main)
