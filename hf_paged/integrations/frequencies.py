"""Calls of models whose rotary frequencies depend on length: when the engine gives what stock's loop would."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.compat import CACHE_KEYWORD
from hf_paged.engine.engine import PagedEngine
from hf_paged.engine.rotary_regimes import Crossing


def why_stock(
    engine: PagedEngine,
    input_ids: torch.Tensor,
    stopping_criteria: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why the engine can't run this call of a model, or None if it can."""
    regimes, max_length = engine.core.regimes, int(stopping_criteria.max_length)
    if not regimes.passes(max_length):
        return None
    reason = regimes.why_stock(shortest_prompt(input_ids, model_kwargs.get("attention_mask")), max_length)
    if reason is not None:
        return reason
    change = f"rotary frequencies that change at position {regimes.limit}"
    if generation_config.prefill_chunk_size is not None:  # stock chooses for each chunk
        return f"{change} and prefill_chunk_size need stock's loop"
    if generation_config.get_generation_mode() == "assisted_generation":  # and for all candidates of a check
        return f"{change} and an assistant need stock's loop"
    if model_kwargs.get(CACHE_KEYWORD) is not None and regimes.crossing is not Crossing.KEEPS:
        return f"{change}, where the model drops its cache, and a cache of one's own need stock's loop"
    return None


def shortest_prompt(rows: torch.Tensor, mask: torch.Tensor | None) -> int:
    """The tokens of the shortest of `rows` `[B, L, ...]`, without padding."""
    return int(rows.shape[1] if mask is None else mask.sum(-1).min())  # host: once a call
