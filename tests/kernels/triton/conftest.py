"""Kernels run under Triton's interpreter, on CPU tensors: see TRITON_INTERPRET in tests/conftest.py."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "tests/kernels/triton is left out: triton is not installed"
    return None


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "these tests need TRITON_INTERPRET=1, or it left unset"
