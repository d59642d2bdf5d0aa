"""Settings that hold for every test: one thread, no network, seeded draws, and the count of comparisons at the end."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, and torch.compile imports it

from typing import Any

import pytest
import torch

from tests.oracle import TALLY

torch.set_num_threads(1)  # the models are tiny; more threads only wait for each other


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker in ("grid", "models"):
        large = [item for item in items if item.get_closest_marker(marker)]
        if large and marker not in config.option.markexpr:
            config.hook.pytest_deselected(items=large)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fallbacks_are_counted_anew() -> None:
    """They are counted by model, and tests share models."""
    engines = sys.modules.get("hf_paged.integrations.engines")
    if engines is not None:
        engines._fallbacks.clear()
        for _, engine in list(engines._engines.values()):
            engine.core.counters.num_fallbacks = 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes: the one that started them sums up
        session.config.workeroutput["tally"] = TALLY.counts()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    TALLY.add_counts(getattr(node, "workeroutput", {}).get("tally"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TALLY.comparisons:
        counts = f"{TALLY.comparisons} comparisons, {TALLY.tokens} tokens, {TALLY.differing_tokens} differing"
        terminalreporter.write_line(f"equal to stock: {counts}")
    for note in TALLY.notes:
        terminalreporter.write_line(note)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-docs", action="store_true", help="let tests rewrite the pages that they check")
    parser.addoption("--models-shard", help="with -m models: a part of the models, such as 1/4")
