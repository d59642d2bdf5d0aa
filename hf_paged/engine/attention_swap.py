"""Switches a model to our attention for the length of a forward, and back."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged.engine.adapters import hooks_at_rest
from hf_paged.errors import UnsupportedModelError
from hf_paged.kernels.swapped import ATTENTION_NAME, swap_in, swap_out

_locks: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def _forget() -> None:
    # in a forked child: locks may have been held by threads that it doesn't have
    global _locks_guard  # noqa: PLW0603
    _locks_guard = threading.Lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def model_lock(model: torch.nn.Module) -> threading.RLock:
    """The one lock of a model: it covers swap, forward and restore, whichever engine runs."""
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


def switchable_configs(model: PreTrainedModel) -> list[Any]:
    """The config objects whose attention implementation must change so that the language model uses ours.

    Raises:
        UnsupportedModelError: the model class ignores attention implementations.
    """
    configs = _all_configs(model)
    before = [config._attn_implementation_internal for config in configs]
    has_text_config = "text_config" in getattr(model.config, "sub_configs", {})
    requested = {"text_config": ATTENTION_NAME} if has_text_config else ATTENTION_NAME
    try:
        model.set_attn_implementation(requested)
        switched = [config for config in configs if config._attn_implementation_internal == ATTENTION_NAME]
    except (ValueError, ImportError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} can't use another attention implementation: {error}"
        ) from error
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
    if model.config.get_text_config(decoder=True) not in switched:
        raise UnsupportedModelError(
            f"{type(model).__name__} has attention code of its own that can't be replaced by a registered one."
        )
    return switched


def _all_configs(model: PreTrainedModel) -> list[Any]:
    found: dict[int, Any] = {}
    queue = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while queue:
        config = queue.pop()
        if id(config) not in found:
            found[id(config)] = config
            queue += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return list(found.values())


@contextmanager
def paged_attention(configs: Sequence[Any], model: torch.nn.Module) -> Iterator[None]:
    """Our attention and evaluation mode inside, everything as it was outside, also after an exception.

    Hold the model's lock. Modules in training mode are set to evaluation: dropout would make every step differ, and
    gradient checkpointing keeps some models from updating their cache at all. PEFT's hooks for `adapter_names` rest.
    """
    training = [module for module in model.modules() if module.training] if model.training else []
    swapped = []
    try:
        for config in configs:
            swap_in(config)
            swapped.append(config)
        for module in training:
            module.training = False
        with hooks_at_rest(model):
            yield
    finally:
        for module in training:
            module.training = True
        for config in swapped:
            swap_out(config)
