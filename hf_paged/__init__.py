"""A paged KV cache, continuous batching and paged attention for Hugging Face Transformers.

    import hf_paged
    model.generate(**batch, cache_implementation="paged")

Importing it registers the attention implementation "hf_paged" and wraps `generate`; `uninstall()` unwraps it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_paged.config import PagedConfig
from hf_paged.integrations.attention import register_attention
from hf_paged.integrations.generate import install, uninstall
from hf_paged.version import __version__

if TYPE_CHECKING:
    from hf_paged.cache.paged_cache import PagedKVCache
    from hf_paged.engine.engine import PagedEngine
    from hf_paged.engine.grammar_processor import GrammarProcessor
    from hf_paged.integrations.engines import get_engine, num_fallbacks, release
    from hf_paged.integrations.pipeline import PagedTextGenerationPipeline, paged_pipeline
    from hf_paged.request import RequestOutput, SequenceOutput

__all__ = [
    "GrammarProcessor",
    "PagedConfig",
    "PagedEngine",
    "PagedKVCache",
    "PagedTextGenerationPipeline",
    "RequestOutput",
    "SequenceOutput",
    "__version__",
    "get_engine",
    "install",
    "num_fallbacks",
    "paged_pipeline",
    "release",
    "uninstall",
]

# Loaded at first use: importing the package should cost little more than importing `generate` does.
_LAZY = {
    "GrammarProcessor": "hf_paged.engine.grammar_processor",
    "PagedEngine": "hf_paged.engine.engine",
    "PagedKVCache": "hf_paged.cache.paged_cache",
    "PagedTextGenerationPipeline": "hf_paged.integrations.pipeline",
    "RequestOutput": "hf_paged.request",
    "SequenceOutput": "hf_paged.request",
    "get_engine": "hf_paged.integrations.engines",
    "num_fallbacks": "hf_paged.integrations.engines",
    "paged_pipeline": "hf_paged.integrations.pipeline",
    "release": "hf_paged.integrations.engines",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hf_paged' has no attribute {name!r}")


register_attention()
install()
