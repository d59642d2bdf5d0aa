"""The only file that knows versions of transformers."""

from __future__ import annotations

import inspect
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

# The keyword a model's forward takes its cache by, and the field of its outputs: `cache` from 5.24, and
# `past_key_values` before.
CACHE_KEYWORD = "cache" if "cache" in inspect.signature(GenerateDecoderOnlyOutput).parameters else "past_key_values"


def cache_keyword(model: Any) -> str:
    """The keyword that a model's own forward takes its cache by: recurrent ones had `cache_params` before 5.24."""
    parameters = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in parameters and CACHE_KEYWORD not in parameters else CACHE_KEYWORD
