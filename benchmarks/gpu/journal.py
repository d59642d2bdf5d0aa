"""The journal: a line for each thing that happened, so that a killed run loses one row and not its results.

    {"event": "planned", "part": ..., "keys": [...]}                the rows a part has
    {"event": "started", "part": ..., "key": ...}                   a row begins
    {"event": "finished", "part": ..., "key": ..., "status": ...}   "ok", "wrong" or "error", and its numbers

Several processes append to one file. A planned row that never finished was left out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Key = tuple[str, str]  # part, key


@dataclass(frozen=True)
class Journal:
    """The file of one output folder."""

    path: Path

    def append(self, event: str, part: str, **fields: Any) -> None:
        """Adds a line; one write, so that lines of several processes don't mix."""
        line = json.dumps({"event": event, "time": time.time(), "process": os.getpid(), "part": part, **fields})
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)

    def entries(self) -> list[dict[str, Any]]:
        """All lines in their order; one that was cut short by a kill is dropped."""
        if not self.path.exists():
            return []
        entries = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return entries

    def planned(self) -> dict[str, list[str]]:
        """The keys of each part that was begun."""
        return {entry["part"]: entry["keys"] for entry in self.entries() if entry["event"] == "planned"}

    def finished(self) -> dict[Key, dict[str, Any]]:
        """The newest result of each row."""
        return {(e["part"], e["key"]): e for e in self.entries() if e["event"] == "finished"}

    def to_skip(self, since: float) -> set[Key]:
        """Rows that are done: those that went well, and whatever ended in this run, which began at `since`."""
        return {key for key, row in self.finished().items() if row["status"] == "ok" or row["time"] >= since}

    def running(self, process: int) -> Mapping[str, Any] | None:
        """The row that a process began and hasn't ended."""
        begun: dict[str, Any] | None = None
        for entry in self.entries():
            if entry["process"] == process and entry["event"] in ("started", "finished"):
                begun = entry if entry["event"] == "started" else None
        return begun
