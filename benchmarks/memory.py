"""Resident memory of this process and of those that it started. Nothing but the standard library on Linux."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def reset_peak() -> int:
    """Resident bytes now; the kernel's note of the highest starts again from here, where it can (Linux)."""
    for process in _family():
        try:
            (process / "clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return peak_bytes()
    return _sum("VmRSS:") or peak_bytes()


def peak_bytes() -> int:
    """The most that was resident, summed over the processes: an upper bound where their peaks were not at one time."""
    found = _sum("VmHWM:")
    if found:
        return found
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def _sum(field: str) -> int:
    return sum(_status(process, field) for process in _family())


def _status(process: Path, field: str) -> int:
    try:
        lines = (process / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # it has ended meanwhile
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def _family() -> Iterator[Path]:
    waiting = [PROC / "self"] if (PROC / "self").exists() else []
    while waiting:
        process = waiting.pop()
        yield process
        for task in process.glob("task/*/children"):
            try:
                waiting += [PROC / child for child in task.read_text(encoding="ascii").split()]
            except OSError:
                continue
