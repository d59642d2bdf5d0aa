"""What `hf-paged bench` says: the comparison, the tries, the advice."""

from __future__ import annotations

from typing import Any

import torch
from rich.table import Table

from hf_paged.commands.bench_tuning import WORTH, Trial, Tuning
from hf_paged.commands.console import out
from hf_paged.commands.demo_report import TIE, Comparison


def print_report(comparison: Comparison, tuning: Tuning, model: str) -> None:
    """The comparison's table, the tries' table, and the advice."""
    title = f"{comparison.num_rows} prompts, {model}, {torch.get_num_threads()} CPU threads"
    out.print(_comparison(comparison, title))
    out.print(_equality(comparison))
    details = comparison.paged.details
    if details["prefix_hit_tokens"]:
        share = details["prefix_hit_tokens"] / details["prefix_query_tokens"]
        out.print(f"{share:.0%} of the prompts' tokens came from cached prefixes.")
    if details["num_preemptions"]:
        out.print(f"{details['num_preemptions']} preemptions: a larger pool (num_blocks) would save their work.")
    if len(tuning.trials) > 1:
        out.print(_tries(tuning))
    out.print(f"[bold]Advice:[/] {advice(tuning)}")


def _comparison(comparison: Comparison, title: str) -> Table:
    stock, paged = comparison.stock, comparison.paged
    table = Table(title=title, title_justify="left")
    for name in ("", "stock generate", "hf_paged", "stock / hf_paged"):
        table.add_column(name, justify="right" if name else "left")
    requests = [comparison.num_rows / run.seconds for run in (stock, paged)]
    rows: tuple[tuple[str, str, float, float], ...] = (
        ("seconds", "{:.2f}", stock.seconds, paged.seconds),
        ("requests/s", "{:.2f}", requests[0], requests[1]),
        ("output tokens/s", "{:.1f}", stock.tokens_per_second, paged.tokens_per_second),
        ("KV memory reserved, MiB", "{:.1f}", stock.kv_bytes / 2**20, paged.kv_bytes / 2**20),
        ("its token occupancy", "{:.0%}", stock.occupancy, paged.occupancy),
    )
    for name, form, one, other in rows:
        table.add_row(name, form.format(one), form.format(other), f"{one / other:.2f}" if other else "")
    table.add_row("set-up before it, seconds", "", f"{paged.details['setup_seconds']:.2f}", "")
    return table


def _equality(comparison: Comparison) -> str:
    text = f"Answers equal to stock's: {comparison.num_equal} of {comparison.num_rows}."
    ties = sum(difference.top2_gap < TIE for difference in comparison.differences)
    if ties:
        text += f" {ties} first differ where stock's two best tokens are a tie (within {TIE:g})."
    if ties < len(comparison.differences):
        largest = max(difference.top2_gap for difference in comparison.differences)
        text += f" {len(comparison.differences) - ties} differ elsewhere, up to {largest:.1e} apart."
    return text


def _tries(tuning: Tuning) -> Table:
    table = Table(title="Tries", title_justify="left")
    for name in ("block_size", "max_batch_tokens", "seconds", "against the defaults"):
        table.add_column(name, justify="right")
    for trial in tuning.trials:
        cells = (str(trial.block_size), str(trial.max_batch_tokens), f"{trial.seconds:.2f}", _against(trial, tuning))
        table.add_row(*cells, style="bold" if trial is tuning.advised else None)
    return table


def _against(trial: Trial, tuning: Tuning) -> str:
    if trial is tuning.default:
        return "the defaults"
    return f"{tuning.default.seconds / trial.seconds:.2f}x"


def advice(tuning: Tuning) -> str:
    """One sentence or two: which settings to take, and why."""
    default, advised = tuning.default, tuning.advised
    rest = "" if tuning.is_complete else " Time ran out before everything was tried; --seconds gives more."
    if len(tuning.trials) == 1:
        return f"nothing but the defaults ({_settings(default)}) was tried.{rest}"
    if tuning.keeps_defaults:
        return f"keep the defaults ({_settings(default)}); nothing else was {WORTH:.0%} faster.{rest}"
    gain = default.seconds / advised.seconds - 1
    return f"PagedConfig({_settings(advised)}), {gain:.0%} faster than the defaults here.{rest}"


def _settings(trial: Trial) -> str:
    return f"block_size={trial.block_size}, max_batch_tokens={trial.max_batch_tokens}"


def as_json(comparison: Comparison, tuning: Tuning, model: str) -> dict[str, Any]:
    """Everything, JSON-ready."""
    return {
        "model": model,
        "torch_threads": torch.get_num_threads(),
        "num_prompts": comparison.num_rows,
        "num_equal_rows": comparison.num_equal,
        "differences": [difference._asdict() for difference in comparison.differences],
        "stock": comparison.stock.as_json(),
        "hf_paged": comparison.paged.as_json(),
        "tries": [vars(trial) for trial in tuning.trials],
        "tries_are_complete": tuning.is_complete,
        "advice": {"block_size": tuning.advised.block_size, "max_batch_tokens": tuning.advised.max_batch_tokens},
    }
