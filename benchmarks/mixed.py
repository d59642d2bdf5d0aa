"""The workload "mixed" through stock Transformers and through hf_paged, in one run on one machine.

python -m benchmarks.mixed                     32 requests, 3 rounds
python -m benchmarks.mixed --requests 128 --rounds 5
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.names import USUAL
from benchmarks.peers import PEERS
from benchmarks.rounds import (
    RESULTS,
    Setting,
    about,
    about_workload,
    command_line,
    embedded_folder,
    err,
    num_cores,
    run_rounds,
    write_result,
)
from benchmarks.summary import caption, cells, columns, markdown
from benchmarks.workloads import Workload, mixed


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests in the workload.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the table has their median.")] = 3,
    peers: Annotated[list[str] | None, typer.Option("--peer", help=f"One of {'; '.join(PEERS)}. Repeat it.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch. Default: a core each.")] = None,
    model: Annotated[Path | None, typer.Option(help="A model folder. Default: the embedded SmolLM2-135M.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
) -> None:
    """Measure all engines on one workload, write a result file, print its table."""
    names = peers or list(USUAL)
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {'; '.join(PEERS)}.", param_hint="--peer")
    result = run(
        mixed(requests),
        names=names,
        num_rounds=rounds,
        setting=Setting(model or embedded_folder(), threads or num_cores()),
        command=command_line("benchmarks.mixed"),
    )
    path = write(result, output)
    _print(result)
    err.print(f"Written to {os.path.relpath(path)}")
    fallbacks = {row["peer"]: row["num_fallbacks"] for row in result["rows"] if row["num_fallbacks"]}
    if fallbacks:
        err.print(f"[bold red]error:[/] stock's loop ran instead of ours: {fallbacks}")
        raise typer.Exit(1)


def run(workload: Workload, *, names: list[str], num_rounds: int, setting: Setting, command: str) -> dict[str, Any]:
    """Every peer in every round; returns what a result file holds.

    Raises:
        RuntimeError: a peer failed, or returned another number of tokens than was asked for.
    """
    result = about("mixed", command, num_rounds, setting)
    rows = run_rounds(workload, names, num_rounds, setting)
    return {**result, "workload": about_workload(workload), "rows": rows}


def write(result: dict[str, Any], folder: Path) -> Path:
    """Writes a result file, whose name sorts by date."""
    return write_result(result, folder, result["workload"]["num_requests"])


def _print(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        print(markdown(result))
        return
    table = Table()
    shown = columns(result["rows"])
    for index, title in enumerate(shown):
        table.add_column(title, justify="right" if index else "left")
    for row in result["rows"]:
        table.add_row(*cells(row, shown))
    console.print(table)
    console.print(caption(result), style="dim")


if __name__ == "__main__":
    typer.run(main)
