"""The data: what each entry came to on a version of Transformers. One JSON file a version, beside this one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import transformers

FOLDER = Path(__file__).parent
INSTALLED: str = transformers.__version__

# Token-identical, and how the tokens came about.
ON_THE_ENGINE = ("direct", "gather", "by row")
OURS = (*ON_THE_ENGINE, "stock", "refused", "failed")
# Nothing can be said of these: the tiny model isn't there, or stock raises on what is asked of it.
UNKNOWN = ("not built", "fails in stock")
MODES = (*OURS, *UNKNOWN)

Outcome = dict[str, Any]


def file_of(version: str) -> Path:
    """The data file of a version of Transformers."""
    return FOLDER / f"outcomes-{version}.json"


def versions() -> list[str]:
    """The versions that there are data for, oldest first."""
    found = (path.stem.removeprefix("outcomes-") for path in FOLDER.glob("outcomes-*.json"))
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def load(version: str) -> dict[str, Outcome]:
    """The outcomes of a version, by the entries' keys; empty if there are none yet."""
    path = file_of(version)
    return dict(json.loads(path.read_text())["models"]) if path.exists() else {}


def save(version: str, outcomes: dict[str, Outcome]) -> None:
    """Writes the outcomes of a version, sorted."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(outcomes[key])}" for key in sorted(outcomes))
    about = "Made by `python -m tests.models.table`; what the fields mean: tests/models/judging.py"
    text = f'{{\n"about": {json.dumps(about)},\n"transformers": "{version}",\n"models": {{\n{lines}\n}}\n}}\n'
    path = file_of(version).with_suffix(f".{os.getpid()}")
    path.write_text(text)
    path.replace(file_of(version))  # at once, so that another process reads all or nothing of it


def wrong_cases(outcome: Outcome) -> dict[str, str]:
    """The cases in which the tokens were not stock's, or that ended in an error that stock doesn't raise."""
    fine = ("equal", "fails in stock")
    return {name: said for name, said in outcome.get("cases", {}).items() if not said.startswith(fine)}


def is_identical(outcome: Outcome) -> bool:
    """Whether every case of a model that could be judged gave stock's tokens."""
    return outcome["mode"] in (*ON_THE_ENGINE, "stock") and not wrong_cases(outcome)
