"""`generate(past_key_values=...)`: a call that goes on from a cache, one that another call returned or one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hf_paged.compat import CACHE_KEYWORD
from hf_paged.config import PagedConfig
from hf_paged.engine.given_cache import GivenRow, why_not_given
from hf_paged.errors import UnsupportedModelError

if TYPE_CHECKING:
    from hf_paged.integrations.decoding import Batch


def why_stock(
    model: Any,
    config: PagedConfig | None,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why the engine can't go on from the cache of this call, or None if it can."""
    if generation_config.get_generation_mode() not in ("sample", "greedy_search"):
        return "a cache of one's own with beams or an assistant needs stock's loop"
    if model_kwargs.get("inputs_embeds") is not None:
        return "a cache of one's own with inputs_embeds needs stock's loop"
    from hf_paged.integrations.engines import engine_for

    try:
        engine = engine_for(model, config)
    except UnsupportedModelError:  # it will be found out again, and said
        return None
    cache, mask = model_kwargs[CACHE_KEYWORD], model_kwargs.get("attention_mask")
    firsts = _first_columns(mask, input_ids)
    reason = why_not_given(cache, engine.core.runner.layout, len(input_ids), firsts)
    if reason is None and cache.get_seq_length() >= input_ids.shape[1]:
        reason = "a cache that has all columns of input_ids already"
    return None if reason is None else f"{reason} needs stock's loop"


def given_rows(batch: Batch, prompts: list[list[int]]) -> list[GivenRow | None]:
    """What each row of a batch has in its cache; None where that is nothing but padding."""
    if batch.given is None:
        return [None] * len(prompts)
    length, width = int(batch.given.get_seq_length()), batch.input_ids.shape[1]
    firsts = [width - len(prompt) for prompt in prompts]  # padding is on the left
    return [
        GivenRow(batch.given, row, first, length - first) if first < length else None
        for row, first in enumerate(firsts)
    ]


def _first_columns(mask: torch.Tensor | None, input_ids: torch.Tensor) -> list[int]:
    if mask is None:
        return [0] * len(input_ids)
    firsts: list[int] = (mask == 0).sum(-1).tolist()  # host: once a call
    return firsts
