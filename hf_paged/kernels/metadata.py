"""What an attention kernel is told about one packed step, and the thread-local scope that carries it.

packed batch of three sequences: a prefill chunk of 3 tokens, a decode, a decode

  token            0   1   2   3   4
  sequence         a   a   a   b   c
  query_start_loc  0           3   4   5
  seq_lens         7 (4 cached + 3 new), 12, 1        keys each sequence attends to after this step
  slot_mapping     where token t's K and V go: block id * block_size + offset
  block_table      row per sequence, logical block -> physical block; blocks freed behind a window read 0 and are
                   never needed
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from hf_paged.kernels.gathered import GatheredStep


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One packed step, as one layer group sees it. S sequences, T new tokens.

    The tensors are on the device of the cache. `query_lens` and `kv_lens` are the same lengths on the host, so that
    launch decisions never wait for the device.
    """

    query_start_loc: torch.Tensor  # [S + 1] int32
    seq_lens: torch.Tensor  # [S] int32
    block_table: torch.Tensor  # [S, max_blocks] int32
    slot_mapping: torch.Tensor  # [T] int64
    block_size: int
    query_lens: tuple[int, ...]  # new tokens of each sequence, sums to T
    kv_lens: tuple[int, ...]  # seq_lens on the host
    plans: dict[Any, Any] = field(default_factory=dict)  # what a backend derives once a step, by its own key

    def to(self, device: torch.device) -> AttentionMetadata:
        """The same step for layers on another device, with plans of its own."""
        return replace(
            self,
            query_start_loc=self.query_start_loc.to(device),
            seq_lens=self.seq_lens.to(device),
            block_table=self.block_table.to(device),
            slot_mapping=self.slot_mapping.to(device),
            plans={},
        )


@dataclass(frozen=True)
class AttentionParams:
    """What one attention call asks for, apart from the tensors."""

    scale: float
    window: int | None = None  # a query at position p sees keys p - window + 1 .. p
    chunk: int | None = None  # chunked attention: keys of the query's own chunk of this many positions
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap) before masking
    sinks: torch.Tensor | None = None  # [num_heads] extra logits that take part in the softmax and have no value


class PackedStep:
    """An open packed forward: the cache it writes to, its metadata, and which layers have updated and attended so far.

    Args:
        cache: the cache object that the forward was given; a tag of any other cache is refused.
        metadata: one AttentionMetadata a layer group.
        probe: set while a forward is only observed; attention then reports to it instead of computing.
    """

    def __init__(
        self, cache: object, metadata: Sequence[AttentionMetadata], probe: AttentionProbe | None = None
    ) -> None:
        self.cache = cache
        self.probe = probe
        self.updated: list[int] = []
        self.attended: list[int] = []
        self._metadata = {(group, item.slot_mapping.device): item for group, item in enumerate(metadata)}
        self._gathered: dict[tuple[int, torch.device], GatheredStep] = {}
        self._home = metadata[0].slot_mapping.device if metadata else torch.device("cpu")

    def metadata(self, group: int, device: torch.device) -> AttentionMetadata:
        """A group's metadata on the device of a layer; copied there once a step."""
        found = self._metadata.get((group, device))
        if found is None:
            found = self._metadata[group, device] = self._metadata[group, self._home].to(device)
        return found

    def gathered(self, group: int, device: torch.device) -> GatheredStep:
        """The same for layers whose K and V are handed out; made once a step."""
        found = self._gathered.get((group, device))
        if found is None:
            from hf_paged.kernels.gathered import GatheredStep

            found = self._gathered[group, device] = GatheredStep.of(self.metadata(group, device))
        return found


class AttentionProbe(Protocol):
    """Who watches the attention calls of a forward instead of computing them."""

    def saw_mask(self, mask: torch.Tensor, mask_function: Callable[..., torch.Tensor], local_size: int | None) -> None:
        """The model had this mask made."""

    def saw_attention(
        self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
    ) -> None:
        """The model attended to `key` and `value` under `mask`, with these keywords."""


class _Local(threading.local):
    step: PackedStep | None = None


# threading.local rather than a ContextVar: the latter breaks the graph of torch.compile once a layer.
_local = _Local()


def current_step() -> PackedStep | None:
    """The packed step that is open in this thread, or None outside of one."""
    return _local.step


@contextmanager
def packed_step(step: PackedStep) -> Iterator[PackedStep]:
    """Opens a packed step in this thread around a forward; the previous one is restored on exit, also on an error."""
    previous, _local.step = _local.step, step
    try:
        yield step
    finally:
        _local.step = previous
