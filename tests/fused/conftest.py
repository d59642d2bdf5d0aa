"""What every test of the fused operations starts from."""

from __future__ import annotations

import pytest
import torch._dynamo.convert_frame


@pytest.fixture(autouse=True)
def _nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary functions stay as they are once torch compiled anything in the process, as tests elsewhere do."""
    monkeypatch.setattr(torch._dynamo.convert_frame, "FRAME_COUNTER", 0)
