"""Whether native code can be built where the tests run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_paged.errors import ConfigError
from hf_paged.linears.library import load_libraries


def needs(load: Callable[[], object], what: str) -> pytest.MarkDecorator:
    """Skips tests where `load` can't build or load; `what` is it, for the reason."""
    try:
        load()
    except ConfigError as error:
        return pytest.mark.skipif(True, reason=f"{what} can't be built here: {error}")
    return pytest.mark.skipif(False, reason="it can be built")


needs_native = needs(load_libraries, "the native product")
