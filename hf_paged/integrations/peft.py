"""`model.generate(..., adapter_names=[...])` of a PEFT model: an adapter a row.

PEFT takes the keyword out of the call and hooks every layer, to hand it the names: they are read from a hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_paged.config import PagedConfig
from hf_paged.engine.adapters import HOOK_KEYWORD, adapter_hooks
from hf_paged.errors import UnsupportedModelError


def adapters_of_call(model: nn.Module, num_rows: int) -> Sequence[str | None]:
    """The adapter of each row of the `generate` call that is under way; None stands for the model's active ones."""
    names = _names(model)
    return [None] * num_rows if names is None else names


def why_stock(model: Any, config: PagedConfig | None, num_rows: int, mode: str) -> str | None:
    """Why the engine can't give each row of this call its adapter, or None if it can, or needn't.

    Args:
        model: the one that generates.
        config: of its engine.
        num_rows: of the call.
        mode: stock's word for the kind of generation.
    """
    names = _names(model)
    if names is None:
        return None
    if mode not in ("sample", "greedy_search", "beam_search", "beam_sample", "assisted_generation"):
        return f"adapter_names need stock's loop in the mode {mode}"
    if len(names) != num_rows:
        return "adapter_names need stock's loop with several sequences a row"
    from hf_paged.integrations.engines import engine_for

    try:
        engine = engine_for(model, config)
    except UnsupportedModelError:  # it will be found out again, and said
        return None
    reason = engine.core.runner.why_no_adapters()
    return None if reason is None else f"adapter_names need stock's loop: {reason}"


def _names(model: nn.Module) -> list[str] | None:
    hooks = adapter_hooks(model)
    return list(hooks[0][2].keywords[HOOK_KEYWORD]) if hooks else None
