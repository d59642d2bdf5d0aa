"""A comparison's result as Markdown: one table of ratios, then a table a workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.names import OURS, VLLM
from benchmarks.summary import NOTHING, machine_caption, markdown_table, workload_caption


def markdown(result: Mapping[str, Any]) -> str:
    """Everything that a result file holds and a reader wants."""
    parts = [headline(result)]
    for part in result["workloads"]:
        rates = [part[f"flops_per_second_{when}"] / 1e9 for when in ("before", "after")]
        limit = (
            f"The limit is {part['limit_seconds']:.1f} s: every token's products at the GEMM peak, measured as "
            f"{rates[0]:.0f} GFLOP/s before and {rates[1]:.0f} after."
        )
        heading = f"### {part['workload']['name'].capitalize()} ({part['workload']['num_requests']})"
        parts += [heading, markdown_table(part["rows"]), f"{workload_caption(part['workload'])} {limit}"]
    return "\n\n".join(parts)


def headline(result: Mapping[str, Any]) -> str:
    """The ratios, and what they are of."""
    return f"{ratios(result)}\n\n{machine_caption(result)}{_foreign_note(result)}"


def ratios(result: Mapping[str, Any]) -> str:
    """Each engine's time per ours, a column a workload; in the last row our own seconds."""
    parts = result["workloads"]
    names = list(dict.fromkeys(row["peer"] for part in parts for row in part["rows"]))
    titles = [f"{part['workload']['name']} ({part['workload']['num_requests']})" for part in parts]
    lines = [f"| time, ours = 1 | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for name in names:
        found = [next((row for row in part["rows"] if row["peer"] == name), None) for part in parts]
        cells = [
            NOTHING if row is None or row["time_to_ours"] is None else f"{row['time_to_ours']:.2f}" for row in found
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for title, text in (("the limit", _limit_ratio), (f"{OURS}, seconds", _our_seconds)):
        lines.append(f"| {title} | {' | '.join(map(text, parts))} |")
    return "\n".join(lines)


def _limit_ratio(part: Mapping[str, Any]) -> str:
    ours = _ours(part)
    return NOTHING if ours is None else f"{part['limit_seconds'] / ours['seconds']:.2f}"


def _our_seconds(part: Mapping[str, Any]) -> str:
    ours = _ours(part)
    return NOTHING if ours is None else f"{ours['seconds']:.1f}"


def _ours(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((row for row in part["rows"] if row["peer"] == OURS), None)


def _foreign_note(result: Mapping[str, Any]) -> str:
    peers = {row["peer"] for part in result["workloads"] for row in part["rows"]}
    text = ""
    if result.get("export_seconds") is not None:
        text += (
            f" openvino-genai's export of the model to its own format, {result['export_seconds']:.0f} s, comes first."
        )
    if VLLM in peers:
        text += " vllm's start-up holds its compilation."
    return text
