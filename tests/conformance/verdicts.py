"""What the outcomes of a test mean: passed, failed, or not applicable and why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RULES = Path(__file__).with_name("rules.json")
WHENS = ("skipped", "stock", "paged")

Outcome = Mapping[str, Any]

_MODEL_CLASS = re.compile(r"(<class ')?([a-z_0-9]+\.)*\b[A-Z]\w*(Model|For[A-Z]\w+|LMHead\w*)\b('>)?")


@dataclass(frozen=True)
class Rule:
    """A reason why tests don't apply.

    Attributes:
        name: what it is called in reports.
        when: "skipped": the test skips itself; "stock": it fails without hf_paged, too; "paged": it fails only with
            "paged" as the default.
        tests: an expression that an id has to contain.
        error: an expression that the error, or the reason of the skip, has to contain.
        reason: the reason in words.
    """

    name: str
    when: str
    tests: str
    error: str
    reason: str

    def fits(self, when: str, name: str, error: str) -> bool:
        """Whether it explains this test's outcome."""
        return when == self.when and bool(re.search(self.tests, name) and re.search(self.error, error))


@dataclass(frozen=True)
class Verdict:
    """What became of one test.

    Attributes:
        test: its id.
        kind: "passed", "failed" or "not applicable".
        rule: the name of the rule that explains it, "" where none does.
        reason: why it failed or doesn't apply.
    """

    test: str
    kind: str
    rule: str = ""
    reason: str = ""


def load_rules(path: Path = RULES) -> list[Rule]:
    """The committed rules, checked."""
    rules = [Rule(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    for rule in rules:
        if rule.when not in WHENS:
            raise ValueError(f"Rule {rule.name!r}: when={rule.when!r} must be one of {', '.join(WHENS)}.")
        if rule.when == "paged" and not (rule.tests and rule.error):
            raise ValueError(f"Rule {rule.name!r} must name the tests and the error: it would hide others.")
    return rules


def needs_stock(outcome: Outcome) -> bool:
    """Whether the same test has to be run without hf_paged."""
    return outcome["outcome"] != "passed"


def judge(outcome: Outcome, stock: Outcome | None, rules: Iterable[Rule]) -> Verdict:
    """The verdict on one test from its outcome with "paged" as the default, and without hf_paged."""
    name, kind = outcome["id"], outcome["outcome"]
    if kind == "passed":
        return Verdict(name, "passed")
    if stock is None:
        return Verdict(name, "failed", reason=f"not run without hf_paged; with it: {_first_line(outcome)}")
    if stock["outcome"] == kind and (kind == "skipped" or _error_type(stock) == _error_type(outcome)):
        when, error = ("skipped", outcome["error"]) if kind == "skipped" else ("stock", stock["error"])
    else:
        when, error = "paged", f"{kind}: {outcome['error']}"
    for rule in rules:
        if rule.fits(when, name, error):
            return Verdict(name, "not applicable", rule.name, rule.reason)
    if when == "skipped":
        return Verdict(name, "not applicable", reason=f"skips itself: {_first_line(outcome)}")
    if when == "stock":
        return Verdict(name, "not applicable", reason=f"fails without hf_paged, too: {_first_line(stock)}")
    return Verdict(name, "failed", reason=f"{kind}: {_first_line(outcome)} ({stock['outcome']} without hf_paged)")


def _error_type(outcome: Outcome) -> str:
    # "AssertionError: 3 != 4", "transformers.errors.X: ...", "assert 3 == 4"
    return re.split(r"[:\s]", str(outcome["error"]).strip(), maxsplit=1)[0]


def _first_line(outcome: Outcome) -> str:
    lines = str(outcome["error"]).strip().removeprefix("Skipped: ").splitlines()
    lines = [line[1:].strip() for line in lines if line.startswith("E ")] or lines  # of a file that can't be imported
    # one reason for all families: it names the model's class, or the repr of it
    return _MODEL_CLASS.sub("the model", lines[0])[:200] if lines else "no message"
