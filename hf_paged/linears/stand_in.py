"""Something that stands in for the `forward` of a module while a packed forward runs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


class StandIn(Generic[M]):
    """What is common to them; a subclass is called as the module's `forward`. It doesn't hold the module.

    Args:
        module: of exactly the class that it has now; if it gets another one, nothing stands in for it.
    """

    def __init__(self, module: M) -> None:
        self._module = weakref.ref(module)
        self.stock = type(module).forward
        self.kind = type(module)

    @property
    def module(self) -> M | None:
        """The module, while it lives."""
        return self._module()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # a model that another thread copies or pickles at this moment has its own forward in the copy
        return functools.partial, (self.stock, self.module)


@contextmanager
def standing_in(stand_ins: Sequence[StandIn[Any]]) -> Iterator[None]:
    """Each in its module's place inside, the modules as they were outside, also after an exception.

    A module that has a `forward` of its own by now belongs to somebody, and is left alone.
    """
    namespaces = []
    try:
        for stand_in in stand_ins:
            module = stand_in.module
            if type(module) is stand_in.kind and "forward" not in (namespace := module.__dict__):
                namespace["forward"] = stand_in
                namespaces.append((namespace, stand_in))
        yield
    finally:
        for namespace, stand_in in namespaces:
            if namespace.get("forward") is stand_in:
                del namespace["forward"]
