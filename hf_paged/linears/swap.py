"""Puts the native product under a model's linear layers for the length of a packed forward."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hf_paged.errors import ConfigError
from hf_paged.linears.eligible import eligible_linears
from hf_paged.linears.forward import NativeForward, Scope
from hf_paged.linears.joining import Joined, Watch
from hf_paged.linears.native import NativeProduct
from hf_paged.linears.stand_in import standing_in

_logger = logging.getLogger(__name__)

# Weights that fit the caches gain nothing, and a kernel of our own is one more thing to build and load.
LEAST_BYTES = 4 << 20


class LinearSwap:
    """The linear layers of one model that may run natively. It holds neither the model nor its weights.

    Nothing of the model differs outside of `installed`: no weight is copied, packed or moved.

    Args:
        backend: "native" for all rows, "torch" for none, "auto" for as many as are measured to be faster, if the model
            is large enough and linear.c and gemm.c can be built.

    Raises:
        ConfigError: "native", and linear.c or gemm.c can't be built or loaded here.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._scope: Scope | None = None
        self._forwards: list[NativeForward] = []
        self._groups: list[Joined] = []
        self._is_watched = False
        if backend == "native":
            try:
                self._scope = Scope(NativeProduct(most_few_rows=None), is_forced=True)
            except ConfigError as error:
                raise ConfigError(
                    f"The linear backend 'native' can't run here: {error}; choose linear_backend='auto' or 'torch'."
                ) from error

    @property
    def num_products(self) -> int:
        """Layers that were computed natively so far, one each time."""
        return self._scope.num_products if self._scope is not None else 0

    @property
    def product(self) -> NativeProduct | None:
        """What computes them; None if nothing is native."""
        return self._scope.product if self._scope is not None else None

    @property
    def forwards(self) -> Sequence[NativeForward]:
        """What stands in for each of the layers."""
        return self._forwards

    @property
    def groups(self) -> list[int]:
        """How many layers each group has that is computed in one call."""
        return [len(group.members) for group in self._groups]

    def look(self, model: nn.Module) -> None:
        """Finds the model's linear layers again: adapters, quantisation and new heads change which there are.

        Hold the model's lock.
        """
        found = eligible_linears(model) if self._backend != "torch" else []
        if self._backend == "auto" and sum(linear.weight.nbytes for linear in found) < LEAST_BYTES:
            found = []
        if [forward.module for forward in self._forwards] == found:
            return
        self._forwards, self._groups, self._is_watched = [], [], False
        scope = self._make_scope() if found else None
        if scope is not None:
            self._forwards = [NativeForward(linear, scope) for linear in found]
            scope.forwards = self._forwards

    def _make_scope(self) -> Scope | None:
        if self._scope is None:
            try:
                self._scope = Scope(NativeProduct(), is_forced=False)
            except ConfigError as error:
                self._backend = "torch"
                _logger.info("Linear layers stay torch's: %s.", error)
        return self._scope

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The native product inside, the model as it was outside, also after an exception. Hold the model's lock."""
        scope = self._scope
        if scope is None or not self._forwards or is_watched_by_others():
            yield
            return
        before = scope.thread
        try:
            scope.thread, scope.num_threads = threading.get_ident(), torch.get_num_threads()
            if not self._is_watched:
                scope.watch = Watch()
            with standing_in(self._forwards):
                yield
            if scope.watch is not None:
                self._join(scope.watch.groups())
        finally:
            scope.thread, scope.watch = before, None
            self._settle()

    def _join(self, groups: list[Joined]) -> None:
        self._is_watched, self._groups = True, groups
        for group in groups:
            for member in group.members:
                member.joined = group

    def _settle(self) -> None:
        # parts that nobody took are dropped, and so are groups that turn out not to take the same tensor each time
        for group in self._groups:
            group.drop()
            if group.was_wasted:
                for member in group.members:
                    member.joined = None
        self._groups = [group for group in self._groups if not group.was_wasted]


def is_watched_by_others() -> bool:
    """Whether a mode of torch's looks at, or changes, the operations of this thread."""
    # a mode that looks at each operation, or changes it, is to see the operations that it knows
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return _get_current_dispatch_mode() is not None or any(type(mode) is not DeviceContext for mode in modes)
