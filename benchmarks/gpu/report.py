"""From the journal to the result files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.marks import marks
from benchmarks.gpu.tables import markdown


def collect(journal: Journal, about: Mapping[str, Any]) -> dict[str, Any]:
    """All that a result file holds: where it ran, the rows of each part, what was left out, the marks."""
    finished = journal.finished()
    rows: dict[str, list[dict[str, Any]]] = {}
    for (part, _), entry in finished.items():
        kept = {name: value for name, value in entry.items() if name not in ("event", "process", "part")}
        rows.setdefault(part, []).append(kept)
    left_out = {part: [key for key in keys if (part, key) not in finished] for part, keys in journal.planned().items()}
    result = {
        **about,
        "rows": rows,
        "left_out": {part: keys for part, keys in left_out.items() if keys},
        "not_started": [part for part in about["parts"] if part not in left_out],
    }
    result["marks"] = [{**vars(mark), "verdict": mark.verdict} for mark in ([] if about["smoke"] else marks(rows))]
    return result


def write(folder: Path, result: Mapping[str, Any]) -> None:
    """results.json and results.md, each replaced at once."""
    for name, text in (("results.json", json.dumps(result, indent=1) + "\n"), ("results.md", markdown(result))):
        path = folder / name
        temporary = path.with_suffix(".new")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


def has_failed(result: Mapping[str, Any]) -> bool:
    """Whether any row was wrong or ended with an error."""
    return any(row["status"] != "ok" for rows in result["rows"].values() for row in rows)
