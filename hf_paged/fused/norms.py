"""Root-mean-square norms: found by what they compute, not by what they are called."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.fused.scope import Scope
from hf_paged.linears.eligible import is_plain
from hf_paged.linears.stand_in import StandIn

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_TOLERANCE = 2e-6


class Norm(NamedTuple):
    """A norm as it is now."""

    weight: torch.Tensor  # [n]
    eps: float
    adds_one: bool


class NormForward(StandIn[nn.Module]):
    """Stands in for the `forward` of a norm. It reads the weight at each call and keeps nothing of it."""

    def __init__(self, module: nn.Module, scope: Scope, eps: float, adds_one: bool) -> None:
        super().__init__(module)
        self._scope = scope
        self._eps = eps
        self._adds_one = adds_one

    def native_norm(self) -> Norm | None:
        """The weight and what is done with it, if it is one that runs natively now; else None."""
        module = self.module
        weight = None if module is None else module._parameters["weight"]
        if weight is None or weight.dtype is not torch.float32 or not weight.is_cpu or not weight.is_contiguous():
            return None
        return Norm(weight, self._eps, self._adds_one)

    def __call__(self, x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        """As the norm's own: `[..., n]` to `[..., n]`. What is given more than x, a gate for one, is for stock."""
        module = self.module
        assert module is not None
        norm, scope = self.native_norm(), self._scope
        if (
            norm is None
            or others
            or options
            or not scope.takes(x)
            or not x.is_contiguous()
            or x.shape[-1:] != norm.weight.shape
        ):
            result: torch.Tensor = self.stock(module, x, *others, **options)
            return result
        scope.num_calls += 1
        return scope.kernels.rms_norm(x, norm.weight, norm.eps, norm.adds_one, scope.num_threads)


def norm_forward(module: nn.Module, scope: Scope) -> NormForward | None:
    """A stand-in for a module that is found to be a root-mean-square norm; None for all others.

    It has one vector of weights and a small number, and makes of a few rows what the formula does.
    """
    weight = module._parameters.get("weight")
    eps = next((value for name in _EPS_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    if (
        eps is None
        or weight is None
        or "norm" not in type(module).__name__.lower()
        or len(module._parameters) != 1
        or module._buffers
        or module._modules
        or not is_plain(weight)
        or weight.dtype is not torch.float32
        or weight.dim() != 1
    ):
        return None
    # rows so small that the small number counts, and one that isn't centred, as a norm that subtracts a mean would show
    n = weight.shape[0]
    x = torch.linspace(-1, 2, 3 * n).view(3, n).sin() * torch.tensor([[1.0], [30.0], [eps**0.5]])
    try:
        expected = type(module).forward(module, x)
    except Exception:  # a module that wants something else raises what it likes
        return None
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    for adds_one in (False, True):
        found = normed * (1 + weight if adds_one else weight)
        if _same(expected, found):
            return NormForward(module, scope, eps, adds_one)
    return None


def _same(expected: object, found: torch.Tensor) -> bool:
    return (
        isinstance(expected, torch.Tensor)
        and expected.dtype is found.dtype
        and torch.allclose(expected, found, rtol=_TOLERANCE, atol=1e-9)
    )
