"""Steps of models with recurrent states: one row a sequence, and rows of one length in a forward.

scheduled          a: 5 tokens, its first      b, c: one token each      d: 3 tokens, its second chunk
forwards           [1, 5] from no state        [2, 1]                    [1, 3]

Nothing is padded: a recurrence would take padding for tokens. A scan that can't start from a state (jamba, mamba) is
known from the model's check against itself; such a model computes a prompt's earlier chunks again with each later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import cast

from hf_paged.engine.batch import LogitsRows
from hf_paged.request import Sequence
from hf_paged.scheduler.output import ScheduledSequence, SchedulerOutput


@dataclass(frozen=True)
class RowsPart:
    """Sequences of a step that run in one forward: all get as many tokens, and all or none have a state."""

    output: SchedulerOutput
    is_first: bool


def equal_rows(output: SchedulerOutput, *, prefills_whole: bool) -> Iterator[RowsPart]:
    """The forwards of a step, in the order in which their first sequences were scheduled.

    Args:
        output: the step.
        prefills_whole: several tokens at once can only be computed from a sequence's first one on.
    """
    parts: dict[tuple[int, bool], list[ScheduledSequence]] = {}
    for item in output.scheduled:
        if prefills_whole and item.num_new_tokens > 1 and item.sequence.num_computed_tokens:
            item = _from_start(item)  # noqa: PLW2901
        parts.setdefault((item.num_new_tokens, item.sequence.num_computed_tokens == 0), []).append(item)
    for (num_tokens, is_first), items in parts.items():
        yield RowsPart(SchedulerOutput(tuple(items), (), num_tokens * len(items)), is_first)


class _FromStart:
    """A sequence as if none of its tokens had been computed; its tables reach as far as they do."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.request = sequence.request
        self.token_ids = sequence.token_ids
        self.draft_token_ids = sequence.draft_token_ids
        self.block_tables = sequence.block_tables
        self.num_computed_tokens = 0
        self.num_uncomputed_tokens = sequence.num_tokens


def _from_start(item: ScheduledSequence) -> ScheduledSequence:
    num_tokens = item.sequence.num_computed_tokens + item.num_new_tokens
    return ScheduledSequence(cast("Sequence", _FromStart(item.sequence)), num_tokens)


def state_rows(scheduled: SequenceOf[ScheduledSequence], group: int) -> list[int]:
    """The state row of each scheduled sequence: its only block of the state group."""
    return [item.sequence.block_tables[group].blocks[0] for item in scheduled]


def joined(parts: SequenceOf[tuple[LogitsRows, ...]], lengths: SequenceOf[int]) -> tuple[LogitsRows, ...]:
    """What the rows of the forwards' logits are, one after the other.

    Args:
        parts: what they are in each forward.
        lengths: rows of each forward.
    """
    rows, start = [], 0
    for part, length in zip(parts, lengths, strict=True):
        for row in part:
            sequence = row.sequence.sequence if isinstance(row.sequence, _FromStart) else row.sequence
            rows.append(replace(row, sequence=sequence, start=row.start + start, stop=row.stop + start))
        start += length
    return tuple(rows)
