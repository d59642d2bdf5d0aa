"""The table of how the host's work grows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def markdown(result: Mapping[str, Any]) -> str:
    """A row a case, and a line on where and how it was measured."""
    lines = ["| operation, by size | time at each size | exponent | should be |", "|---|---|---:|---:|"]
    for row in result["rows"]:
        pairs = zip(row["sizes"], row["seconds"], strict=True)
        times = "; ".join(f"{size:,}: {duration(seconds)}" for size, seconds in pairs)
        mark = " **steep**" if row["is_steep"] else ""
        lines.append(f"| {row['case']} | {times} | {row['exponent']:.2f}{mark} | {row['expected_exponent']:g} |")
    note = (
        "Best of up to 50 runs on one thread; the exponent is that of the last two sizes. "
        f"{result['machine']['cpu']['model']}, {result['date'][:10]}, {result['commit'] or 'no repository'}: "
        f"`{result['command']}`"
    )
    return "\n".join([*lines, "", note])


def duration(seconds: float) -> str:
    """Seconds with a unit that suits them, three digits."""
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"
