"""From rounds to rows, and from rows to a Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.names import OURS
from benchmarks.percentiles import percentiles
from benchmarks.workloads import Workload, WorkloadRequest, answers_of

Round = dict[str, Any]  # what a process wrote
Row = dict[str, Any]  # JSON-ready


def make_rows(rounds: Mapping[str, Sequence[Round]], workload: Workload) -> list[Row]:
    """A row a peer: medians over its rounds, and the fastest and the slowest. Sampled answers aren't compared."""
    rows = [_row(name, results, workload) for name, results in rounds.items()]
    ours = next((row for row in rows if row["peer"] == OURS), None)
    reference = rounds[OURS][0]["tokens"] if ours and not workload.is_sampled else None
    for row in rows:
        row["time_to_ours"] = row["seconds"] / ours["seconds"] if ours else None
        row["equality"] = _equality(rounds[row["peer"]], reference, workload.requests) if reference else None
    return rows


def _row(name: str, results: Sequence[Round], workload: Workload) -> Row:
    def median(key: str) -> Any:
        values = [result[key] for result in results]
        return None if None in values else statistics.median(values)

    seconds = [result["seconds"] for result in results]
    return {
        "peer": name,
        "cold_seconds": median("cold_seconds"),
        "startup_seconds": median("startup_seconds"),
        "seconds": median("seconds"),
        "seconds_of_rounds": seconds,
        "output_tokens_per_second": workload.num_output_tokens / median("seconds"),
        "requests_per_second": len(workload.requests) / median("seconds"),
        "done_seconds": _percentiles_of([result["done_seconds"] for result in results]),
        "first_token_seconds": _percentiles_of([result["first_token_seconds"] for result in results]),
        "seconds_per_output_token": _percentiles_of([_per_token(result, workload.requests) for result in results]),
        "peak_bytes_above_weights": median("peak_bytes_above_weights"),
        "kv_bytes": median("kv_bytes"),
        "token_occupancy": median("token_occupancy"),
        "prefix_hit_rate": median("prefix_hit_rate"),
        "num_steps": median("num_steps"),
        "num_preemptions": median("num_preemptions"),
        "num_fallbacks": max((result["num_fallbacks"] for result in results), key=lambda count: count or 0),
    }


def _per_token(result: Round, requests: Sequence[WorkloadRequest]) -> list[float] | None:
    first = result["first_token_seconds"]
    if first is None or first == result["done_seconds"]:  # it comes all at once: there is no time between tokens
        return None
    return [
        (done - begin) / (request.num_output_tokens - 1)
        for done, begin, request in zip(result["done_seconds"], first, requests, strict=True)
        if request.num_output_tokens > 1
    ]


def _percentiles_of(rounds: Sequence[list[float] | None]) -> dict[str, float] | None:
    """P50, P95 and P99 over the requests of a round, each the median over the rounds."""
    known = [percentiles(values) for values in rounds if values]
    if not known:
        return None
    return {name: statistics.median(values[name] for values in known) for name in known[0]}


def _equality(
    rounds: Sequence[Round], reference: Sequence[Sequence[int]], requests: Sequence[WorkloadRequest]
) -> dict[str, Any]:
    """Of the round with the most differences: how many requests are equal, and where the others first differ.

    A turn whose conversation has differed before had another prompt: it is neither equal nor a first difference.
    """
    worst: list[dict[str, int]] = []
    num_equal = len(requests)
    wanted = [said[0] for said in answers_of(requests, reference)]
    for result in rounds:
        differences, differing = [], set[int]()
        for index, said in enumerate(answers_of(requests, result["tokens"])):
            if requests[index].follows in differing:
                differing.add(index)
            elif list(said[0]) != list(wanted[index]):
                pairs = enumerate(zip(said[0], wanted[index], strict=False))
                places = (place for place, (one, two) in pairs if one != two)
                shortest = min(len(said[0]), len(wanted[index]))
                differences.append({"request": index, "position": next(places, shortest)})
                differing.add(index)
        if len(requests) - len(differing) < num_equal:
            num_equal, worst = len(requests) - len(differing), differences
    return {"num_equal": num_equal, "num_requests": len(requests), "first_differences": worst}


