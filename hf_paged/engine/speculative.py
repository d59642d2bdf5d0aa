"""Speculative decoding: tokens are guessed first, and checked by one forward of the model that was asked.

A check is a prefill chunk with other numbers. A sequence with k drafts schedules 1 + k tokens and gets logits for all:

tokens      ... known  last │ a  b  c          drafts, in `draft_token_ids` and not in `token_ids`
computed           yes   no │                  goes through the model: last a b c
logits                   ▲    ▲  ▲  ▲
chosen                   a    b  x  -          two drafts stand, and x is new: three tokens in one step
afterwards  ... known  last a  b │ x           `num_computed_tokens` is behind b; x's slot held c and is written again

What is chosen is what would have been chosen without drafts, so they change the time and never the tokens: greedy and
seeded draws are the same token for token, other draws are distributed the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from hf_paged.engine.batch import LogitsRows
from hf_paged.engine.draft_source import Assistant, DraftSource, PromptLookup
from hf_paged.engine.history import history_of
from hf_paged.engine.sampler import Choice, SamplerRow
from hf_paged.request import Request, Sequence

if TYPE_CHECKING:
    from hf_paged.engine.assistant import AssistantDrafter


def look_up(tokens: npt.NDArray[np.int64], num_tokens: int, max_ngram: int) -> list[int]:
    """Up to `num_tokens` tokens that followed the last ones where they stood first.

    The longest n-gram that stood before counts, as in stock's PromptLookupCandidateGenerator.

    Args:
        tokens: `[tokens]` of one sequence.
        num_tokens: most tokens to return.
        max_ngram: most of the last tokens that are looked for.
    """
    length = len(tokens)
    for size in range(min(max_ngram, length - 1), 0, -1):
        starts = length - size  # an n-gram that begins here has nothing behind it
        found = np.ones(starts, dtype=bool)
        for offset in range(size):
            found &= tokens[offset : offset + starts] == tokens[length - size + offset]
        if found.any():
            behind = int(found.argmax()) + size
            drafts: list[int] = tokens[behind : behind + num_tokens].tolist()  # host: a numpy array
            return drafts
    return []


def rows_of_check(span: LogitsRows) -> list[SamplerRow]:
    """The rows that choose a sequence's next token, and the one behind each of its scheduled drafts."""
    sequence, count = span.sequence, span.num_draft_tokens
    first = span.stop - 1 - count
    drafts, probs = sequence.draft_token_ids[:count], sequence.draft_probs
    rows = [
        SamplerRow(sequence, first + index, drafts[:index], drafts[index], None if probs is None else probs[index])
        for index in range(count)
    ]
    return [*rows, SamplerRow(sequence, first + count, drafts)]


@dataclass(frozen=True)
class Checked:
    """What a sequence gets from a step: `choices`, all but the last of which are drafts that stood."""

    sequence: Sequence
    choices: list[Choice]
    num_drafts: int


def checked(rows: SequenceOf[SamplerRow], choices: SequenceOf[Choice]) -> list[Checked]:
    """Walks along each sequence's rows up to the first choice that isn't the draft; drops what was chosen behind it."""
    found: list[Checked] = []
    index = 0
    while index < len(rows):
        sequence, start = rows[index].sequence, index
        while rows[index].draft_token_id is not None and _stands(rows[index], choices[index]):
            index += 1
        taken = list(choices[start : index + 1])
        while rows[index].draft_token_id is not None:  # dropped
            index += 1
        state = taken[-1].generator_state
        if state is not None:  # draws behind a wrong draft didn't happen
            sampling = sequence.request.sampling
            sampling.generators[sequence.index].set_state(state)
        found.append(Checked(sequence, taken, index - start))
        index += 1
    return found


def _stands(row: SamplerRow, choice: Choice) -> bool:
    return choice.error is None and choice.token_id == row.draft_token_id


class Speculator:
    """Gives drafts to the sequences of requests that asked for them.

    Args:
        make_drafter: makes what drafts with an assistant model.
        position_limit: most tokens that the checking model can hold; None for no limit.
    """

    def __init__(self, make_drafter: Callable[[PreTrainedModel], AssistantDrafter], position_limit: int | None) -> None:
        self._make_drafter = make_drafter
        self._position_limit = position_limit
        self._requests: set[str] = set()
        self._drafters: weakref.WeakKeyDictionary[torch.nn.Module, AssistantDrafter] = weakref.WeakKeyDictionary()
        self.num_checks = 0  # of a sequence with drafts, in one step
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def drafter(self, model: PreTrainedModel) -> AssistantDrafter:
        """What drafts with a model, made once.

        Raises:
            UnsupportedModelError: the assistant can't run packed.
        """
        if model not in self._drafters:
            self._drafters[model] = self._make_drafter(model)
        return self._drafters[model]

    def add(self, request: Request) -> None:
        """Takes a request that may ask for drafts."""
        if _source(request) is not None:
            self._requests.add(request.request_id)

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended."""
        sequence.draft_token_ids, sequence.draft_probs = [], None
        source = _source(sequence.request)
        if isinstance(source, Assistant) and source.model in self._drafters:
            self._drafters[source.model].forget(sequence)
        if sequence.request.is_finished:
            self._requests.discard(sequence.request.request_id)

    def propose(self, running: Iterable[Sequence]) -> None:
        """Gives drafts to each sequence whose next step is a decode, and that may get more than one token."""
        if not self._requests:
            return
        asked: dict[AssistantDrafter, list[tuple[Sequence, int]]] = {}
        for sequence in running:
            source = _source(sequence.request)
            if source is None or sequence.draft_token_ids or sequence.num_uncomputed_tokens != 1:
                continue
            if not sequence.num_generated_tokens or sequence.request.prompt_embeds is not None:
                continue  # an assistant has no use for another model's embeddings
            room = self._room(sequence)
            if room < 1:
                continue
            if isinstance(source, PromptLookup):
                tokens = history_of(sequence, torch.device("cpu"))[0, len(sequence.request.sampling.history_start) :]
                drafts = look_up(tokens.numpy(), min(source.num_tokens, room), source.max_ngram)  # host: on the CPU
                sequence.draft_token_ids = until_end(drafts, sequence)
            else:
                asked.setdefault(self.drafter(source.model), []).append((sequence, room))
        for drafter, sequences in asked.items():
            drafter.draft(sequences)

    def _room(self, sequence: Sequence) -> int:
        # the token behind the last draft is generated too, and isn't computed
        request = sequence.request
        room = request.max_new_tokens - sequence.num_generated_tokens - 1
        return room if self._position_limit is None else min(room, self._position_limit - sequence.num_tokens)

    def learn(self, result: Checked) -> None:
        """Counts a check, and lets the drafter adapt to it."""
        if not result.num_drafts:
            return
        accepted = len(result.choices) - 1
        self.num_checks += 1
        self.num_draft_tokens += result.num_drafts
        self.num_accepted_tokens += accepted
        source = _source(result.sequence.request)
        if isinstance(source, Assistant):
            self.drafter(source.model).learn(result.sequence, all_stood=accepted == result.num_drafts)


def until_end(drafts: list[int], sequence: Sequence) -> list[int]:
    """`drafts` up to the first that would end the sequence."""
    ends = sequence.request.sampling.eos_token_ids
    last = next((index for index, token in enumerate(drafts) if token in ends), len(drafts)) if ends else len(drafts)
    return drafts[: last + 1]


def _source(request: Request) -> DraftSource | None:
    source: DraftSource | None = getattr(request.sampling, "draft_source", None)
    return source
