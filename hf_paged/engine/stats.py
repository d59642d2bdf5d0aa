"""Counts what an engine did."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.request import Sequence


@dataclass
class EngineCounters:
    """Sums over the life of an engine."""

    num_steps: int = 0
    num_packed_tokens: int = 0
    num_fallbacks: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    _held_tokens: int = 0
    _held_slots: int = 0

    def count_step(self, num_tokens: int, running: SequenceOf[Sequence], allocator: BlockAllocator) -> None:
        """Counts a step, and how full the blocks of the first group are after it."""
        self.num_steps += 1
        self.num_packed_tokens += num_tokens
        size = allocator.block_size
        # Only the slots after a sequence's last token are empty: blocks are shared when they are full, or right after
        # a fork, when each fork still points at the same partly filled one.
        tails = {
            sequence.block_tables[0].blocks[-1]: len(sequence.block_tables[0]) * size - sequence.num_computed_tokens
            for sequence in running
            if sequence.block_tables and len(sequence.block_tables[0])
        }
        slots = allocator.pools[0].num_referenced * size
        self._held_slots += slots
        self._held_tokens += slots - sum(tails.values())

    @property
    def token_occupancy(self) -> float:
        """Slots that held tokens per slot allocated, over all steps; 0 before the first."""
        return self._held_tokens / self._held_slots if self._held_slots else 0.0
