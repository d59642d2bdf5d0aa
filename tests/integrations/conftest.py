"""What every test of the integrations starts from."""

from __future__ import annotations

import pytest

from hf_paged.integrations import generate as hook


@pytest.fixture(autouse=True)
def _say_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said once a process is said once a test."""
    monkeypatch.setattr(hook, "_said", set())
