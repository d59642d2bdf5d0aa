"""What the demo says about its two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table

from hf_paged.commands.console import out
from hf_paged.commands.demo_runs import Run

# Float32 logits of one prompt differ by about 1e-5 with the batch that it is in: below this, either token is right.
TIE = 1e-4


class Difference(NamedTuple):
    """The first token at which a row differs, and how far apart stock's two best logits are there."""

    row: int
    position: int
    stock_token: int | None
    paged_token: int | None
    top2_gap: float


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same prompts."""

    stock: Run
    paged: Run
    differences: list[Difference]

    @property
    def num_rows(self) -> int:
        """Prompts that were answered."""
        return len(self.stock.rows)

    @property
    def num_equal(self) -> int:
        """Answers that are equal, token for token."""
        return self.num_rows - len(self.differences)

    @property
    def is_equal_up_to_ties(self) -> bool:
        """Whether each row is equal, or first differs where stock's two best tokens are within `TIE`."""
        return all(difference.top2_gap < TIE for difference in self.differences)


def compare(model: Any, ids: Sequence[list[int]], stock: Run, paged: Run) -> Comparison:
    """Find the rows that differ.

    Args:
        model: gives stock's logits where a row differs.
        ids: token ids of the prompts.
        stock: the run that is right by definition.
        paged: the run that is compared.
    """
    differences = []
    for row, (prompt, expected, got) in enumerate(zip(ids, stock.rows, paged.rows, strict=True)):
        if expected != got:
            shared = min(len(expected), len(got))
            at = next((i for i in range(shared) if expected[i] != got[i]), shared)
            stock_token, paged_token = (answer[at] if at < len(answer) else None for answer in (expected, got))
            gap = _top2_gap(model, prompt + expected[:at])
            differences.append(Difference(row, at, stock_token, paged_token, gap))
    return Comparison(stock, paged, differences)


def _top2_gap(model: Any, ids: list[int]) -> float:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return float(best - second)


def print_comparison(comparison: Comparison) -> None:
    """The table, and a line for each row that differs."""
    stock, paged = comparison.stock, comparison.paged
    equal = f"rows equal: {comparison.num_equal} of {comparison.num_rows}"
    table = Table(
        title=f"{comparison.num_rows} chat prompts, SmolLM2-135M-Instruct",
        title_justify="left",
        caption=f"[bold not italic]{equal}[/]",
        caption_justify="left",
    )
    table.add_column("")
    table.add_column("stock generate", justify="right")
    table.add_column("hf_paged", justify="right", style="bold")
    table.add_column("", justify="right", style="dim")
    table.add_row(
        "seconds", f"{stock.seconds:.1f}", f"{paged.seconds:.1f}", _times(stock.seconds / paged.seconds, "faster")
    )
    table.add_row("output tokens/s", f"{stock.tokens_per_second:.1f}", f"{paged.tokens_per_second:.1f}", "")
    table.add_row(
        "KV memory reserved",
        _mebibytes(stock.kv_bytes),
        _mebibytes(paged.kv_bytes),
        _times(stock.kv_bytes / paged.kv_bytes, "less"),
    )
    table.add_row("its token occupancy", f"{stock.occupancy:.0%}", f"{paged.occupancy:.0%}", "")
    out.print(table)
    for difference in comparison.differences:
        out.print(
            f"row {difference.row} differs from token {difference.position} on: stock {difference.stock_token}, "
            f"hf_paged {difference.paged_token}; stock's two best logits are {difference.top2_gap:.1e} apart there"
            + (" (a tie)" if difference.top2_gap < TIE else "")
        )


def _times(ratio: float, word: str) -> str:
    return f"{ratio:.1f}x {word}" if ratio >= 1 else ""


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
