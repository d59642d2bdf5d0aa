"""Runs files of a checkout's tests in child processes, until each test has an outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.chapters import Chapter

HERE = Path(__file__).resolve().parent
MAX_CRASHES = 10  # of one chapter

Outcome = dict[str, Any]


def run_chapter(
    checkout: Path,
    chapter: Chapter,
    log: Path,
    *,
    is_paged: bool,
    has_full_masks: bool = False,
    only: Sequence[str] = (),
    timeout: int,
) -> dict[str, Outcome]:
    """Each test's outcome by its id; a test that took its process down is `failed`, with the exit code.

    Args:
        checkout: the root of Transformers' source.
        chapter: the files; those that the checkout lacks are left out.
        log: where the lines of the plugin go; lines of an earlier, broken-off run in it count.
        is_paged: whether "paged" is the default.
        has_full_masks: whether masks that hide what follows a token are filled.
        only: ids to run; empty for all that the chapter selects.
        timeout: seconds a test.
    """
    if not any((checkout / file).exists() for file in chapter.files):
        return {}  # pytest without a file would run all there are
    switches = [*["--paged-default"] * is_paged, *["--full-masks"] * has_full_masks]
    for _ in range(MAX_CRASHES):
        outcomes, collected = read(log)
        asked = only or collected
        left = [name for name in asked if name not in outcomes]
        if (asked and not left) or (not asked and outcomes):  # all done, or the file can't be collected
            return outcomes
        before = len(outcomes)
        returncode = _run(checkout, chapter, log, switches, only=left, timeout=timeout)
        outcomes, collected = read(log)
        if returncode == 5:  # nothing selected
            return outcomes
        started = last_started(log)
        if started is not None and started not in outcomes:
            message = f"the process ended with {returncode} in this test"
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"id": started, "outcome": "failed", "phase": "call", "error": message}) + "\n")
        elif len(outcomes) == before:
            raise RuntimeError(f"{chapter.name} can't be run: see {log.with_suffix('.txt')}.")
    raise RuntimeError(f"{chapter.name} took {MAX_CRASHES} processes down: see {log.with_suffix('.txt')}.")


def _run(
    checkout: Path, chapter: Chapter, log: Path, switches: Sequence[str], *, only: Sequence[str], timeout: int
) -> int:
    options = [
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "paged_by_default",
        "--outcomes",
        str(log),
        "--tb=short",
    ]
    options += ["--timeout", str(timeout), "--timeout-method=signal", "--continue-on-collection-errors"]
    options += switches
    if only:
        options += only
    else:
        options += [file for file in chapter.files if (checkout / file).exists()]
        options += ["-k", chapter.select] if chapter.select else []
    path = [str(HERE / "plugin"), str(HERE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "PYTHONPATH": os.pathsep.join(path)}
    with log.with_suffix(".txt").open("a", encoding="utf-8") as output:
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=checkout,
            env={**os.environ, **settings},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def read(log: Path) -> tuple[dict[str, Outcome], list[str]]:
    """The outcomes in a log, and the ids that its first run collected."""
    outcomes: dict[str, Outcome] = {}
    collected: list[str] = []
    for line in _lines(log):
        if "outcome" in line:
            outcomes[line["id"]] = line
        elif "forgotten" in line:
            outcomes.pop(line["forgotten"], None)
        elif "collected" in line and not collected:
            collected = line["collected"]
    return outcomes, collected


def forget(log: Path, tests: Iterable[str]) -> None:
    """Makes the next run of a chapter run these tests again."""
    with log.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"forgotten": test}) + "\n" for test in tests)


def last_started(log: Path) -> str | None:
    """The test that started last."""
    started = [line["started"] for line in _lines(log) if "started" in line]
    return started[-1] if started else None


def _lines(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]  # a torn line is one that was being written
