"""Whether the fused operations can be built where the tests run."""

from __future__ import annotations

import pytest

from hf_paged.errors import ConfigError
from hf_paged.fused.kernels import FusedKernels


def _missing() -> str:
    try:
        FusedKernels()
    except ConfigError as error:
        return f"the fused operations can't be built here: {error}"
    return ""


MISSING = _missing()
needs_fused = pytest.mark.skipif(bool(MISSING), reason=MISSING or "they can be built")
