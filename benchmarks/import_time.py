"""What `import hf_paged` adds to the import of Transformers' generate, in percent.

    python -m benchmarks.import_time              exits with 1 above 20%

Each import runs in a fresh process; the two kinds take turns, and their medians are compared.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
STOCK = "from transformers.generation.utils import GenerationMixin"
TIMER = "import time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each kind.")] = 7,
    limit: Annotated[float, typer.Option(help="Most percent that may be added.")] = 20.0,
) -> None:
    """Compare the two imports."""
    statements = {"transformers": STOCK, "transformers, then hf_paged": f"{STOCK}; import hf_paged"}
    for statement in statements.values():
        import_seconds(statement)  # writes the bytecode, and brings the files into memory
    seconds: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(rounds):
        for name, statement in statements.items():
            seconds[name].append(import_seconds(statement))
    for name, values in seconds.items():
        typer.echo(f"{name}: {statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f})")
    stock, ours = (statistics.median(values) for values in seconds.values())
    added = (ours / stock - 1) * 100
    typer.echo(f"import hf_paged adds {added:.1f}% (limit {limit:g}%, median of {rounds})")
    raise typer.Exit(int(added > limit))


def import_seconds(statement: str) -> float:
    """Seconds that a statement takes in a fresh interpreter, its start not included."""
    process = subprocess.run(
        [sys.executable, "-c", TIMER.format(statement)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(process.stdout.split()[-1])


if __name__ == "__main__":
    typer.run(main)
