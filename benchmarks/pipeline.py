"""Stock's text-generation pipeline at several batch sizes and the paged one, on chats of mixed lengths, in one run.

    python -m benchmarks.pipeline                     the demo's 32 chats, answers of at most 128 tokens, 3 rounds
    python -m benchmarks.pipeline --requests 8 --max-new-tokens 32 --rounds 1
    python -m benchmarks.pipeline --no-run            nothing: puts the kept result into docs/pipeline.md again

Every pipeline gets the same chats from a generator, in a process of its own. Answers end at the model's own
end-of-sequence token. The result goes to benchmarks/results/pipeline.json and, as a table, into docs/pipeline.md.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.markers import put
from benchmarks.pipeline_names import ALONE, NAMES, OURS
from benchmarks.rounds import (
    RESULTS,
    ROOT,
    Foreign,
    Setting,
    about,
    command_line,
    embedded_folder,
    err,
    num_cores,
    work,
)
from benchmarks.workloads import WorkloadRequest
from hf_paged.commands.demo_prompts import DEMO_PROMPTS

WORKER = "benchmarks.pipeline_worker"
PAGE = ROOT / "docs" / "pipeline.md"
FILE = "pipeline.json"


def main(
    requests: Annotated[int, typer.Option(min=2, max=len(DEMO_PROMPTS), help="Chats, of the demo's.")] = len(
        DEMO_PROMPTS
    ),
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the table has their median.")] = 3,
    peers: Annotated[list[str] | None, typer.Option("--peer", help=f"One of {'; '.join(NAMES)}. Repeat it.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch. Default: a core each.")] = None,
    model: Annotated[Path | None, typer.Option(help="A model folder. Default: the embedded SmolLM2-135M.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
    page: Annotated[Path, typer.Option(help="The page that has the table.")] = PAGE,
    is_run: Annotated[bool, typer.Option("--run/--no-run", help="Measure, or use the result that is kept.")] = True,
) -> None:
    """Measure the pipelines, keep the result, print its table and put it into the page."""
    if is_run:
        names = peers or list(NAMES)
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            raise typer.BadParameter(f"{unknown[0]!r} is none of {'; '.join(NAMES)}.", param_hint="--peer")
        folder = model or embedded_folder()
        result = run(
            chats(folder, requests, max_new_tokens),
            names,
            rounds,
            Setting(folder, threads or num_cores()),
            command_line("benchmarks.pipeline"),
        )
        output.mkdir(parents=True, exist_ok=True)
        (output / FILE).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        err.print(f"Written to {os.path.relpath(output / FILE)}")
    try:
        kept = json.loads((output / FILE).read_text(encoding="utf-8"))
        page.write_text(put(page.read_text(encoding="utf-8"), "pipeline", markdown(kept)), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print(markdown(kept))
    if any(row["num_fallbacks"] for row in kept["rows"]):
        raise SystemExit("error: stock's loop ran instead of ours")


def chats(model_folder: Path, count: int, max_new_tokens: int) -> list[WorkloadRequest]:
    """The first chats of the demo, as the ids that a pipeline makes of them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    messages = [[{"role": "user", "content": prompt.text}] for prompt in DEMO_PROMPTS[:count]]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True) for chat in messages]
    return [WorkloadRequest(tuple(item["input_ids"]), max_new_tokens) for item in ids]


def run(
    requests: Sequence[WorkloadRequest], names: Sequence[str], num_rounds: int, setting: Setting, command: str
) -> dict[str, Any]:
    """Every pipeline in every round, in an order that rotates; returns what a result file holds.

    Raises:
        RuntimeError: a pipeline failed.
    """
    result = about("pipeline", command, num_rounds, setting)
    here = {name: Foreign(Path(sys.executable), WORKER, setting.model_folder) for name in names}
    setting = Setting(setting.model_folder, setting.threads, setting.settings, here)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(num_rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            measured = work(name, requests, setting)
            found[name].append(measured)
            err.print(f"round {number + 1} of {num_rounds}: {name}: {measured['seconds']:.1f} s")
    return {
        **result,
        "workload": {
            "num_requests": len(requests),
            "num_prompt_tokens": sum(len(request.prompt_ids) for request in requests),
            "max_new_tokens": requests[0].num_output_tokens,
        },
        "rows": rows_of(found),
    }


def rows_of(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row a pipeline: medians over its rounds, and its answers beside those of stock's one by one."""
    reference = found[ALONE][0]["tokens"] if ALONE in found else None
    rows = []
    for name, rounds in found.items():
        num_tokens = sum(map(len, rounds[0]["tokens"]))
        seconds = statistics.median(item["seconds"] for item in rounds)
        equal = None
        if reference is not None:
            equal = min(sum(a == b for a, b in zip(item["tokens"], reference, strict=True)) for item in rounds)
        rows.append(
            {
                "peer": name,
                "seconds": seconds,
                "seconds_of_rounds": [item["seconds"] for item in rounds],
                "first_result_seconds": statistics.median(item["first_result_seconds"] for item in rounds),
                "num_new_tokens": num_tokens,
                "new_tokens_per_second": num_tokens / seconds,
                "peak_bytes_above_weights": statistics.median(item["peak_bytes_above_weights"] for item in rounds),
                "num_equal": equal,
                "num_requests": len(rounds[0]["tokens"]),
                "num_fallbacks": max(item["num_fallbacks"] or 0 for item in rounds),
                "answer_lengths": sorted(map(len, rounds[0]["tokens"])),
            }
        )
    return rows


def markdown(result: Mapping[str, Any]) -> str:
    """A result's table, with a line on what was measured and where."""
    lines = [
        "| pipeline | seconds | new tokens/s | time, ours = 1 | first result | peak memory above weights "
        "| answers equal to batch_size=1 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    ours = next((row["seconds"] for row in result["rows"] if row["peer"] == OURS), None)
    for row in result["rows"]:
        spread = row["seconds_of_rounds"]
        between = f" ({min(spread):.1f} to {max(spread):.1f})" if len(spread) > 1 else ""
        cells = (
            row["peer"],
            f"{row['seconds']:.1f}{between}",
            f"{row['new_tokens_per_second']:.1f}",
            "-" if ours is None else f"{row['seconds'] / ours:.2f}",
            f"{row['first_result_seconds']:.1f} s",
            f"{row['peak_bytes_above_weights'] / 2**20:,.0f} MiB",
            "-" if row["num_equal"] is None else f"{row['num_equal']} of {row['num_requests']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _caption(result)])


def _caption(result: Mapping[str, Any]) -> str:
    workload, machine, rounds = result["workload"], result["machine"], result["num_rounds"]
    lengths = result["rows"][0]["answer_lengths"]
    measured = "One round" if rounds == 1 else f"Median of {rounds} interleaved rounds (fastest to slowest)"
    return (
        f"{workload['num_requests']} chats of {workload['num_prompt_tokens']:,} tokens together, greedy answers of "
        f"{lengths[0]} to {lengths[-1]} tokens (half of them below {lengths[len(lengths) // 2] + 1}), at most "
        f"{workload['max_new_tokens']}. {result['model']}, {result['dtype']}. {measured}, each pipeline in a process "
        f"of its own. {machine['cpu']['model']}, {result['threads']} threads; torch {machine['packages']['torch']}, "
        f"transformers {machine['packages']['transformers']}. {result['date'][:10]}, "
        f"{result['commit'] or 'no repository'}: `{result['command']}`"
    )


if __name__ == "__main__":
    typer.run(main)
