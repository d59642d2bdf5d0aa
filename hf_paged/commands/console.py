"""Where the commands write: results go to stdout, everything else to stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def fail(message: object, code: int = 1) -> int:
    """Print one line of what went wrong; returns the exit code to leave with."""
    err.print("[bold red]error:[/]", end=" ")
    err.print(str(message), markup=False, soft_wrap=True)
    return code


def progress_bars() -> Progress:
    """Live bars on stderr that count requests; a task has the field `note` for what is shown behind."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        console=err,
    )
