"""Rotary embeddings: the function of a model's module that turns q and k.

Attention layers find it as a global name of the file that they are written in, so that is where a stand-in goes while a
packed forward runs. Other threads that meet it there get what they would have got.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hf_paged.fused.scope import Scope

FUNCTION = "apply_rotary_pos_emb"
_TOLERANCE = 1e-6

_lock = threading.Lock()
_known: dict[Any, bool] = {}  # functions, and whether they are the usual one
_installed: dict[ModuleType, _StandIn] = {}


class _StandIn:
    """In the place of the function for as long as any scope needs it."""

    def __init__(self, stock: Callable[..., Any]) -> None:
        self.stock = stock
        self.scopes: dict[int, list[Scope]] = {}  # by the thread whose forward runs, the innermost last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scopes = self.scopes.get(threading.get_ident())
        scope = scopes[-1] if scopes else None
        if scope is not None and len(args) == 4 and not kwargs and scope.takes(*args) and _fits(*args):
            scope.num_calls += 1
            return scope.kernels.rotary(*args, scope.num_threads)
        return self.stock(*args, **kwargs)


def _fits(q: torch.Tensor, k: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> bool:
    tokens, dim = cosines.shape[-2:]
    return (
        q.dim() == k.dim() == 4
        and q.shape[0] == k.shape[0] == 1
        and q.shape[2:] == k.shape[2:] == (tokens, dim)
        and cosines.shape == sines.shape == (1, tokens, dim)
        and q.stride(3) == k.stride(3) == 1
        and dim % 2 == 0
        and cosines.is_contiguous()
        and sines.is_contiguous()
    )


def is_compiling_process() -> bool:
    """Whether anything was compiled by torch in this process.

    Compiled code notices that a global function is another one, and would be compiled anew wherever it meets the
    stand-in.
    """
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(convert_frame, "FRAME_COUNTER", 0))


def rotary_modules(model: nn.Module) -> list[ModuleType]:
    """The files that a model's modules are written in and whose rotary function is the usual one."""
    names = {type(module).__module__ for module in model.modules()}
    files = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [file for file in files if file in _installed or is_usual(getattr(file, FUNCTION, None))]


def is_usual(function: Any) -> bool:
    """Whether a function of (q, k, cos, sin) makes `x * cos + rotate_half(x) * sin` of q and k."""
    if function is None:
        return False
    if function not in _known:
        _known[function] = _is_usual(function)
    return _known[function]


def _is_usual(function: Callable[..., Any]) -> bool:
    # no two numbers alike, so that no other pairing of dimensions gives the same
    q = torch.linspace(-3, 2, 2 * 3 * 8).sin().view(1, 2, 3, 8)
    k = torch.linspace(4, 9, 3 * 8).sin().view(1, 1, 3, 8)
    cosines, sines = torch.linspace(0, 5, 3 * 8).cos().view(1, 3, 8), torch.linspace(1, 7, 3 * 8).sin().view(1, 3, 8)
    try:
        with torch.no_grad():
            found = function(q, k, cosines, sines)
    except Exception:
        return False

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * cosines[:, None] + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * sines[:, None]

    return (
        isinstance(found, tuple)
        and len(found) == 2
        and all(
            isinstance(one, torch.Tensor) and torch.allclose(one, turned(x), rtol=_TOLERANCE, atol=_TOLERANCE)
            for one, x in zip(found, (q, k), strict=True)
        )
    )


def install(files: list[ModuleType], scope: Scope) -> None:
    """Puts the stand-in into files, for the scope's thread. `remove` takes it out again."""
    thread = threading.get_ident()
    with _lock:
        for file in files:
            stand_in = _installed.get(file)
            if stand_in is None:
                stand_in = _installed[file] = _StandIn(getattr(file, FUNCTION))
                setattr(file, FUNCTION, stand_in)
            stand_in.scopes.setdefault(thread, []).append(scope)


def remove(files: list[ModuleType]) -> None:
    """Ends what `install` began in this thread; the last to leave puts the function back, if the stand-in is there."""
    thread = threading.get_ident()
    with _lock:
        for file in files:
            stand_in = _installed[file]
            scopes = stand_in.scopes[thread]
            scopes.pop()
            if not scopes:
                del stand_in.scopes[thread]
            if not stand_in.scopes:
                del _installed[file]
                if getattr(file, FUNCTION, None) is stand_in:
                    setattr(file, FUNCTION, stand_in.stock)
