"""The Transformers model inside what people pass around."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hf_paged.errors import UnsupportedModelError


def unwrap_model(model: Any) -> PreTrainedModel:
    """The PreTrainedModel inside PEFT, torch.compile and data-parallel wrappers.

    Raises:
        UnsupportedModelError: there is none.
    """
    inner = model
    for _ in range(8):  # wrappers of wrappers, but not without end
        if isinstance(inner, PreTrainedModel):
            return inner
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "module"):
            inner = inner.module
        else:
            break
    raise UnsupportedModelError(f"A {type(model).__name__} is not a Transformers model; pass a PreTrainedModel.")


def refuse_learned_prompts(model: Any) -> None:
    """Raises UnsupportedModelError for PEFT's prompt and prefix tuning: what was learned is in the wrapper alone."""
    config = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"A PagedEngine doesn't see the learned prompt of {type(config).__name__}, which stands before the model; "
            "call model.generate for it."
        )
