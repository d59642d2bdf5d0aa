"""Checks and measures the kernels on a GPU: one command, below 8 minutes, from a checkout that isn't installed.

    python -m benchmarks.gpu_check                              everything but tune
    python -m benchmarks.gpu_check --parts correctness,decode   some parts
    python -m benchmarks.gpu_check --resume --output DIR        what is missing in DIR, and what failed there
    python -m benchmarks.gpu_check --parts tune                 other launches than the table's
    python -m benchmarks.gpu_check --smoke                      all of it at tiny sizes on the CPU: tests the script

It needs torch, Triton, Transformers and numpy. Rows run in processes of their own: one that hangs or breaks the device
costs its row. Each row is written when it ends, to rows.jsonl, results.json and results.md in the output folder. The
exit status is 1 if a kernel was wrong or a row failed; a missed mark is only reported.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.budgets import ALL_PARTS, BUDGETS, SHARDED, deadlines

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SECONDS = 450.0  # for all parts together; starting and ending take some more
MAX_SHARDS = 8  # processes that share the rows of a part where nothing is timed: compiling takes long there

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(given)
    if options.smoke:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
    import torch

    from benchmarks.gpu import report
    from benchmarks.gpu.journal import Journal
    from benchmarks.gpu.part import Setting
    from benchmarks.gpu.supervisor import Supervisor
    from benchmarks.gpu.tables import summary
    from benchmarks.gpu.worker import work

    if not options.smoke and not torch.cuda.is_available():
        print("There is no GPU here; --smoke runs everything at tiny sizes on the CPU.", file=sys.stderr)
        return 2
    setting = Setting(torch.device("cpu" if options.smoke else "cuda"), options.backend, options.smoke)
    if options.worker is not None:
        shard = (int(options.worker[0]), int(options.worker[1]))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // shard[1]))
        limits = dict(zip(options.parts, map(float, options.worker[3:]), strict=True))
        journal = Journal(options.output / "rows.jsonl")
        return work(options.parts, setting, journal, limits, float(options.worker[2]), shard)

    started = time.time()
    device = "cpu" if options.smoke else torch.cuda.get_device_name()
    folder = _folder(options, device)
    journal = Journal(folder / "rows.jsonl")
    about: dict[str, Any] = {
        "benchmark": "gpu_check",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.gpu_check", *given]),
        "commit": _commit(),
        "device": device,
        "backend": options.backend,
        "smoke": options.smoke,
        "parts": options.parts,
        "versions": _versions(),
    }
    limits = deadlines(options.parts, started, options.seconds)

    def write() -> dict[str, Any]:
        result = report.collect(journal, {**about, "seconds": time.time() - started})
        report.write(folder, result)
        return result

    if options.smoke:
        work(options.parts, setting, journal, limits, started)
    else:

        def command(parts: Sequence[str], shard: tuple[int, int]) -> list[str]:
            times = [repr(limits[part]) for part in parts]
            return [
                *(sys.executable, "-m", "benchmarks.gpu_check", "--parts", ",".join(parts), "--output", str(folder)),
                *("--backend", options.backend, "--worker", *map(str, shard), repr(started), *times),
            ]

        supervisor = Supervisor(command, journal, limits, write)
        num_shards = max(1, min(MAX_SHARDS, (os.cpu_count() or 1) // 2))
        for are_sharded, parts in itertools.groupby(options.parts, lambda part: part in SHARDED):
            supervisor.run(list(parts), num_shards if are_sharded else 1)
    result = write()
    print(summary(result))
    print(f"Written to {os.path.relpath(folder)}")
    return int(report.has_failed(result))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default=",".join(BUDGETS), help=f"some of {','.join(ALL_PARTS)}")
    parser.add_argument("--output", type=Path, help="folder of the results; default: a new one in benchmarks/results")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the folder has, if they went well")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for all parts together")
    parser.add_argument("--backend", default="triton", help="name of the attention backend")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, in this process; no marks")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)  # shard, shards, start, a deadline a part
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.parts.split(",")]
    unknown = [name for name in names if name not in ALL_PARTS]
    if unknown:
        parser.error(f"--parts: {unknown[0]!r} is none of {', '.join(ALL_PARTS)}")
    if "tune" in names and options.worker is None:
        names.append("tune_compile")
    options.parts = [part for part in ALL_PARTS if part in names]
    return options


def _folder(options: argparse.Namespace, device: str) -> Path:
    prefix = "gpu-" + re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    if options.output is not None:
        folder: Path = options.output
    elif options.resume and (earlier := sorted(RESULTS.glob(f"{prefix}-2*"))):
        folder = earlier[-1]
    else:
        folder = RESULTS / f"{prefix}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%SZ}"
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "rows.jsonl").exists() and not options.resume:
        raise SystemExit(f"{folder} has results already; give --resume, or another --output.")
    return folder.resolve()


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread of a peer that hangs must not keep the process
