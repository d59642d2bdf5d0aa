"""The only file that knows versions of transformers."""

from __future__ import annotations

import inspect

from transformers.generation.utils import GenerateDecoderOnlyOutput

# The keyword a model's forward takes its cache by, and the field of its outputs: `cache` from 5.24, and
# `past_key_values` before.
CACHE_KEYWORD = "cache" if "cache" in inspect.signature(GenerateDecoderOnlyOutput).parameters else "past_key_values"
