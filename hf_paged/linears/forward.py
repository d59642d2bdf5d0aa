"""What stands in for the `forward` of a linear layer while a packed forward runs."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from hf_paged.linears.crossover import SURE_ROWS, measured_limit
from hf_paged.linears.eligible import is_plain
from hf_paged.linears.joining import Joined, Watch
from hf_paged.linears.native import NativeProduct
from hf_paged.linears.stand_in import StandIn


class Scope:
    """What the stand-ins of one model share.

    Args:
        product: the native product.
        is_forced: use it for any number of rows, instead of up to the measured crossover.
    """

    def __init__(self, product: NativeProduct, *, is_forced: bool) -> None:
        self.product = product
        self.thread: int | None = None  # whose forward runs
        self.num_threads = 1
        self.watch: Watch | None = None
        self.forwards: list[NativeForward] = []  # all of the model
        self.num_products = 0  # layers computed natively, over the life of the scope
        self.is_forced = is_forced

    def weights_like(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """The weights of the model that have this one's shape and type, itself among them."""
        modules = (forward.module for forward in self.forwards)
        weights = (module._parameters["weight"] for module in modules if module is not None)
        alike = [w for w in weights if is_plain(w) and (w.shape, w.dtype) == (weight.shape, weight.dtype)]  # type: ignore[union-attr]
        return alike or [weight]  # type: ignore[return-value]


class NativeForward(StandIn[nn.Linear]):
    """Computes what `nn.Linear.forward` of a module does, natively where that is right and faster.

    It reads the module's weights at each call, keeps nothing of them, and does what torch does for other threads, with
    gradients, under autocast, and for anything but plain contiguous rows.
    """

    def __init__(self, module: nn.Linear, scope: Scope) -> None:
        super().__init__(module)
        self._scope = scope
        self.joined: Joined | None = None
        self._known: tuple[int, torch.dtype] | None = None  # id and type of the weight that was looked at last
        self._limit, self._limit_threads = SURE_ROWS, 0

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear.forward`: `[..., k]` to `[..., n]`."""
        module = self.module
        assert module is not None
        scope = self._scope
        if scope.thread != threading.get_ident():
            return nn.Linear.forward(module, input)
        joined = self.joined
        if joined is not None:
            part = joined.take(self, input)
            if part is not None:
                return part
        if not self._fits(module, input):
            return nn.Linear.forward(module, input)
        if scope.watch is not None:
            scope.watch.see(self, input)
        members: list[NativeForward] = [self]
        if joined is not None and not input.is_inference():
            others = [member for member in joined.members if member is not self]
            members += [member for member in others if (m := member.module) is not None and member._fits(m, input)]
        weights = [member._weights() for member in members]
        scope.num_products += len(members)
        own, *rest = scope.product(input, weights, scope.num_threads)
        if joined is not None and rest:
            joined.keep(input, dict(zip(members[1:], rest, strict=True)))
        return own

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        parameters: dict[str, Any] = self.module._parameters  # type: ignore[union-attr]
        return parameters["weight"], parameters["bias"]

    def count(self, num_products: int) -> None:
        """Notes products that were computed elsewhere with `native_weights` of this model."""
        self._scope.num_products += num_products

    def native_weights(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """W and b, if a product of so many float32 rows with them would run natively now; else None."""
        module = self.module
        if module is None:
            return None
        weight, bias = self._weights()
        if weight is None or weight.dtype is not torch.float32 or not self._takes_weights(module):
            return None
        return (weight, bias) if self._is_faster(num_rows, weight) else None

    def _fits(self, module: nn.Linear, x: torch.Tensor) -> bool:
        # every layer of every step comes through here: the cheap questions, each tensor's kind only when it is new
        if not self._takes_weights(module):
            return False
        weight: torch.Tensor = module._parameters["weight"]  # type: ignore[assignment]
        return (
            x.dtype is weight.dtype
            and type(x) in (torch.Tensor, nn.Parameter)
            and x.is_cpu
            and x.is_contiguous()
            and x.dim() > 0
            and x.shape[-1] == weight.shape[-1]
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and self._is_faster(x.numel() // x.shape[-1], weight)
        )

    def _takes_weights(self, module: nn.Linear) -> bool:
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        if weight is None or ((id(weight), weight.dtype) != self._known and not self._look(weight)):
            return False
        return (
            weight.is_cpu
            and weight.is_contiguous()
            and (bias is None or (is_plain(bias) and bias.dtype is weight.dtype and bias.is_contiguous()))
        )

    def _look(self, weight: torch.Tensor) -> bool:
        self._limit_threads = 0  # another shape or type has another crossover
        self._known = (id(weight), weight.dtype) if is_plain(weight) else None
        return self._known is not None

    def _is_faster(self, num_rows: int, weight: torch.Tensor) -> bool:
        scope = self._scope
        if num_rows <= SURE_ROWS or scope.is_forced:
            return True
        if self._limit_threads != scope.num_threads:
            self._limit = measured_limit(scope.weights_like(weight), scope.product, scope.num_threads)
            self._limit_threads = scope.num_threads
        return num_rows <= self._limit
