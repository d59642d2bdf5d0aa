"""The engine that `generate` keeps for a model, from one call to the next.

It is held beside the model, never by it: the model can be collected, copied and pickled as if there were none.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged.config import PagedConfig
from hf_paged.engine.engine import PagedEngine
from hf_paged.engine.unwrap import unwrap_model
from hf_paged.errors import UnsupportedModelError
from hf_paged.kernels.absorbed import UP_PROJECTION, why_not_plain

_engines: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Hashable, PagedEngine]] = weakref.WeakKeyDictionary()
_refused: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Hashable, str]] = weakref.WeakKeyDictionary()
_fallbacks: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def _forget() -> None:
    # in a forked child: locks may have been held by threads that it doesn't have
    global _guard  # noqa: PLW0603
    _guard = threading.Lock()
    _engines.clear()
    _refused.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def engine_for(model: PreTrainedModel, config: PagedConfig | None) -> PagedEngine:
    """The model's engine, made at the first call and whenever its settings, device or types have changed.

    Args:
        model: the model itself, unwrapped.
        config: the settings; None keeps those of the engine that is there.

    Raises:
        UnsupportedModelError: the model can't run packed.
    """
    signature = _signature(model)
    with _guard:
        known, engine = _engines.get(model, (None, None))
        if engine is not None and known == signature and config in (None, engine.config):
            return engine
        asked = config or PagedConfig()
        refusal = (signature, asked.k_dtype, asked.v_dtype, asked.attention_backend)
        refused_as, reason = _refused.get(model, (None, ""))
        if refused_as == refusal:  # found out once; looking again would cost two forwards a call
            raise UnsupportedModelError(reason)
        if config is None:
            config = engine.config if engine is not None else PagedConfig()
        reference = weakref.ref(model)

        def get_model() -> PreTrainedModel:
            alive = reference()
            if alive is None:
                raise UnsupportedModelError("The model of this engine is gone.")
            return alive

        # another thread may still run on the old one; it is collected when that call is done
        _engines.pop(model, None)
        try:
            engine = PagedEngine.on_demand(get_model, config)
        except UnsupportedModelError as error:
            # what the model is made of won't change; an error that its forward raised may
            if error.__cause__ is None or isinstance(error.__cause__, UnsupportedModelError):
                _refused[model] = (refusal, str(error))
            raise
        engine.core.counters.num_fallbacks = _fallbacks.get(model, 0)
        _engines[model] = (signature, engine)
        return engine


def _signature(model: PreTrainedModel) -> Hashable:
    parameter = next(model.parameters())
    kind = parameter.device.type
    autocast = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
    # an adapter on a latent layer's projection, or one taken off again, makes it another model
    projections = (getattr(module, UP_PROJECTION, None) for module in model.modules())
    latent = {why_not_plain(projection) for projection in projections if projection is not None}
    return (parameter.device, parameter.dtype, autocast, frozenset(latent))


def get_engine(model: Any) -> PagedEngine | None:
    """The engine behind a model's paged `generate`, or None before its first call. Wrappers are unwrapped."""
    with _guard:
        return _engines.get(unwrap_model(model), (None, None))[1]


def release(model: Any) -> None:
    """Gives back the pool of a model's paged `generate`; the next call makes a new one."""
    with _guard:
        _refused.pop(unwrap_model(model), None)
        _, engine = _engines.pop(unwrap_model(model), (None, None))
    if engine is not None:
        engine.close()


def count_fallback(model: PreTrainedModel) -> None:
    """Notes that a paged call of a model ran stock's loop instead."""
    with _guard:
        _fallbacks[model] = _fallbacks.get(model, 0) + 1
        _, engine = _engines.get(model, (None, None))
        if engine is not None:
            engine.core.counters.num_fallbacks = _fallbacks[model]


def num_fallbacks(model: Any) -> int:
    """How many paged calls of a model ran stock's loop instead of the engine."""
    with _guard:
        return _fallbacks.get(unwrap_model(model), 0)
