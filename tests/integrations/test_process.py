"""What a process that used the package leaves behind: nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from pathlib import Path

import torch

from hf_paged import PagedConfig, PagedEngine
from tests.zoo import build

ROOT = Path(__file__).parents[2]
SCRIPT = """
import threading, torch
import hf_paged
from tests.zoo import build
model = build("llama")
engine = hf_paged.PagedEngine(model, hf_paged.PagedConfig(num_blocks=32))
stream = engine.stream([1, 2, 3], max_new_tokens=500)
next(stream)
model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, cache_implementation="paged")
assert threading.active_count() == 1, threading.enumerate()
print("done", flush=True)
"""


def test_a_process_that_leaves_a_stream_open_just_ends() -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.endswith("done\n")
    assert "Traceback" not in found.stderr


def test_warnings_filters_and_threads_are_left_alone() -> None:
    before, count = list(warnings.filters), threading.active_count()
    with PagedEngine(build("llama"), PagedConfig(num_blocks=32)) as engine:
        engine.generate([[1, 2, 3]], max_new_tokens=3)
    build("llama").generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, cache_implementation="paged")
    assert list(warnings.filters) == before
    assert threading.active_count() == count
