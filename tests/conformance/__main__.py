"""`python -m tests.conformance CHECKOUT`: runs Transformers' own tests with "paged" as the default, and reports.

A run that was broken off goes on where it stopped; `--fresh` starts anew.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from tests.conformance.chapters import Chapter, chapters
from tests.conformance.children import Outcome, run_chapter
from tests.conformance.report import KINDS, PAGE, RESULTS, file_result, load_results, render
from tests.conformance.verdicts import Verdict, judge, load_rules, needs_stock, stale


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if no test failed without a reason and no rule is stale."""
    options = _parser().parse_args(arguments)
    checkout = options.checkout.resolve()
    if not (checkout / "tests" / "test_modeling_common.py").exists():
        _say(f"{checkout} is no checkout of Transformers: it has no tests/test_modeling_common.py.")
        return 2
    version = options.version or _version(checkout)
    work = options.work or Path(tempfile.gettempdir()) / f"conformance-{transformers.__version__}"
    if options.fresh:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    rules, results, verdicts = load_rules(), [], []
    for chapter in chapters(with_long=options.long):
        if not re.search(options.only, chapter.name):
            continue
        outcomes, stock = _outcomes(checkout, chapter, work, options.timeout)
        for file in chapter.files:
            of_file = {name: outcome for name, outcome in sorted(outcomes.items()) if name.split("::")[0] == file}
            judged = [judge(outcome, stock.get(name), rules) for name, outcome in of_file.items()]
            results.append(file_result(file, judged, of_file))
            verdicts += judged
            _say(f"{file}: " + ", ".join(f"{results[-1][kind]} {kind}" for kind in KINDS))
            for verdict in judged:
                if verdict.kind == "failed":
                    _say(f"  FAILED {verdict.test}\n    {verdict.reason}")
    return _finish(options, version, results, verdicts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("checkout", type=Path, help="the root of Transformers' source, at the installed version")
    parser.add_argument("--version", help="what the checkout is, in words; the default is its own version")
    parser.add_argument("--out", type=Path, help="the JSON file; the default lies in tests/conformance/results")
    parser.add_argument("--only", default="", help="an expression for the chapters: general, models-0, ...")
    parser.add_argument("--long", action="store_true", help="also the tests that take minutes each (torch.compile)")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a test (default %(default)s)")
    parser.add_argument("--work", type=Path, help="a folder for outcomes as they come")
    parser.add_argument("--fresh", action="store_true", help="forget the outcomes of an earlier run")
    return parser


def _outcomes(
    checkout: Path, chapter: Chapter, work: Path, timeout: int
) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """All tests of a chapter with "paged" as the default, and those that didn't pass without hf_paged."""
    log = work / f"{chapter.name}.paged.jsonl"
    outcomes = run_chapter(checkout, chapter, log, is_paged=True, timeout=timeout)
    again = [test for test, outcome in outcomes.items() if needs_stock(outcome)]
    if not again:
        return outcomes, {}
    log = work / f"{chapter.name}.stock.jsonl"
    return outcomes, run_chapter(checkout, chapter, log, is_paged=False, only=again, timeout=timeout)


def _finish(options: argparse.Namespace, version: str, results: list[dict], verdicts: list[Verdict]) -> int:
    rules = load_rules()
    failed = [verdict for verdict in verdicts if verdict.kind == "failed"]
    _say(", ".join(f"{sum(verdict.kind == kind for verdict in verdicts)} {kind}" for kind in KINDS))
    unused = stale(rules, verdicts) if not options.only else []
    for name in unused:
        _say(f"stale rule: {name!r} explains nothing in this run")
    whole = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": "CUDA" if torch.cuda.is_available() else "CPU",
        "checkout": version,
        "chapters": options.only or "all",
        "long tests": options.long,
        "stale rules": unused,
        "files": results,
    }
    path = options.out or RESULTS / f"transformers-{transformers.__version__}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    _say(f"written: {path}")
    if options.out is None:
        PAGE.write_text(render(load_results(), rules), encoding="utf-8")
        _say(f"written: {PAGE}")
    return 1 if failed or unused else 0


def _version(checkout: Path) -> str:
    source = checkout / "src" / "transformers" / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"', source.read_text(encoding="utf-8"), re.M) if source.exists() else None
    return f"the checkout's version is {found[1]}" if found else "a checkout without a version"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
