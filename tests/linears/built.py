"""Whether the native product can be built where the tests run."""

from __future__ import annotations

import pytest

from hf_paged.errors import ConfigError
from hf_paged.linears.library import load_library


def _missing() -> str:
    try:
        load_library()
    except ConfigError as error:
        return f"the native product can't be built here: {error}"
    return ""


MISSING = _missing()
needs_native = pytest.mark.skipif(bool(MISSING), reason=MISSING or "it can be built")
