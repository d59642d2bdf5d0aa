"""Judges every entry of the installed Transformers, and writes the data and the pages.

python -m tests.models.table                      all of them
python -m tests.models.table --only llama,t5      these model types; the others stay as they are
python -m tests.models.table --pages              only the pages, from the data
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.models.entries import Entry, entries, shard
from tests.models.isolation import judge_isolated
from tests.models.outcomes import INSTALLED, Outcome, is_identical, load, save, versions, wrong_cases
from tests.models.page import page_of, render


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="model types, with commas between them")
    parser.add_argument("--kind", help="only this mapping: causal, encoder-decoder or vision-language")
    parser.add_argument("--shard", help="a part of the entries, such as 1/4")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--pages", action="store_true", help="write the pages from the data, and run nothing")
    options = parser.parse_args()
    if not options.pages:
        chosen = shard(entries(*([options.kind] if options.kind else [])), options.shard)
        names = set(options.only.split(",")) if options.only else None
        _judge([entry for entry in chosen if names is None or entry.model_type in names], options.jobs)
    for version in versions():
        page_of(version).write_text(render(version, load(version)))


def _judge(chosen: list[Entry], jobs: int) -> None:
    known = {entry.key for entry in entries()}
    started = time.monotonic()
    for entry, outcome in judge_isolated(chosen, jobs):
        seconds = outcome.pop("seconds", "")
        # read again: other shards may write at the same time
        outcomes: dict[str, Outcome] = {key: value for key, value in load(INSTALLED).items() if key in known}
        save(INSTALLED, {**outcomes, entry.key: outcome})
        remark = "" if is_identical(outcome) else f"{outcome.get('why', '')} {wrong_cases(outcome) or ''}"
        sys.stdout.write(f"{entry.key:45} {outcome['mode']:15} {seconds:>5} {remark}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen)} entries in {time.monotonic() - started:.0f} s\n")


if __name__ == "__main__":
    main()