def markdown(result: Mapping[str, Any]) -> str:
    """A result file's table, with a line on what was measured and where."""
    return f"{markdown_table(result['rows'])}\n\n{caption(result)}"


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows, with those columns of which something is known."""
    shown = columns(rows)
    lines = [f"| {' | '.join(shown)} |", "|---|" + "---:|" * (len(shown) - 1)]
    return "\n".join(lines + [f"| {' | '.join(cells(row, shown))} |" for row in rows])


def caption(result: Mapping[str, Any]) -> str:
    """What was measured, on what, and how to measure it again."""
    return f"{workload_caption(result['workload'])} {machine_caption(result)}"


def workload_caption(workload: Mapping[str, Any]) -> str:
    """A workload's counts."""
    return (
        f"Workload *{workload['name']}*: {workload['num_requests']} requests, {workload['num_prompt_tokens']:,} tokens "
        f"in, {workload['num_output_tokens']:,} out, {'sampled' if workload.get('is_sampled') else 'greedy'}."
    )


def machine_caption(result: Mapping[str, Any]) -> str:
    """The machine, the versions and the command."""
    machine, packages = result["machine"], result["machine"]["packages"]
    commit, rounds = result["commit"] or "no repository", result["num_rounds"]
    measured = "One round" if rounds == 1 else f"Median of {rounds} interleaved rounds (fastest to slowest)"
    return (
        f"{result['model']}, {result['dtype']}. {measured}, each engine in a process of its own. "
        f"{machine['cpu']['model']}, {result['threads']} threads; torch {packages['torch']}, transformers "
        f"{packages['transformers']}. Start-up is from the process's start to the first request, imports, weights and "
        f"a warm-up of short prompts included. {result['date'][:10]}, {commit}: `{result['command']}`"
    )


def cells(row: Row, titles: Sequence[str]) -> list[str]:
    """A row as text, in the columns of these titles."""
    return [COLUMNS[title](row) for title in titles]


def columns(rows: Sequence[Row]) -> list[str]:
    """The titles of all columns in which something stands."""
    return [title for title, text in COLUMNS.items() if any(text(row) != NOTHING for row in rows)]


NOTHING = "-"


def _cell(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value = row.get(key)
        return NOTHING if value is None else form.format(value / scale)

    return text


def _pair(key: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        shares = row.get(key)
        return NOTHING if shares is None else f"{_short(shares['p50'])} / {_short(shares['p95'])} s"

    return text


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 1 else f"{seconds:.1f}"


def _seconds(row: Row) -> str:
    rounds = row["seconds_of_rounds"]
    spread = f" ({min(rounds):.1f} to {max(rounds):.1f})" if len(rounds) > 1 else ""
    return f"{row['seconds']:.1f} s{spread}"


def _equality_text(row: Row) -> str:
    equality = row["equality"]
    if equality is None:
        return NOTHING
    text = f"{equality['num_equal']} of {equality['num_requests']}"
    gaps = [item["gap"] for item in equality["first_differences"] if "gap" in item]
    if gaps:
        text += f"; others where stock's two best are within {max(gaps):.1e}"
    return text


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "engine": lambda row: str(row["peer"]),
    "first token, cold": _cell("cold_seconds", "{:.1f} s"),
    "start-up": _cell("startup_seconds", "{:.1f} s"),
    "workload": _seconds,
    "output tokens/s": _cell("output_tokens_per_second", "{:.1f}"),
    "time, ours = 1": _cell("time_to_ours", "{:.2f}"),
    "time, limit = 1": _cell("time_to_limit", "{:.2f}"),
    "first token, P50 / P95": _pair("first_token_seconds"),
    "request done, P50 / P95": _pair("done_seconds"),
    "peak memory above weights": _cell("peak_bytes_above_weights", "{:,.0f} MiB", 2**20),
    "KV reserved": _cell("kv_bytes", "{:,.0f} MiB", 2**20),
    "token occupancy": _cell("token_occupancy", "{:.1%}"),
    "prompt tokens from prefixes": _cell("prefix_hit_rate", "{:.0%}"),
    "rows equal to ours": _equality_text,
}
