"""`generate(inputs_embeds=...)`: prompts that are embeddings, and tokens after them."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.config import PagedConfig
from hf_paged.errors import UnsupportedModelError
from hf_paged.integrations.frequencies import shortest_prompt


def why_stock(
    model: Any,
    config: PagedConfig | None,
    input_ids: torch.Tensor,
    stopping_criteria: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why the engine can't take the embeddings of this call, or None if it can."""
    embeds = model_kwargs["inputs_embeds"]
    if input_ids.shape[1]:
        return "inputs_embeds beside input_ids need stock's loop"
    if generation_config.get_generation_mode() not in ("sample", "greedy_search", "beam_search", "beam_sample"):
        return "inputs_embeds with an assistant or prompt lookup need stock's loop"
    from hf_paged.integrations.engines import engine_for

    try:
        engine = engine_for(model, config)
    except UnsupportedModelError:  # it will be found out again, and said
        return None
    shortest = shortest_prompt(embeds, model_kwargs.get("attention_mask"))
    reason = engine.core.regimes.why_stock(shortest, embeds.shape[1] + stopping_criteria.max_length)
    if reason is not None:
        return reason
    reason = engine.core.runner.why_no_embeds()
    return None if reason is None else f"inputs_embeds need stock's loop: {reason}"
