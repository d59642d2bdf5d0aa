"""`python -m tests.conformance CHECKOUT`: runs Transformers' own tests with "paged" as the default, and reports.

Each file's results are written as soon as it is done. A run that was broken off goes on where it stopped, test by
test; `--fresh` starts anew, `--again` repeats what failed. `--shard 1/4` takes every fourth file: shards may run at
the same time, and put their files into the same results. Without a checkout only the page is made anew.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.conformance.chapters import Chapter, chapters
from tests.conformance.children import Outcome, forget, read, run_chapter
from tests.conformance.report import KINDS, PAGE, RESULTS, file_result, load_results, merge, render, unused_rules
from tests.conformance.verdicts import Rule, Verdict, judge, load_rules, needs_stock

MASK = "a mask that hides tokens inside or behind the prompt"  # of the reasons for stock's loop


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if no test failed without a reason and, in a whole run, no rule explains nothing."""
    options = _parser().parse_args(arguments)
    rules, failed, totals = load_rules(), 0, dict.fromkeys(KINDS, 0)
    if options.checkout is not None:
        checkout = options.checkout.resolve()
        if not (checkout / "tests" / "test_modeling_common.py").exists():
            _say(f"{checkout} is no checkout of Transformers: it has no tests/test_modeling_common.py.")
            return 2
        work = options.work or Path(tempfile.gettempdir()) / f"conformance-{transformers.__version__}"
        work.mkdir(parents=True, exist_ok=True)
        head = _head(options, checkout)
        path = options.out or RESULTS / f"transformers-{transformers.__version__}.json"
        for chapter in _chosen(options):
            for log in _logs(work, chapter) if options.fresh else ():
                log.unlink(missing_ok=True)
            entries, verdicts = _run(checkout, chapter, work, options)
            for entry in entries:
                merge(path, head, entry)
                for kind in KINDS:
                    totals[kind] += entry[kind]
                _say(f"{entry['file']}: " + ", ".join(f"{entry[kind]} {kind}" for kind in KINDS))
            for verdict in verdicts:
                _say(f"  FAILED {verdict.test}\n    {verdict.reason}")
            failed += len(verdicts)
        _say(", ".join(f"{count} {kind}" for kind, count in totals.items()) + f"; results: {path}")
    if options.out is not None:
        return 1 if failed else 0
    results = load_results()
    PAGE.write_text(render(results, rules), encoding="utf-8")
    _say(f"written: {PAGE}")
    unused = unused_rules(results, rules) if not (options.only or options.shard) else []
    for name in unused:
        _say(f"stale rule: {name!r} explains nothing")
    return 1 if failed or unused else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, nargs="?", help="the root of Transformers' source, at the same version")
    parser.add_argument("--version", help="what the checkout is, in words; the default is its own version")
    parser.add_argument("--out", type=Path, help="the JSON file; the default lies in tests/conformance/results")
    parser.add_argument("--only", default="", help="an expression for the files: generation/, models/llama, ...")
    parser.add_argument("--shard", type=_shard, help="which part of the files, as 2/4")
    parser.add_argument("--long", action="store_true", help="also the tests that take minutes each (torch.compile)")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a test (default %(default)s)")
    parser.add_argument("--work", type=Path, help="a folder for outcomes as they come")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--fresh", action="store_true", help="forget the outcomes of an earlier run")
    how.add_argument("--again", action="store_true", help="repeat the tests that failed in an earlier run")
    return parser


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"{text!r} is no shard: write 1/4 to 4/4 for four of them")
    return part, parts


def _chosen(options: argparse.Namespace) -> list[Chapter]:
    fitting = [one for one in chapters(with_long=options.long) if re.search(options.only, " ".join(one.files))]
    part, parts = options.shard or (1, 1)
    return fitting[part - 1 :: parts]


def _head(options: argparse.Namespace, checkout: Path) -> dict[str, Any]:
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": "CUDA" if torch.cuda.is_available() else "CPU",
        "checkout": options.version or _version(checkout),
        "long tests": options.long,
    }


def _run(
    checkout: Path, chapter: Chapter, work: Path, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[Verdict]]:
    """The entries of a chapter's files, and the verdicts on tests that failed."""
    rules = load_rules()
    if options.again:
        _forget_failed(work, chapter)
    logs = _logs(work, chapter)
    whole = _outcomes(checkout, chapter, logs[:2], timeout=options.timeout)
    hiding = [name for name, outcome in whole[0].items() if any(MASK in way for way in outcome.get("calls", {}))]
    filled = ({}, {})
    if hiding:
        filled = _outcomes(checkout, chapter, logs[2:], timeout=options.timeout, has_full_masks=True, only=hiding)
    entries, failed = [], []
    for file in chapter.files:
        entry, verdicts = _judged(file, *whole, rules)
        entry["with full masks"], more = _judged(file, *filled, rules)
        if verdicts:  # a checkout of another version may lack the file: then it is listed as not run
            entries.append(entry)
        failed += [verdict for verdict in (*verdicts, *more) if verdict.kind == "failed"]
    return entries, failed


def _judged(
    file: str, outcomes: dict[str, Outcome], stock: dict[str, Outcome], rules: list[Rule]
) -> tuple[dict[str, Any], list[Verdict]]:
    of_file = {name: outcome for name, outcome in sorted(outcomes.items()) if name.split("::")[0] == file}
    verdicts = [judge(outcome, stock.get(name), rules) for name, outcome in of_file.items()]
    return file_result(file, verdicts, of_file), verdicts


def _forget_failed(work: Path, chapter: Chapter) -> None:
    rules, logs = load_rules(), _logs(work, chapter)
    for paged_log, stock_log in (logs[:2], logs[2:]):
        stock = read(stock_log)[0]
        verdicts = [judge(outcome, stock.get(name), rules) for name, outcome in read(paged_log)[0].items()]
        failed = [verdict.test for verdict in verdicts if verdict.kind == "failed"]
        if failed:
            forget(paged_log, failed)
            forget(stock_log, failed)


def _logs(work: Path, chapter: Chapter) -> list[Path]:
    names = ("paged", "stock", "paged.masks", "stock.masks")
    return [work / f"{chapter.name}.{name}.jsonl" for name in names]


def _outcomes(
    checkout: Path, chapter: Chapter, logs: Sequence[Path], **options: Any
) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """Tests of a chapter with "paged" as the default, and those that didn't pass without hf_paged."""
    outcomes = run_chapter(checkout, chapter, logs[0], is_paged=True, **options)
    again = [test for test, outcome in outcomes.items() if needs_stock(outcome)]
    if not again:
        return outcomes, {}
    return outcomes, run_chapter(checkout, chapter, logs[1], is_paged=False, **{**options, "only": again})


def _version(checkout: Path) -> str:
    source = checkout / "src" / "transformers" / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"', source.read_text(encoding="utf-8"), re.M) if source.exists() else None
    return f"the checkout's version is {found[1]}" if found else "a checkout without a version"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
