"""Which positions stock's `generate` gives a prompt: a packed step numbers tokens from 0, and most models do.

A model may number them otherwise where it prepares its inputs, for text behind an image, or from 1. Its forward doesn't
show it, so comparing logits of forwards can't.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from hf_paged.errors import UnsupportedModelError

_NUM_TOKENS = 4


def check_prompt_positions(model: Any, device: torch.device) -> None:
    """Asks the model how `generate` would number the tokens of a prompt of text.

    Raises:
        UnsupportedModelError: not from 0 on, one by one.
    """
    given = _positions(model, device)
    if given is None:  # it counts them itself; the self-check compares what comes of that
        return
    expected = torch.arange(_NUM_TOKENS, device=given.device).expand(given.shape)
    if not torch.equal(given.long(), expected):
        raise UnsupportedModelError(
            f"{type(model).__name__} can't run packed. Its generate numbers the tokens of a prompt "
            f"{given.flatten()[:_NUM_TOKENS].tolist()}, not from 0 on."
        )


def _positions(model: Any, device: torch.device) -> torch.Tensor | None:
    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device=device)
    inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "use_cache": True}
    try:
        positions = model._prepare_position_ids_for_generation(ids, dict(inputs))
        prepared = model.prepare_inputs_for_generation(ids, is_first_iteration=True, position_ids=positions, **inputs)
    except (AttributeError, TypeError, KeyError, ValueError, RuntimeError):  # it needs more than text
        return None
    given = prepared.get("position_ids")
    if given is None and positions is not None and "position_ids" in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(f"{type(model).__name__} can't run packed. Its generate keeps positions from it.")
    return given if isinstance(given, torch.Tensor) and given.shape[-1] == _NUM_TOKENS else None
