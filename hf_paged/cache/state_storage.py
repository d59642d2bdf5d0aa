"""The tensors that hold recurrent states: one row a sequence, however long it is.

    layer 3, "conv" 0          [num_rows, channels, kernel]
    layer 3, "recurrent" 0     [num_rows, heads, head_dim, state]      row r of each belongs to one sequence

A row is a block of the state group: the block pool counts who holds it, and a fork that writes gets a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_paged.errors import PoolMemoryError


class StateKey(NamedTuple):
    """Which state of a model: a layer may have several of each kind."""

    layer_idx: int
    kind: str  # "conv" or "recurrent"
    number: int


@dataclass(frozen=True)
class StateSpec:
    """Shape of one sequence's state, its type and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, state: torch.Tensor) -> StateSpec:
        """The spec of a state `[B, ...]` as a forward left it."""
        return cls(tuple(state.shape[1:]), state.dtype, state.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return math.prod(self.shape) * self.dtype.itemsize


class StateStorage:
    """All rows of one state."""

    def __init__(self, spec: StateSpec, num_rows: int) -> None:
        self.spec = spec
        self.rows = self._allocate(num_rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows.nbytes

    def _allocate(self, num_rows: int) -> torch.Tensor:
        spec = self.spec
        try:
            with torch.inference_mode(False):  # it is written to later under no_grad
                return torch.empty((num_rows, *spec.shape), dtype=spec.dtype, device=spec.device)
        except (RuntimeError, MemoryError) as error:
            raise PoolMemoryError(
                f"A recurrent state needs {num_rows * spec.num_bytes / 2**20:.0f} MiB for {num_rows} sequences on "
                f"{spec.device}, which can't be allocated; lower PagedConfig.max_requests_per_batch or num_blocks."
            ) from error

    def grow(self, num_rows: int) -> None:
        """Makes room for `num_rows` in all, keeping the content of those there are."""
        if num_rows > len(self.rows):
            old, self.rows = self.rows, self._allocate(num_rows)
            with torch.no_grad():
                self.rows[: len(old)].copy_(old)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """A copy of some rows: `[B]` int64 -> `[B, ...]`."""
        return self.rows.index_select(0, rows.to(self.rows.device))

    def write(self, rows: torch.Tensor, state: torch.Tensor) -> None:
        """Stores a state `[B, ...]` into rows `[B]`."""
        self.rows.index_copy_(0, rows.to(self.rows.device), state)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole rows, `(source, destination)` each; no destination is a source or occurs twice."""
        pairs = torch.tensor(list(copies), dtype=torch.int64, device=self.rows.device)
        self.rows.index_copy_(0, pairs[:, 1], self.rows.index_select(0, pairs[:, 0]))
