"""The table of a serving benchmark: a row a load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEASURES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end"}


def markdown(result: Mapping[str, Any]) -> str:
    """All loads, and a line on what was sent where."""
    names = " | ".join(f"{title}, P50 / P95 / P99" for title in MEASURES.values())
    lines = [
        f"| load | requests/s | output tokens/s | {names} | within goals | goodput, requests/s |",
        "|---|" + "---:|" * (len(MEASURES) + 4),
    ]
    for load in result["loads"]:
        measures = " | ".join(_shares(load["summary"][f"{name}_seconds"]) for name in MEASURES)
        summary = load["summary"]
        failed = f", {summary['num_failed']} failed" if summary["num_failed"] else ""
        lines.append(
            f"| {load['name']}{failed} | {summary['requests_per_second']:.2f} | "
            f"{summary['output_tokens_per_second']:.1f} | {measures} | {summary['share_within_goals']:.0%} | "
            f"{summary['goodput_requests_per_second']:.2f} |"
        )
    return "\n".join([*lines, "", caption(result)])


def caption(result: Mapping[str, Any]) -> str:
    """What was sent, to whom, with which goals."""
    workload, goals = result["workload"], result["goals"]
    wanted = ", ".join(f"{MEASURES[name]} {value:g} s" for name, value in goals.items() if value is not None)
    return (
        f"Workload *{workload['name']}*: {workload['num_requests']} requests, {workload['num_prompt_tokens']:,} tokens "
        f"in, {workload['num_output_tokens']:,} out, to {result['target']}. Goals: {wanted or 'none'}. "
        f"{result['machine']['cpu']['model']}, {result['threads']} threads. "
        f"{result['date'][:10]}, {result['commit'] or 'no repository'}: `{result['command']}`"
    )


def _shares(shares: Mapping[str, float] | None) -> str:
    return "-" if shares is None else " / ".join(_seconds(value) for value in shares.values())


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
