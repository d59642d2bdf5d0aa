"""Puts the tables of the newest result files into the README, between their markers.

    python -m benchmarks.table                    the newest file in benchmarks/results of each table that it has
    python -m benchmarks.table --result FILE      that file alone
    python -m benchmarks.table --check            changes nothing; fails if the README's tables are others
    python -m benchmarks.table --readme docs/cpu.md    another page

The markers are `<!-- bench:mixed -->` and `<!-- /bench:mixed -->`; those of the others have `compare`, `serving`,
`growth`, `pipeline` or `step-profile` for `mixed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import comparison, summary
from benchmarks.growth_table import markdown as growth_markdown
from benchmarks.markers import put
from benchmarks.pipeline import markdown as pipeline_markdown
from benchmarks.serving_table import markdown as serving_markdown
from benchmarks.step_profile import markdown as profile_markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# What a README shows of each benchmark.
TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "mixed": summary.markdown,
    "compare": comparison.headline,
    "serving": serving_markdown,
    "growth": growth_markdown,
    "step-profile": profile_markdown,
    "pipeline": pipeline_markdown,
}


def main(
    readme: Annotated[Path, typer.Option(help="The file with the markers.")] = ROOT / "README.md",
    result: Annotated[Path | None, typer.Option(help="A result file.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare.")] = False,
) -> None:
    """Bring the README's tables up to date."""
    try:
        before = readme.read_text(encoding="utf-8")
        marked = [name for name in TABLES if f"<!-- bench:{name} -->" in before]
        sources = [result] if result else [newest(name, RESULTS) for name in marked]
        after = before
        for source in sources:
            data = json.loads(source.read_text(encoding="utf-8"))
            after = put(after, data["benchmark"], TABLES[data["benchmark"]](data))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    names = ", ".join(source.name for source in sources)
    if after == before:
        typer.echo(f"{readme.name} has the tables of {names}.")
    elif check:
        raise SystemExit(f"error: {readme.name} has other tables than {names}; run python -m benchmarks.table")
    else:
        readme.write_text(after, encoding="utf-8")
        typer.echo(f"{readme.name} now has the tables of {names}.")


def newest(benchmark: str, folder: Path) -> Path:
    """The newest result file of a benchmark, by the date that it holds.

    Raises:
        ValueError: there is none.
    """
    files = [*folder.glob(f"{benchmark}-*.json"), *folder.glob(f"{benchmark}.json")]
    if not files:
        command = "make bench" if benchmark == "mixed" else f"python -m benchmarks.{benchmark}"
        raise ValueError(f"no result of {benchmark!r} in {folder.name}; run {command}")
    return max(files, key=lambda path: str(json.loads(path.read_text(encoding="utf-8"))["date"]))


if __name__ == "__main__":
    typer.run(main)
