"""Blocks that beams hold at the peak, against beams that each hold a copy of the prompt and of their own tokens.

python -m benchmarks.beam_memory                some minutes; writes benchmarks/results/beam-memory.json
python -m benchmarks.beam_memory --report       only puts the table of that file into docs/beams.md
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.markers import put
from benchmarks.rounds import RESULTS, ROOT, command_line, commit, err

RESULT = RESULTS / "beam-memory.json"
PAGE = ROOT / "docs" / "beams.md"
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """Prompts of a length, and how far their beams go. No token ends them, so that all beams have all their tokens."""

    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    num_beams: int
    do_sample: bool = False


CASES = (
    *(Case(1, prompt, new, beams) for prompt, new in ((32, 64), (512, 64), (160, 320)) for beams in (2, 4, 8)),
    Case(4, 160, 64, 4),
    Case(1, 160, 320, 4, do_sample=True),
)


def main(
    output: Annotated[Path, typer.Option(help="The result file.")] = RESULT,
    report: Annotated[bool, typer.Option("--report", help="Only put the file's table into the page.")] = False,
) -> None:
    """Measure, write a result file, put its table into the page, print it."""
    if not report:
        from hf_paged.commands.loading import load_model

        model, tokenizer = load_model("embedded")
        result = run(model, tokenizer, CASES, command_line("benchmarks.beam_memory"))
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    table = markdown(json.loads(output.read_text(encoding="utf-8")))
    if output == RESULT:
        PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), "beams", table), encoding="utf-8")
        err.print(f"The table is in {os.path.relpath(PAGE)}")
    print(table)


def run(model: Any, tokenizer: Any, cases: Sequence[Case], command: str) -> dict[str, Any]:
    """What a result file holds: a row a case."""
    from hf_paged.commands.demo_prompts import DEMO_PROMPTS
    from hf_paged.commands.env import collect_environment

    text = "\n\n".join(prompt.text for prompt in DEMO_PROMPTS)
    ids = tokenizer(text)["input_ids"]
    rows = []
    for case in cases:
        rows.append(measure(model, ids, case))
        err.print(rows[-1])
    return {
        "benchmark": "beam-memory",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "machine": collect_environment(),
        "model": type(model).__name__,
        "block_size": BLOCK_SIZE,
        "rows": rows,
    }


def measure(model: Any, ids: Sequence[int], case: Case) -> dict[str, Any]:
    """The blocks of one case; prompts are stretches of `ids`, one behind the other."""
    import torch

    from hf_paged.integrations.engines import get_engine, release

    length = case.prompt_tokens
    prompts = torch.tensor([ids[start * length : (start + 1) * length] for start in range(case.num_prompts)])
    dense, prompt_shared = blocks(case)
    torch.manual_seed(0)
    model.generate(
        prompts.to(model.device),
        attention_mask=torch.ones_like(prompts).to(model.device),
        num_beams=case.num_beams,
        do_sample=case.do_sample,
        max_new_tokens=case.new_tokens,
        min_new_tokens=case.new_tokens,
        pad_token_id=0,
        cache_implementation="paged",
        cache_config={"block_size": BLOCK_SIZE, "num_blocks": dense, "enable_prefix_caching": False},
    )
    engine = get_engine(model)
    assert engine is not None
    stats = engine.stats()
    release(model)  # the next case starts its own count
    if stats["num_preemptions"] or stats["num_fallbacks"]:
        raise SystemExit(f"error: {case} was preempted or ran in stock's loop; its blocks say nothing")
    peak = stats["peak_blocks"]
    return {
        **vars(case),
        "dense_blocks": dense,
        "prompt_shared_blocks": prompt_shared,
        "peak_blocks": peak,
        "saved_percent": 100 * (1 - peak / dense),
        "token_occupancy": stats["token_occupancy"],
    }


def blocks(case: Case) -> tuple[int, int]:
    """Blocks at the end if each beam has a copy of everything, and if beams share full blocks of the prompt alone."""
    whole = -(-(case.prompt_tokens + case.new_tokens - 1) // BLOCK_SIZE)  # the last token is never fed
    prompt = case.prompt_tokens // BLOCK_SIZE
    rows = case.num_prompts * case.num_beams
    return rows * whole, case.num_prompts * (prompt + case.num_beams * (whole - prompt))


def markdown(result: dict[str, Any]) -> str:
    """A row a case, and a line on where and how it was measured."""
    lines = [
        "| prompts | prompt tokens | new tokens | beams | a copy each | only prompts shared | peak of ours | saved |",
        "|---:|---:|---:|---|---:|---:|---:|---:|",
        *_lines(result["rows"]),
        "",
        f"Blocks of {result['block_size']} tokens, SmolLM2-135M-Instruct, prompts of running text, no end token before "
        f"the last round, prefix cache off; sampled beams at seed 0. {result['machine']['cpu']['model']}, "
        f"{result['date'][:10]}, {result['commit'] or 'no repository'}: `{result['command']}`",
    ]
    return "\n".join(lines)


def _lines(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    for row in rows:
        beams = f"{row['num_beams']}{', sampled' if row['do_sample'] else ''}"
        sizes = (row["num_prompts"], row["prompt_tokens"], row["new_tokens"], beams)
        counts = (row["dense_blocks"], row["prompt_shared_blocks"], row["peak_blocks"])
        yield f"| {' | '.join(map(str, (*sizes, *counts)))} | **{row['saved_percent']:.0f}%** |"


if __name__ == "__main__":
    typer.run(main)
