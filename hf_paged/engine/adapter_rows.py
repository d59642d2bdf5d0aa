"""Which tokens of a packed step belong to which adapter.

packed tokens     a a a b c c        R logits rows   a b c
adapters          x x x y x x                        x y x
of x              [0 1 2 4 5]                        [0 2]
of y              slice 3:4                          slice 1:2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_paged.errors import PackedStepError
from hf_paged.scheduler.output import ScheduledSequence

if TYPE_CHECKING:
    from hf_paged.engine.batch import LogitsRows

BASE = "__base__"  # PEFT's word for a row without any adapter


class Rows:
    """Some rows of a packed tensor `[N, ...]`."""

    def __init__(self, positions: slice | torch.Tensor) -> None:
        self._positions = positions

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """These rows of `x`, `[n, ...]`."""
        positions = self._positions
        return x[positions] if isinstance(positions, slice) else x.index_select(0, positions.to(x.device))

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> None:
        """Adds `delta` `[n, ...]` to these rows of `x`, in place."""
        positions = self._positions
        if isinstance(positions, slice):
            x[positions] += delta.to(x.dtype)
        else:
            x.index_add_(0, positions.to(x.device), delta.to(x.dtype))


Parts = list[tuple[str | None, Rows]]


class AdapterRows:
    """The rows of each adapter, for inputs of all tokens and for those of the logits' rows alone.

    An adapter of None is whatever the model's active adapters are.

    Args:
        parts: number of rows to who owns them.
    """

    def __init__(self, parts: dict[int, Parts]) -> None:
        self._parts = parts
        self.named = {adapter for part in parts.values() for adapter, _ in part if adapter not in (None, BASE)}

    @classmethod
    def of(
        cls, scheduled: Sequence[ScheduledSequence], rows: Sequence[LogitsRows], num_rows: int, device: torch.device
    ) -> AdapterRows | None:
        """Those of a step; None if no request names an adapter.

        Args:
            scheduled: the packed sequences, in order.
            rows: what the logits' rows are.
            num_rows: of the logits; a step of middle chunks has one that nobody reads.
            device: where indices go.
        """
        owners = [item.sequence.request.adapter for item in scheduled]
        if all(owner is None for owner in owners):
            return None
        tokens = _parts(owners, [item.num_new_tokens for item in scheduled], device)
        readers = [row.sequence.request.adapter for row in rows] or owners[-1:]
        logits = _parts(readers, [row.stop - row.start for row in rows] or [num_rows], device)
        num_tokens = sum(item.num_new_tokens for item in scheduled)
        return cls({num_rows: logits, num_tokens: tokens})

    def parts(self, shape: torch.Size, num_axes: int) -> Parts:
        """The rows of each adapter in a packed input.

        Args:
            shape: `[B, N, ...]`, with the B * N rows in their order.
            num_axes: how many the layer's inputs have where a model keeps its rows apart.

        Raises:
            PackedStepError: B * N is neither the tokens nor the logits' rows of the step, or has other axes.
        """
        parts = self._parts.get(shape[0] * shape[1]) if len(shape) == num_axes else None
        if parts is None:
            raise PackedStepError(
                f"A layer with adapters was given {tuple(shape)} in a packed step, from which it can't be told whose "
                "row is whose; run requests of one adapter each."
            )
        return parts


def _parts(owners: Sequence[str | None], lens: Sequence[int], device: torch.device) -> Parts:
    starts = np.concatenate(([0], np.cumsum(lens)))
    parts: Parts = []
    for adapter in dict.fromkeys(owners):
        mine = [index for index, owner in enumerate(owners) if owner == adapter]
        if mine[-1] - mine[0] + 1 == len(mine):
            parts.append((adapter, Rows(slice(int(starts[mine[0]]), int(starts[mine[-1] + 1])))))
        else:
            positions = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in mine])
            parts.append((adapter, Rows(torch.from_numpy(positions).to(device, non_blocking=True))))
    return parts
