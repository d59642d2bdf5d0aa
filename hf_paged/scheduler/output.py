"""What crosses from the scheduler to the model runner, once a step."""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged.cache.allocator import BlockCopy
from hf_paged.request import Sequence


@dataclass(frozen=True)
class ScheduledSequence:
    """`num_new_tokens` tokens of a sequence, from its `num_computed_tokens` on. Its tables reach that far.

    The last `num_draft_tokens` of them are guesses, to be checked by the logits of the token before each.
    """

    sequence: Sequence
    num_new_tokens: int
    num_draft_tokens: int = 0

    @property
    def is_last_chunk(self) -> bool:
        """Whether every known token is computed after this step, so that its logits choose the next one."""
        return self.num_new_tokens - self.num_draft_tokens == self.sequence.num_uncomputed_tokens


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. `copies[g]` are group g's block copies, to be done before anything is written."""

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[BlockCopy, ...], ...]
    num_tokens: int
