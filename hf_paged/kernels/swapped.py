"""What attention implementation a config had before ours was swapped in, for the threads that are not in a packed step.

While one thread runs a packed step, another may run a plain forward of the same model, and meet our attention in it. It
must get the mask and the attention of the implementation that the model really has: mixing the two, an eager layer with
the boolean mask of sdpa for one, gives wrong numbers and no error.
"""

from __future__ import annotations

import threading
from typing import Any

ATTENTION_NAME = "hf_paged"

_guard = threading.Lock()
_swapped: dict[int, tuple[str, int]] = {}  # id of a config -> its own implementation, packed steps that have it swapped


def swap_in(config: Any) -> None:
    """Gives a config our implementation. Two models may share a config, so packed steps are counted."""
    with _guard:
        own, count = _swapped.get(id(config), (config._attn_implementation_internal, 0))
        _swapped[id(config)] = (own, count + 1)
        config._attn_implementation_internal = ATTENTION_NAME


def swap_out(config: Any) -> None:
    """Gives a config its own implementation back, after the last packed step that has it swapped."""
    with _guard:
        own, count = _swapped.pop(id(config))
        if count > 1:
            _swapped[id(config)] = (own, count - 1)
        else:
            config._attn_implementation_internal = own


def own_implementation(config: Any) -> str:
    """The implementation that a config has outside of packed steps; ours, where the user chose it."""
    current: str = getattr(config, "_attn_implementation_internal", None) or ATTENTION_NAME
    if current != ATTENTION_NAME:
        return current
    return _swapped.get(id(config), (current, 0))[0] or ATTENTION_NAME
