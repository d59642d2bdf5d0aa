"""A window that only stock's cache knows.

Most models with a window say so in their masks, which the probe reads. Some leave it to stock's cache, which forgets
keys behind the window while the mask shows all that there are. What a token sees then depends on which tokens were
computed together, and a pool that keeps everything would show it more.
"""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from hf_paged.cache.layout import CacheLayout
from hf_paged.errors import UnsupportedModelError


def check_stock_windows(model: Any, layout: CacheLayout) -> None:
    """Compares what the layers were seen to see with what stock's cache for this model would keep.

    Raises:
        UnsupportedModelError: a layer sees everything, and stock's cache forgets.
    """
    stock = DynamicCache(config=model.config.get_text_config(decoder=True))
    for index, layer in layout.layers.items():
        kept = stock.layers[index] if index < len(stock.layers) else None
        forgets = isinstance(kept, DynamicSlidingWindowLayer)
        if forgets and layer.span.window is None and layer.span.chunk is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} can't run packed. Its window is in stock's cache alone, not in its masks."
            )
