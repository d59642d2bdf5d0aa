"""Gated feed-forward modules: down(act(gate(x)) * up(x)), with act and the product in one pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_paged.fused.scope import Scope
from hf_paged.linears.stand_in import StandIn

_NAMES = ("gate_proj", "up_proj", "down_proj", "act_fn")
_TOLERANCE = 1e-5

Known = dict[tuple[type, type, torch.Size], "str | None"]


class GateForward(StandIn[nn.Module]):
    """Stands in for the `forward` of a gated feed-forward module. Its layers are called as modules, hooks and all."""

    def __init__(self, module: nn.Module, scope: Scope, kind: str) -> None:
        super().__init__(module)
        self._scope = scope
        self.act = kind

    def __call__(self, x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        """As the module's own: `[..., hidden]` to `[..., hidden]`. What is given more than x is for stock."""
        module = self.module
        assert module is not None
        scope, modules = self._scope, module._modules
        act = modules["act_fn"]
        if others or options or not scope.takes(x) or act is None or _has_hooks(act):
            result: torch.Tensor = self.stock(module, x, *others, **options)
            return result
        gate, up = modules["gate_proj"](x), modules["up_proj"](x)  # type: ignore[misc]
        if scope.takes(gate, up) and gate.shape == up.shape and gate.is_contiguous() and up.is_contiguous():
            scope.num_calls += 1
            product = scope.kernels.gate(gate, up, self.act, scope.num_threads)
        else:
            product = act(gate) * up
        out: torch.Tensor = modules["down_proj"](product)  # type: ignore[misc]
        return out


def gate_forward(module: nn.Module, scope: Scope, known: Known) -> GateForward | None:
    """A stand-in for a module that is found to be a gated feed-forward module; None for all others.

    Args:
        module: any module; it is looked at once a class and shape, since that reads its weights.
        scope: of the model.
        known: what was found so far.
    """
    if any(module._modules.get(name) is None for name in _NAMES) or len(module._modules) != len(_NAMES):
        return None
    gate, _, _, act = (module._modules[name] for name in _NAMES)
    weight = getattr(gate, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype is not torch.float32 or weight.dim() != 2:
        return None
    key = type(module), type(act), weight.shape
    if key not in known:
        known[key] = _kind_of(module, weight.shape[1])
    kind = known[key]
    return None if kind is None else GateForward(module, scope, kind)


def _kind_of(module: nn.Module, hidden: int) -> str | None:
    gate, up, down, act = (module._modules[name] for name in _NAMES)
    values = torch.linspace(-12, 12, 97)
    x = torch.linspace(-1, 1, 2 * hidden).view(1, 2, hidden).cos()
    try:
        with torch.no_grad():
            found = act(values)  # type: ignore[misc]
            whole = type(module).forward(module, x)
            ours = down(act(gate(x)) * up(x))  # type: ignore[misc]
    except Exception:  # a module that wants something else raises what it likes
        return None
    if not isinstance(whole, torch.Tensor) or not torch.allclose(whole, ours, rtol=_TOLERANCE, atol=_TOLERANCE):
        return None
    kinds = {"silu": F.silu(values), "gelu_tanh": F.gelu(values, approximate="tanh")}
    return next((kind for kind, expected in kinds.items() if torch.allclose(found, expected, atol=1e-6)), None)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
