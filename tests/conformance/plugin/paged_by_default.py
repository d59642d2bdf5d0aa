"""A pytest plugin for a checkout of Transformers: "paged" is what `generate` uses, and each test's outcome is written.

It lies in a folder of its own, because the checkout has a package `tests`, too. Without `--paged-default` it only
seeds and writes: that is the run to compare with.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import transformers  # noqa: F401  the installed one, before the checkout's conftest puts its own source on the path

MAX_ERROR = 1500  # characters of an error that are kept
CACHE_KEYWORDS = ("cache_implementation", "cache", "past_key_values")
OWN_LOOP = "stock's loop: the model, or the test, has a loop of its own"  # none of the wrapped methods was called
calls: Counter[str] = Counter()  # of the test that runs: how each `generate` ran


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", required=True, help="where a line of JSON for each test goes")
    parser.addoption("--full-masks", action="store_true", help="no attention_mask hides what follows a token it shows")
    parser.addoption("--paged-default", action="store_true", help="make every plain generate call a paged one")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--paged-default"):
        make_paged_the_default()
    if config.getoption("--full-masks"):
        fill_masks()
    config.pluginmanager.register(Writer(config.getoption("--outcomes")), "paged-outcomes")


def make_paged_the_default() -> None:
    """Lays a `generate` over hf_paged's, which asks for "paged" where a call names no cache of its own."""
    from transformers.generation.utils import GenerationMixin

    from hf_paged.integrations import generate as hook

    original, fall_back, find_engine = GenerationMixin.generate, hook._fall_back, hook._engine
    local = threading.local()

    @functools.wraps(original)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(local, "inside", False):  # an assistant's, within a call: the outer one's business
            return original(model, *args, **kwargs)
        if names_a_cache(model, args, kwargs):
            calls["names its own cache"] += 1
            return original(model, *args, **kwargs)
        kwargs["cache_implementation"] = "paged"
        local.inside, local.reason = True, OWN_LOOP
        try:
            return original(model, *args, **kwargs)
        except BaseException:
            local.reason = "raised"
            raise
        finally:
            local.inside = False
            calls[local.reason] += 1

    def note_fall_back(model: Any, reason: str, *args: Any, **kwargs: Any) -> None:
        local.reason = f"stock's loop: {reason}"
        fall_back(model, reason, *args, **kwargs)

    def note_engine(*args: Any, **kwargs: Any) -> Any:
        engine = find_engine(*args, **kwargs)
        if engine is not None:
            local.reason = "engine"
        return engine

    hook._fall_back, hook._engine = note_fall_back, note_engine
    GenerationMixin.generate = generate


def fill_masks() -> None:
    """Lays a `generate` over the present one, which shows it all tokens where a mask hides some behind others.

    The model testers' masks are triangles: the first row sees one token, and each next row one more. What follows
    from the hidden end of a row is stock's own, so that such calls say little of the engine.
    """
    from transformers.generation.utils import GenerationMixin

    original = GenerationMixin.generate

    @functools.wraps(original)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask.long().diff(dim=-1) < 0).any()):
            kwargs["attention_mask"] = torch.ones_like(mask)
        return original(model, *args, **kwargs)

    GenerationMixin.generate = generate


def names_a_cache(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call, its generation config or the model's says which cache to use."""
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    configs = (given, getattr(model, "generation_config", None))
    named = any(getattr(config, "cache_implementation", None) is not None for config in configs)
    return named or any(kwargs.get(keyword) is not None for keyword in CACHE_KEYWORDS)


class Writer:
    """Writes lines: what was collected, each test that starts, and each that ended with its outcome."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  open until the session's end
        self.reports: list[Any] = []

    def write(self, **line: Any) -> None:
        self.file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(id=report.nodeid, outcome="failed", phase="collect", error=error_of(report))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.reports = []
        calls.clear()
        self.write(started=nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # the tests draw weights and inputs without a seed: both runs must see the same ones
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        common = sys.modules.get("tests.test_modeling_common")
        if common is not None:
            common.global_rng.seed(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        failed = [report for report in self.reports if report.failed]
        whole = [report for report in self.reports if type(report) is pytest.TestReport]  # not those of subtests
        skipped = [report for report in whole if report.skipped]
        telling = (failed or skipped or whole)[0]
        outcome = "failed" if failed else "skipped" if skipped else "passed"
        if outcome != "failed" and any(hasattr(report, "wasxfail") for report in whole):
            outcome = "passed"  # what a test expects to fail, and does
        line = {"id": nodeid, "outcome": outcome, "phase": telling.when, "calls": dict(calls)}
        self.write(**line, seconds=round(sum(report.duration for report in whole), 2), error=error_of(telling))


def error_of(report: Any) -> str:
    """The message of a failure or the reason of a skip, in short."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: path, line, reason
        return str(report.longrepr[2])[:MAX_ERROR]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR // 2] + " ... " + text[-MAX_ERROR // 2 :]
