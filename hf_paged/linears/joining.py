"""Layers that take the same tensor one after the other, as q, k and v do, are computed in one call.

Which ones these are is watched in one forward, not read from names. The first of them computes all, the others find
their part:

    q_proj(x)  ->  [q | k | v] = x [Wq | Wk | Wv]^T, keeps k and v with x
    k_proj(x)  ->  x is the tensor that was kept, unchanged: k
    v_proj(x)  ->  v, and nothing is kept any more
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hf_paged.linears.forward import NativeForward


class Joined:
    """Layers that were seen to take one tensor, and what is kept of their last product.

    Args:
        members: in the order in which they are called.
    """

    def __init__(self, members: tuple[NativeForward, ...]) -> None:
        self.members = members
        self.was_wasted = False
        self._x: torch.Tensor | None = None
        self._version = -1
        self._parts: dict[NativeForward, torch.Tensor] = {}

    def take(self, member: NativeForward, x: torch.Tensor) -> torch.Tensor | None:
        """A member's part of the product with this very tensor, as it is now; None if there is none. Given once."""
        if self._x is not x or self._version != x._version:
            return None
        part = self._parts.pop(member, None)
        if not self._parts:
            self._x = None
        return part

    def keep(self, x: torch.Tensor, parts: dict[NativeForward, torch.Tensor]) -> None:
        """Keeps the other members' parts of a product. What nobody took of the last one was computed in vain."""
        self.drop()
        self._x, self._version, self._parts = x, x._version, parts

    def drop(self) -> None:
        """Forgets what is kept."""
        self.was_wasted = self.was_wasted or bool(self._parts)
        self._x, self._parts = None, {}


class Watch:
    """Finds in one forward which layers take the same tensor, unchanged, one directly after the other."""

    def __init__(self) -> None:
        self._x: torch.Tensor | None = None
        self._version = -1
        self._run: list[NativeForward] = []
        self._runs: list[tuple[NativeForward, ...]] = []

    def see(self, member: NativeForward, x: torch.Tensor) -> None:
        """Notes a call of a layer with `x`."""
        if x.is_inference():  # can't tell whether it was changed since
            self._end_run()
            return
        if self._x is not x or self._version != x._version:
            self._end_run()
            self._x, self._version = x, x._version
        self._run.append(member)

    def groups(self) -> list[Joined]:
        """The groups of two and more, each layer in one at most. Ends the watch."""
        self._end_run()
        found: list[Joined] = []
        taken: set[NativeForward] = set()
        for run in self._runs:
            # a layer that is called twice in a forward doesn't always have the same neighbours
            if len(set(run)) == len(run) > 1 and taken.isdisjoint(run):
                found.append(Joined(run))
            taken.update(run)
        return found

    def _end_run(self) -> None:
        if self._run:
            self._runs.append(tuple(self._run))
        self._x, self._run = None, []
