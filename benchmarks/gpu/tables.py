"""A result file as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.ceilings import COPY, MATMUL
from benchmarks.gpu.decode import SDPA
from benchmarks.gpu.marks import Rows, good, share_of_copy, times_sdpa
from benchmarks.gpu.tune import TABLE


def markdown(result: Mapping[str, Any]) -> str:
    """Every part as a table."""
    rows = result["rows"]
    sections = [
        ("", [f"# GPU check: {result['device']}", "", _caption(result)]),
        ("Marks", _marks_table(result["marks"])),
        ("Ceilings", _ceilings_table(rows)),
        ("Correctness", _correctness_table(rows)),
        ("Decode", _decode_table(rows)),
        ("Prefill", _prefill_table(rows)),
        ("End to end", _end_to_end_table(rows)),
        ("Launches", _tune_table(rows)),
        ("Rows that failed", _failures(rows)),
        ("Left out", _left_out(result)),
    ]
    lines = []
    for title, body in sections:
        if body:
            lines += ["", f"## {title}", "", *body] if title else body
    return "\n".join(lines) + "\n"


def summary(result: Mapping[str, Any]) -> str:
    """What a terminal shows at the end: marks, ceilings, counts and failures."""
    counts = []
    for part, members in result["rows"].items():
        failed = sum(row["status"] != "ok" for row in members)
        left_out = len(result["left_out"].get(part, ()))
        counts.append(f"{part}: {len(members) - failed} rows good, {failed} failed, {left_out} left out")
    counts += [f"{part}: never started" for part in result["not_started"]]
    blocks = [_marks_table(result["marks"]), _ceilings_table(result["rows"]), counts, _failures(result["rows"])]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _caption(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"{result['date']}, commit {result['commit'] or 'unknown'}, backend {result['backend']}; {versions}. "
        f"`{result['command']}` took {result['seconds']:.0f} s."
    )


def _table(header: Sequence[str], body: Iterable[Sequence[Any]]) -> list[str]:
    lines = [[_text(cell) for cell in row] for row in body]
    if not lines:
        return []
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)]


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:,.0f}"
    return str(cell)


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _marks_table(found: Rows) -> list[str]:
    return _table(
        ("mark", "wanted", "worst row", "its value", "rows that met it", "verdict"),
        (
            (
                mark["name"],
                mark["wanted"],
                mark["worst_row"] or None,
                mark["worst"],
                f"{mark['num_met']} of {mark['num_rows']}",
                mark["verdict"],
            )
            for mark in found
        ),
    )


def _ceilings_table(rows: Mapping[str, Rows]) -> list[str]:
    units = {COPY: ("gb_per_s", "GB/s"), MATMUL: ("tflop_per_s", "TFLOP/s")}
    return _table(
        ("ceiling", "rate", "us, p20 to p80", "timed in"),
        (
            (
                row["key"],
                f"{_text(row[units[row['key']][0]])} {units[row['key']][1]}",
                f"{_text(row['us_p20'])} to {_text(row['us_p80'])}",
                row["timed_in"],
            )
            for row in good(rows, "ceilings")
        ),
    )


def _correctness_table(rows: Mapping[str, Rows]) -> list[str]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows.get("correctness", ()):
        if row["status"] != "error":
            groups.setdefault((row["kernel"], row["dtype"]), []).append(row)
    body = []
    for (kernel, dtype), members in sorted(groups.items()):
        wrong = sum(row["status"] == "wrong" for row in members)
        worst = {
            name: max((row[name] for row in members if row.get(name) is not None), default=None)
            for name in ("max_error", "relative_error", "share_of_tolerance")
        }
        body.append((kernel, dtype, len(members), wrong, *worst.values()))
    header = ("kernel", "dtype", "cases", "wrong", "largest error", "relative error", "share of the tolerance")
    return _table(header, body)


def _decode_table(rows: Mapping[str, Rows]) -> list[str]:
    header = (
        "model", "batch x context", "block size", "K and V", "us, p20 to p80", "GB/s", "of the copy ceiling",
        "times SDPA's speed", "eager call, us", "timed in",
    )  # fmt: skip
    return _table(
        header,
        (
            (
                row["model"],
                f"{row['batch']} x {row['context']}",
                row["block_size"],
                row["kind"],
                f"{_text(row['us_p20'])} to {_text(row['us_p80'])}",
                row["gb_per_s"],
                _percent(share_of_copy(row, rows)),
                _ratio(row, rows),
                row["eager_us_p50"],
                row["timed_in"],
            )
            for row in sorted(
                good(rows, "decode"),
                key=lambda row: (row["model"], row["batch"], row["context"], row["kind"], row["block_size"] or 0),
            )
        ),
    )


def _ratio(row: Mapping[str, Any], rows: Mapping[str, Rows]) -> float | None:
    inverse = times_sdpa(row, rows, "us_p50")
    return None if not inverse or row["kind"] == SDPA else 1 / inverse


def _prefill_table(rows: Mapping[str, Rows]) -> list[str]:
    header = (
        "model", "queries", "cached", "block size", "K and V", "us, p20 to p80", "TFLOP/s", "times SDPA's speed",
        "timed in",
    )  # fmt: skip
    return _table(
        header,
        (
            (
                row["model"],
                row["num_queries"],
                row["num_cached"],
                row["block_size"],
                row["kind"] + {True: ", flash", False: ", not flash", None: ""}[row["flash"]],
                f"{_text(row['us_p20'])} to {_text(row['us_p80'])}",
                row["tflop_per_s"],
                _ratio(row, rows),
                row["timed_in"],
            )
            for row in sorted(
                good(rows, "prefill"),
                key=lambda row: (
                    row["model"], row["num_cached"], row["num_queries"], row["kind"], row["block_size"] or 0
                ),
            )
        ),
    )  # fmt: skip


def _end_to_end_table(rows: Mapping[str, Rows]) -> list[str]:
    ended = good(rows, "end_to_end")
    peers = [row for row in ended if "tokens_per_second" in row]
    lines = _table(
        ("engine", "output tokens/s", "tokens", "of", "workload, s", "warm-up, s", "peak memory above weights, GiB"),
        (
            (
                row["peer"],
                row["tokens_per_second"],
                row["num_output_tokens"],
                f"{row['num_wanted_tokens']}{'' if row['complete'] else ' (ended by its time)'}",
                row["workload_seconds"],
                row["warm_up_seconds"],
                row["peak_bytes_above_weights"] and row["peak_bytes_above_weights"] / 2**30,
            )
            for row in peers
        ),
    )
    for row in ended:
        if "num_equal" in row:
            lines += [
                "",
                f"Tokens in float32: {row['num_equal']} of {row['num_requests']} requests equal to stock `generate`, "
                f"{row['num_tokens']} tokens, {row['num_distinct_tokens']} of them distinct; gaps of logits where "
                f"others differ: {row['gaps_where_different']}.",
            ]
    return lines


def _tune_table(rows: Mapping[str, Rows]) -> list[str]:
    shapes: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in good(rows, "tune"):
        shapes.setdefault((row["kernel"], ", ".join(map(str, row["shape"]))), []).append(row)
    body = []
    for (kernel, shape), members in shapes.items():
        table = next((row["us_p50"] for row in members if row["launch"] == TABLE), None)
        for row in sorted(members, key=lambda row: row["us_p50"])[:5]:
            body.append((kernel, shape, row["launch"], row["us_p50"], table and table / row["us_p50"]))
    return _table(("kernel", "shape", "launch", "us", "times the table's speed"), body)


def _failures(rows: Mapping[str, Rows]) -> list[str]:
    return [
        f"- {part}, {row['key']}: {row['status']}; "
        + (row["error"] if row["status"] == "error" else json.dumps({k: row[k] for k in row if k in _TOLD}))
        for part, members in rows.items()
        for row in members
        if row["status"] != "ok"
    ]


_TOLD = (
    "has_nan",
    "max_error",
    "relative_error",
    "share_of_tolerance",
    "others_kept",
    "gaps_where_different",
    "num_equal",
)


def _left_out(result: Mapping[str, Any]) -> list[str]:
    lines = [f"- {part}: {key}" for part, keys in result["left_out"].items() for key in keys]
    return lines + [f"- {part}: all of it, never started" for part in result["not_started"]]
