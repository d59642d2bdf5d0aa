"""Puts the table of the newest result file into the README, between its two markers.

    python -m benchmarks.table                    the newest file in benchmarks/results
    python -m benchmarks.table --result FILE      that file
    python -m benchmarks.table --check            changes nothing; fails if the README's table is another

The markers are `<!-- bench:mixed -->` and `<!-- /bench:mixed -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.summary import markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def main(
    readme: Annotated[Path, typer.Option(help="The file with the markers.")] = ROOT / "README.md",
    result: Annotated[Path | None, typer.Option(help="A result file.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare.")] = False,
) -> None:
    """Bring the README's table up to date."""
    try:
        source = result or newest("mixed", RESULTS)
        before = readme.read_text(encoding="utf-8")
        data = json.loads(source.read_text(encoding="utf-8"))
        after = put(before, data["benchmark"], markdown(data))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    if after == before:
        typer.echo(f"{readme.name} has the table of {source.name}.")
    elif check:
        raise SystemExit(f"error: {readme.name} has another table than {source.name}; run python -m benchmarks.table")
    else:
        readme.write_text(after, encoding="utf-8")
        typer.echo(f"{readme.name} now has the table of {source.name}.")


def newest(benchmark: str, folder: Path) -> Path:
    """The newest result file of a benchmark, by the date that it holds.

    Raises:
        ValueError: there is none.
    """
    files = list(folder.glob(f"{benchmark}-*.json"))
    if not files:
        raise ValueError(f"no result of {benchmark!r} in {folder.name}; run make bench")
    return max(files, key=lambda path: str(json.loads(path.read_text(encoding="utf-8"))["date"]))


def put(text: str, benchmark: str, table: str) -> str:
    """`text` with what stands between the markers of a benchmark replaced.

    Raises:
        ValueError: not exactly one pair of markers.
    """
    begin, end = f"<!-- bench:{benchmark} -->", f"<!-- /bench:{benchmark} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if text.count(begin) != 1 or text.count(end) != 1 or not pattern.search(text):
        raise ValueError(f"the file needs {begin} and behind it {end}, each once")
    return pattern.sub(lambda _: f"{begin}\n{table}\n{end}", text)


if __name__ == "__main__":
    typer.run(main)
