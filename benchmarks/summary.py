"""From rounds to rows, and from rows to a Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers import OURS

Round = dict[str, Any]  # what a worker wrote
Row = dict[str, Any]  # JSON-ready

HEADER = (
    "engine",
    "start-up",
    "workload",
    "output tokens/s",
    "time, ours = 1",
    "request done, P50 / P95",
    "peak memory above weights",
    "KV reserved",
    "token occupancy",
    "rows equal to ours",
)


def make_rows(rounds: Mapping[str, Sequence[Round]], num_output_tokens: int) -> list[Row]:
    """A row a peer: medians over its rounds, and the fastest and the slowest."""
    rows = [_row(name, results, num_output_tokens) for name, results in rounds.items()]
    ours = next((row for row in rows if row["peer"] == OURS), None)
    reference = rounds[OURS][0]["tokens"] if ours else None
    for row in rows:
        row["time_to_ours"] = row["seconds"] / ours["seconds"] if ours else None
        row["equality"] = _equality(rounds[row["peer"]], reference) if reference else None
    return rows


def _row(name: str, results: Sequence[Round], num_output_tokens: int) -> Row:
    def median(key: str) -> Any:
        values = [result[key] for result in results]
        return None if None in values else statistics.median(values)

    seconds = [result["seconds"] for result in results]
    return {
        "peer": name,
        "startup_seconds": median("startup_seconds"),
        "seconds": median("seconds"),
        "seconds_of_rounds": seconds,
        "output_tokens_per_second": num_output_tokens / median("seconds"),
        "requests_per_second": len(results[0]["tokens"]) / median("seconds"),
        "done_seconds": _percentiles(results, "done_seconds"),
        "first_token_seconds": _percentiles(results, "first_token_seconds"),
        "seconds_per_output_token": _percentiles_of([_per_token(result) for result in results]),
        "peak_bytes_above_weights": median("peak_bytes_above_weights"),
        "kv_bytes": median("kv_bytes"),
        "token_occupancy": median("token_occupancy"),
        "num_steps": median("num_steps"),
        "num_preemptions": median("num_preemptions"),
        "num_fallbacks": max((result["num_fallbacks"] for result in results), key=lambda count: count or 0),
    }


def _per_token(result: Round) -> list[float] | None:
    first = result["first_token_seconds"]
    if first is None or first == result["done_seconds"]:  # it comes all at once: there is no time between tokens
        return None
    return [
        (done - begin) / (len(tokens) - 1)
        for done, begin, tokens in zip(result["done_seconds"], first, result["tokens"], strict=True)
        if len(tokens) > 1
    ]


def _percentiles(results: Sequence[Round], key: str) -> dict[str, float] | None:
    return _percentiles_of([result[key] for result in results])


def _percentiles_of(rounds: Sequence[list[float] | None]) -> dict[str, float] | None:
    """P50, P95 and P99 over the requests of a round, each the median over the rounds."""
    known = [values for values in rounds if values]
    if not known:
        return None
    return {f"p{share}": statistics.median(_percentile(values, share) for values in known) for share in (50, 95, 99)}


def _percentile(values: Sequence[float], share: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


def _equality(rounds: Sequence[Round], reference: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Of the round with the most differences: how many requests are equal, and where the others first differ."""
    worst: list[dict[str, int]] = []
    for result in rounds:
        differences = []
        for index, (tokens, wanted) in enumerate(zip(result["tokens"], reference, strict=True)):
            if list(tokens) != list(wanted):
                places = (place for place, (one, two) in enumerate(zip(tokens, wanted, strict=False)) if one != two)
                differences.append({"request": index, "position": next(places, min(len(tokens), len(wanted)))})
        if len(differences) > len(worst):
            worst = differences
    return {"num_equal": len(reference) - len(worst), "num_requests": len(reference), "first_differences": worst}


def markdown(result: Mapping[str, Any]) -> str:
    """A result file's table, with a line on what was measured and where."""
    lines = [f"| {' | '.join(HEADER)} |", "|---|" + "---:|" * (len(HEADER) - 1)]
    lines += [f"| {' | '.join(cells(row))} |" for row in result["rows"]]
    return "\n".join([*lines, "", caption(result)])


def caption(result: Mapping[str, Any]) -> str:
    """What was measured, on what, and how to measure it again."""
    workload, machine, packages = result["workload"], result["machine"], result["machine"]["packages"]
    commit, rounds = result["commit"] or "no repository", result["num_rounds"]
    measured = "One round" if rounds == 1 else f"Median of {rounds} interleaved rounds (fastest to slowest)"
    return (
        f"Workload *{workload['name']}*: {workload['num_requests']} requests, {workload['num_prompt_tokens']:,} tokens "
        f"in, {workload['num_output_tokens']:,} out, {result['model']}, {result['dtype']}, greedy. "
        f"{measured}, each engine in a process of its own. "
        f"{machine['cpu']['model']}, {result['threads']} threads; torch {packages['torch']}, transformers "
        f"{packages['transformers']}. Start-up is from the process's start to the first request, imports, weights and "
        f"a warm-up of two short prompts included. {result['date'][:10]}, {commit}: `{result['command']}`"
    )


def cells(row: Row) -> list[str]:
    """A row as text."""
    rounds = row["seconds_of_rounds"]
    spread = f" ({min(rounds):.1f} to {max(rounds):.1f})" if len(rounds) > 1 else ""
    done, equality = row["done_seconds"], row["equality"]
    occupancy, ratio = row["token_occupancy"], row["time_to_ours"]
    return [
        row["peer"],
        f"{row['startup_seconds']:.1f} s",
        f"{row['seconds']:.1f} s{spread}",
        f"{row['output_tokens_per_second']:.1f}",
        "-" if ratio is None else f"{ratio:.2f}",
        "-" if done is None else f"{done['p50']:.1f} / {done['p95']:.1f} s",
        f"{row['peak_bytes_above_weights'] / 2**20:,.0f} MiB",
        f"{row['kv_bytes'] / 2**20:,.0f} MiB",
        "-" if occupancy is None else f"{occupancy:.1%}",
        "-" if equality is None else _equality_text(equality),
    ]


def _equality_text(equality: Mapping[str, Any]) -> str:
    text = f"{equality['num_equal']} of {equality['num_requests']}"
    gaps = [item["gap"] for item in equality["first_differences"] if "gap" in item]
    if gaps:
        text += f"; others where stock's two best are within {max(gaps):.1e}"
    return text
