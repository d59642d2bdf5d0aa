"""`hf-paged demo`: the same chat prompts through stock `generate` and through the engine, and what each took."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from hf_paged.commands.console import err, out, progress_bars
from hf_paged.commands.demo_prompts import DEMO_PROMPTS
from hf_paged.commands.demo_report import Comparison, compare, print_comparison
from hf_paged.commands.demo_runs import STOCK_BATCH, Run, run_paged, run_stock
from hf_paged.commands.loading import EMBEDDED, load_model

# Tokens an engine and a batch run before the clock starts: libraries choose their kernels then.
WARM_UP_TOKENS = 4


def run_demo(num_prompts: int, threads: int | None, as_json: bool) -> int:
    """Run the comparison and print it.

    Args:
        num_prompts: the first so many of the demo's prompts.
        threads: CPU threads of torch; None leaves its choice.
        as_json: print JSON on stdout instead of the table and the answers.

    Returns:
        The exit code: 0 if every row is equal, or differs only where stock's own two best tokens are a tie.

    Raises:
        EmbeddedModelError: the model isn't installed; the message is the command that gets it.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    model, tokenizer = load_model(EMBEDDED)
    prompts = DEMO_PROMPTS[:num_prompts]
    ids = [_chat_ids(prompt.text, tokenizer) for prompt in prompts]
    limits = [prompt.max_new_tokens for prompt in prompts]

    with err.status("Warming up both"):
        warm_up = ids[:STOCK_BATCH], [WARM_UP_TOKENS] * min(len(ids), STOCK_BATCH)
        run_stock(model, *warm_up)
        run_paged(model, *warm_up)
    with progress_bars() as progress:
        bars = [progress.add_task(name, total=len(ids), note="") for name in ("stock generate", "hf_paged")]

        def show(bar: int, num_finished: int, num_tokens: int, seconds: float) -> None:
            speed = num_tokens / seconds if seconds else 0.0
            progress.update(bars[bar], completed=num_finished, note=f"{num_tokens} tokens, {speed:.0f} tokens/s")

        progress.reset(bars[0])
        stock = run_stock(model, ids, limits, lambda *state: show(0, *state))
        progress.stop_task(bars[0])
        progress.reset(bars[1])
        paged = run_paged(model, ids, limits, lambda *state: show(1, *state))

    comparison = compare(model, ids, stock, paged)
    if as_json:
        print(json.dumps(_as_json(comparison), indent=2))
    else:
        print_comparison(comparison)
        _print_answers(tokenizer, paged)
    return 0 if comparison.is_equal_up_to_ties else 1


def _chat_ids(text: str, tokenizer: Any) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _print_answers(tokenizer: Any, paged: Run) -> None:
    # A short one and a longer one, where there are that many.
    shown: Sequence[int] = [index for index in (0, 3) if index < len(paged.rows)]
    for index in shown:
        question = DEMO_PROMPTS[index].text.splitlines()[0]
        answer = tokenizer.decode(paged.rows[index], skip_special_tokens=True).strip()
        out.print(f"\n[bold]{question}[/]")
        out.print(answer, markup=False)


def _as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "num_prompts": comparison.num_rows,
        "num_equal_rows": comparison.num_equal,
        "differences": [difference._asdict() for difference in comparison.differences],
        "torch_threads": torch.get_num_threads(),
        "stock": comparison.stock.as_json(),
        "hf_paged": comparison.paged.as_json(),
    }
