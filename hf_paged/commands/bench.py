"""`hf-paged bench`: a user's own model and prompts through stock `generate` and through the engine, and advice."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_paged import PagedConfig
from hf_paged.commands.bench_report import as_json, print_report
from hf_paged.commands.bench_runs import Workload, run_engine
from hf_paged.commands.bench_tuning import Tuning, tune
from hf_paged.commands.console import err
from hf_paged.commands.demo_prompts import DEMO_PROMPTS
from hf_paged.commands.demo_report import compare
from hf_paged.commands.demo_runs import STOCK_BATCH, run_stock
from hf_paged.commands.generate import encode
from hf_paged.commands.loading import load_model
from hf_paged.commands.prompt_file import Prompt, read_prompts

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command. None stands for an option that wasn't given; `seconds` are for tries."""

    model: str
    prompts: Path | None = None
    max_new_tokens: int = 64
    chat: bool | None = None
    threads: int | None = None
    seconds: float = 120.0
    as_json: bool = False


def run_bench(options: BenchOptions) -> int:
    """Measure, print tables and advice, or JSON.

    Returns:
        The exit code: 0; 1 if a float32 answer differs from stock's where stock's two best tokens are no tie; 130 if
        interrupted.

    Raises:
        PagedError: a bad option, file or prompt, or a model that can't run packed; nothing was measured.
    """
    source = options.prompts or Path("the demo's prompts")
    prompts = read_prompts(options.prompts) if options.prompts else _demo_prompts()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model)
    workload = Workload(
        source,
        tuple(prompts),
        tuple(encode(prompt, tokenizer, options.chat, source) for prompt in prompts),
        tuple(prompt.max_new_tokens or options.max_new_tokens for prompt in prompts),
    )
    try:
        return _measure(model, workload, options)
    except KeyboardInterrupt:
        err.print("Interrupted: nothing is reported, as a part of a run compares with nothing.")
        return 130


def _measure(model: Any, workload: Workload, options: BenchOptions) -> int:
    with err.status("Warming up both"):
        short = workload.first(STOCK_BATCH, WARM_UP_TOKENS)
        run_engine(model, short, PagedConfig())
        run_stock(model, short.ids, short.limits)
    with err.status(f"{len(workload.ids)} prompts through hf_paged"):
        paged = run_engine(model, workload, PagedConfig())
    with err.status(f"{len(workload.ids)} prompts through stock generate"):
        stock = run_stock(model, workload.ids, workload.limits)
    with err.status("Trying other settings") as status:

        def run(config: PagedConfig) -> float:
            status.update(f"Trying block_size={config.block_size}, max_batch_tokens={config.max_batch_tokens}")
            return run_engine(model, workload, config).seconds

        tuning: Tuning = tune(run, paged.seconds, options.seconds)
    comparison = compare(model, workload.ids, stock, paged)
    if options.as_json:
        print(json.dumps(as_json(comparison, tuning, options.model), indent=2))
    else:
        print_report(comparison, tuning, options.model)
    # in other types than float32 two right ways to add differ by more than a tie
    return int(model.dtype == torch.float32 and not comparison.is_equal_up_to_ties)


def _demo_prompts() -> list[Prompt]:
    return [Prompt(index, index + 1, item.text, item.max_new_tokens) for index, item in enumerate(DEMO_PROMPTS)]
