"""Speculative decoding on SmolLM2-135M-Instruct: the same tokens, accepted drafts a step, and the time against none.

    python -m benchmarks.speculative [--new-tokens 128] [--repeats 5] [--rows 1,4] [--threads 2]

Summaries of short texts, greedy, in float32, without a prefix cache, so that every run computes its prompt. Variants
take turns after a warm-up; the median counts. The assistants are honest extremes: the model's own first ten of thirty
layers, never trained to predict anything by themselves, and the model itself, which is always right and costs as much
as what it saves. Writes benchmarks/results/speculative.json and the table of docs/speculative.md.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from benchmarks.markers import put
from hf_paged import PagedConfig, PagedEngine
from hf_paged.commands.loading import load_model

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "speculative.json"
PAGE = ROOT / "docs" / "speculative.md"
LAYERS = 10

TEXTS = (
    "The lighthouse at Cape Ferret was built in 1840 to warn ships of the sandbanks at the mouth of the bay. It was "
    "destroyed in the war and built again in 1949, a little further inland. The new tower is 53 metres high, and 258 "
    "steps lead to the top. Its red light can be seen from 50 kilometres away. In summer thousands of visitors climb "
    "the tower each week to see the bay, the dunes and the ocean.",
    "The town library will close for repairs from the third of June to the end of August. The roof has leaked since "
    "the storm in March, and the heating is forty years old. While it is closed, a bus with two thousand books will "
    "stop at the market square on Mondays and Thursdays. Books that are on loan can be kept until September. The "
    "reading club for children will meet in the town hall instead.",
    "Cork is the bark of the cork oak, a tree that grows around the western Mediterranean. A tree is stripped for the "
    "first time when it is 25 years old, and then every nine years, for about two hundred years. The tree isn't cut "
    "down, and the bark grows again. More than half of all cork comes from Portugal. Most of it becomes stoppers for "
    "bottles; the rest is used for floors, shoes and insulation.",
    "The ferry to the island leaves at seven in the morning and at two in the afternoon. In winter there is only the "
    "morning ferry, and none when the wind is stronger than force eight. The crossing takes ninety minutes. Cars must "
    "be booked a week ahead, bicycles are free. Passengers who miss the last ferry can stay at the harbour inn, whose "
    "rooms can't be booked before five in the afternoon.",
)
QUESTION = "Summarize the text below in four sentences, and use its own words.\n\n"


def main(
    new_tokens: Annotated[int, typer.Option(help="Tokens generated a row.")] = 128,
    repeats: Annotated[int, typer.Option(help="Timed runs of each variant.")] = 5,
    rows: Annotated[str, typer.Option(help="How many texts are summarised at once, with commas.")] = "1,4",
    threads: Annotated[int, typer.Option(help="Threads of torch; 0 for its own choice.")] = 0,
    model: Annotated[str, typer.Option(help="A folder, or 'embedded' for SmolLM2.")] = "embedded",
) -> None:
    """Measure, keep the result, and bring the page's table up to date."""
    if threads:
        torch.set_num_threads(threads)
    checked, tokenizer = load_model(model)
    checked = checked.float()
    variants = _variants(checked)
    prompts = [_prompt(tokenizer, text) for text in TEXTS]
    found = []
    for count in [int(part) for part in rows.split(",")]:
        found += _measure(checked, variants, prompts[:count], new_tokens, repeats)
    result = {
        "command": f"python -m benchmarks.speculative --new-tokens {new_tokens} --repeats {repeats} --rows {rows}",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "new_tokens": new_tokens,
        "repeats": repeats,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "rows": found,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), "speculative", _markdown(result)), encoding="utf-8")
    typer.echo(_markdown(result))
    if not all(row["same_tokens"] for row in found):
        raise SystemExit("error: drafts changed the tokens")


def _variants(model: Any) -> dict[str, dict[str, Any]]:
    itself = copy.copy(model)  # another object with the same weights, and a generation config of its own
    itself.generation_config = copy.deepcopy(model.generation_config)
    assistants = {f"its first {LAYERS} layers": _first_layers(model, LAYERS), "the model itself": itself}
    for assistant in assistants.values():
        assistant.generation_config.update(num_assistant_tokens=5, num_assistant_tokens_schedule="constant")
    return {
        "none": {},
        "prompt lookup, 10 tokens": {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3},
        **{f"assistant: {name}, 5 tokens": {"assistant_model": each} for name, each in assistants.items()},
    }


def _first_layers(model: Any, count: int) -> Any:
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    assistant = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    assistant.load_state_dict(model.state_dict(), strict=False, assign=True)  # the same tensors, no copy
    assistant.tie_weights()
    return assistant.eval()


def _prompt(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": QUESTION + text}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def _measure(
    model: Any, variants: dict[str, dict[str, Any]], prompts: list[list[int]], new_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    tokens: dict[str, list[tuple[int, ...]]] = {}
    counted: dict[str, dict[str, Any]] = {}
    config = PagedConfig(num_blocks=len(prompts) * 64, enable_prefix_caching=False)
    with PagedEngine(model, config) as engine:
        for turn in range(repeats + 1):  # the first one warms up
            for name, asked in variants.items():
                before = engine.stats()
                start = time.perf_counter()
                outputs = engine.generate(prompts, max_new_tokens=new_tokens, do_sample=False, **asked)
                took = time.perf_counter() - start
                after = engine.stats()
                tokens[name] = [output.token_ids for output in outputs]
                counted[name] = {key: after[key] - before[key] for key in after if key.startswith("num_")}
                if turn:
                    seconds[name].append(took)
    found = []
    for name, runs in seconds.items():
        counts = counted[name]
        checks = counts["num_draft_checks"]
        found.append(
            {
                "rows": len(prompts),
                "drafts": name,
                "tokens": sum(map(len, tokens[name])),
                "steps": counts["num_steps"],
                "drafted": counts["num_draft_tokens"],
                "accepted": counts["num_accepted_tokens"],
                "accepted_a_check": counts["num_accepted_tokens"] / checks if checks else 0.0,
                "seconds": median(runs),
                "all_seconds": runs,
                "time_against_none": median(runs) / median(seconds["none"]),
                "same_tokens": tokens[name] == tokens["none"],
            }
        )
    return found


def _markdown(result: dict[str, Any]) -> str:
    lines = [
        f"SmolLM2-135M-Instruct in float32, {result['cores']} cores ({result['machine']}), {result['threads']} threads,"
        " "
        f"torch {result['torch']}, transformers {result['transformers']}; prompts of "
        f"{min(result['prompt_tokens'])} to {max(result['prompt_tokens'])} tokens, {result['new_tokens']} new ones a "
        f"row; median of {result['repeats']} runs. `{result['command']}`",
        "",
        "| rows | drafts from | same tokens | steps | drafted | accepted | accepted a check | seconds | against none |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['rows']} | {row['drafts']} | {'yes' if row['same_tokens'] else 'NO'} | {row['steps']} | "
            f"{row['drafted']} | {row['accepted']} | {row['accepted_a_check']:.2f} | {row['seconds']:.2f} | "
            f"{row['time_against_none']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
