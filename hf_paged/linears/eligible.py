"""Which layers of a model may be computed by the native product."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hf_paged.kernels.absorbed import UP_PROJECTION

DTYPES = (torch.float32, torch.bfloat16)


def eligible_linears(model: nn.Module) -> list[nn.Linear]:
    """The plain `nn.Linear` layers of a model on a CPU, in the order of its tree; no subclass, quantised or not.

    A layer with a `forward` of its own belongs to somebody: to accelerate, which brings its weights from elsewhere, or
    to a compiler. The same goes for everything below such a module. Latent attention's up-projection is left out too:
    the attention reads its weight, and makes sure that it has no `forward` of its own.
    """
    return [
        module
        for module in untouched_modules(model, set())
        if type(module) is nn.Linear and is_plain(module._parameters.get("weight"))
    ]


def is_plain(weight: torch.Tensor | None) -> bool:
    """Whether a weight is values in memory, and nothing that only looks like a tensor."""
    return (
        type(weight) in (nn.Parameter, torch.Tensor)
        and weight.is_cpu  # type: ignore[union-attr]
        and weight.layout is torch.strided  # type: ignore[union-attr]
        and weight.dtype in DTYPES  # type: ignore[union-attr]
        and weight.numel() > 0  # type: ignore[union-attr]
    )


def untouched_modules(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """A module and those below it, but for `seen` ones, and those with a `forward` of their own and all below them."""
    if id(module) in seen or "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return
    seen.add(id(module))
    yield module
    for name, child in module._modules.items():
        if child is not None and name != UP_PROJECTION:
            yield from untouched_modules(child, seen)
