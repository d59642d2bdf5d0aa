"""Drafts of an assistant model, for many sequences together: a small engine of its own beside the one that checks.

checking engine      a: 40 tokens          b: 7 tokens
assistant's mirror   a: 37 computed        b: new              same tokens, K and V of its own
  one step           a's last 3 and all of b's in one packed forward, logits of both, a draft for each
  further steps      one token each, until enough are drafted or the assistant is unsure
  after the check    tokens that were wrong are taken back: `num_computed_tokens` is set back, their slots written again
"""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from hf_paged.config import PagedConfig
from hf_paged.engine.core import EngineCore
from hf_paged.engine.draft_source import Assistant
from hf_paged.engine.params import SamplingParams
from hf_paged.engine.sampler import SamplerRow, process
from hf_paged.errors import PagedError, UnsupportedModelError
from hf_paged.request import Request, Sequence, SequenceState

logger = logging.getLogger("hf_paged")


@dataclass(eq=False)
class _Mirror:
    """A checked sequence as the assistant has it. The first `num_settled` tokens are the checked sequence's own."""

    sequence: Sequence
    num_settled: int
    num_tokens: int  # most to draft at once


@dataclass(eq=False)
class _Draft:
    """What was drafted for a sequence in this round."""

    checked: Sequence
    mirror: _Mirror
    most: int
    token_ids: list[int] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    generator: torch.Generator | None = None
    is_done: bool = False


class AssistantDrafter:
    """Drafts with one assistant model for the sequences of one engine.

    Args:
        model: the assistant; not held.
        config: the checking engine's. The assistant's pool is sized by what it drafts for.
        device: where drafts are checked.

    Raises:
        UnsupportedModelError: the assistant can't run packed.
    """

    def __init__(self, model: PreTrainedModel, config: PagedConfig, device: torch.device) -> None:
        reference = weakref.ref(model)

        def get_model() -> PreTrainedModel:
            alive = reference()
            if alive is None:
                raise UnsupportedModelError("The assistant model is gone.")
            return alive

        self._core = EngineCore(get_model, config.with_options(num_blocks=None))
        if not self._core.can_take_back:
            raise UnsupportedModelError(f"{type(model).__name__} has recurrent states, which can't be taken back.")
        self._device = device
        self._mirrors: dict[Sequence, _Mirror] = {}
        self._failed: set[Sequence] = set()  # they go on without drafts

    def draft(self, asked: SequenceOf[tuple[Sequence, int]]) -> None:
        """Sets the drafts of sequences, none where the assistant has nothing to say.

        Args:
            asked: each with the most tokens that it can use.
        """
        asked = [(sequence, room) for sequence, room in asked if sequence not in self._failed]
        try:
            if any(sequence not in self._mirrors for sequence, _ in asked):
                self._core.notice_weights()
            drafts = [draft for sequence, room in asked if (draft := self._begin(sequence, room)) is not None]
            self._reserve()
            self._rounds(drafts)
        except Exception as error:  # without drafts all goes on as before, a token a step
            for sequence, _ in asked:
                self._give_up(sequence, error)
            return
        for draft in drafts:
            draft.checked.draft_token_ids = draft.token_ids
            draft.checked.draft_probs = torch.stack(draft.probs) if draft.probs else None

    def learn(self, sequence: Sequence, *, all_stood: bool) -> None:
        """Adapts how many tokens are drafted for a sequence, as its assistant's schedule says."""
        source: Assistant = sequence.request.sampling.draft_source
        mirror = self._mirrors.get(sequence)
        if mirror is not None and source.schedule in ("heuristic", "heuristic_transient"):
            mirror.num_tokens = mirror.num_tokens + 2 if all_stood else max(1, mirror.num_tokens - 1)

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended: gives its blocks back."""
        self._failed.discard(sequence)
        mirror = self._mirrors.pop(sequence, None)
        if mirror is None:
            return
        source: Assistant = sequence.request.sampling.draft_source
        if source.schedule == "heuristic":  # stock leaves it for the next call, too
            source.model.generation_config.num_assistant_tokens = mirror.num_tokens
        self._core.abort(mirror.sequence.request)
        self._core.changed.clear()

    def check(self) -> None:
        """Proves the invariants of the assistant's pool."""
        self._core.check()

    # -- one round ------------------------------------------------------------------------------------------------

    def _begin(self, checked: Sequence, room: int) -> _Draft | None:
        sampling: SamplingParams = checked.request.sampling
        source: Assistant = sampling.draft_source  # type: ignore[assignment]
        mirror = self._mirrors.get(checked) or self._add(checked, source)
        limits = (self._core.position_limit, self._core.regimes.limit)
        most = min([mirror.num_tokens, room, *(limit - checked.num_tokens for limit in limits if limit is not None)])
        if most < 1:
            return None
        self._settle(mirror, checked)
        draft = _Draft(checked, mirror, most)
        generator = sampling.generator(checked.index, self._device) if sampling.do_sample else None
        if generator is not None:
            # The noise that the check will draw with: where both models agree, so do their draws. What is drawn doesn't
            # depend on the drafts then, nor on how many of them the other requests leave room for.
            draft.generator = torch.Generator(generator.device)
            draft.generator.set_state(generator.get_state())
        return draft

    def _add(self, checked: Sequence, source: Assistant) -> _Mirror:
        request = Request(
            f"draft-{uuid.uuid4().hex}",
            checked.token_ids,
            checked.request.max_new_tokens,
            priority=checked.request.priority,
            cache_salt=checked.request.cache_salt,
            sampling=SamplingParams(LogitsProcessorList(), (), frozenset(), False, (), is_external=True),
        )
        self._core.add(request)
        mirror = self._mirrors[checked] = _Mirror(request.sequences[0], checked.num_tokens, source.num_tokens)
        return mirror

    def _settle(self, mirror: _Mirror, checked: Sequence) -> None:
        # the mirror gets the checked tokens: what was drafted and stood is computed already
        sequence, settled = mirror.sequence, mirror.num_settled
        drafted, known = sequence.token_ids[settled:], checked.token_ids[settled:]
        same = next(
            (index for index, pair in enumerate(zip(drafted, known, strict=False)) if pair[0] != pair[1]),
            min(len(drafted), len(known)),
        )
        sequence.token_ids[settled:] = known
        # at least one is computed (again): its logits draft the next
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, settled + same, len(sequence.token_ids) - 1)
        sequence.num_revocable_tokens = 0
        sequence.next_logits = None
        mirror.num_settled = len(sequence.token_ids)
        if sequence.state is SequenceState.RUNNING:
            self._core.allocator.trim(sequence)
        self._wake(sequence)

    def _wake(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.IDLE:
            self._core.scheduler.add(sequence)

    def _reserve(self) -> None:
        # rows together, and one block each for the drafts of this round and the next
        allocator = self._core.allocator
        tokens = [mirror.sequence.num_tokens + mirror.num_tokens for mirror in self._mirrors.values()]
        needed = sum(allocator.blocks_for(count) + 1 for count in tokens)
        if needed > allocator.num_blocks:
            self._core.reserve(needed)

    def _rounds(self, active: list[_Draft]) -> None:
        while active:
            self._compute(active)
            active = [draft for draft in active if draft.mirror.sequence.next_logits is not None]
            if not active:
                return
            self._extend(active)
            active = [draft for draft in active if not draft.is_done]
            for draft in active:
                sequence = draft.mirror.sequence
                sequence.token_ids.append(draft.token_ids[-1])
                sequence.num_revocable_tokens += 1
                sequence.next_logits = None
                self._wake(sequence)

    def _compute(self, active: list[_Draft]) -> None:
        sequences = [draft.mirror.sequence for draft in active]
        while any(sequence.next_logits is None and not sequence.is_finished for sequence in sequences):
            if not self._core.step() and not any(sequence.is_finished for sequence in sequences):
                raise PagedError("The assistant's engine has nothing to run; its scheduler has a defect.")
        for draft in active:
            error = draft.mirror.sequence.request.error
            if error is not None:
                self._give_up(draft.checked, error)

    def _extend(self, active: list[_Draft]) -> None:
        """One more draft for each, from its `next_logits` through the processors of the request."""
        rows = [SamplerRow(draft.checked, index, draft.token_ids) for index, draft in enumerate(active)]
        logits = torch.stack([draft.mirror.sequence.next_logits for draft in active]).to(self._device)
        errors: dict[int, Exception] = {}
        probs = process(rows, logits, errors).softmax(dim=-1)
        is_fine = probs.isfinite().all(dim=-1)
        probs = torch.where(is_fine[:, None], probs, torch.ones_like(probs))
        tokens = probs.argmax(dim=-1)
        drawn = [index for index, draft in enumerate(active) if draft.checked.request.sampling.do_sample]
        if drawn:
            tokens[drawn] = _draw([active[index].generator for index in drawn], probs[drawn])
        chance = probs.gather(1, tokens[:, None]).squeeze(1)
        # wait: it takes a draft to compute the next one, and its chance to know whether there is one
        ids, chances, fine = tokens.tolist(), chance.tolist(), is_fine.tolist()  # wait: see above
        for index, draft in enumerate(active):
            if index in errors or not fine[index]:  # the check will meet it too, if it isn't the assistant's
                draft.is_done = True
                continue
            sampling: SamplingParams = draft.checked.request.sampling
            draft.token_ids.append(ids[index])
            if sampling.do_sample and draft.generator is None:
                draft.probs.append(probs[index])
            threshold = sampling.draft_source.confidence_threshold  # type: ignore[union-attr]
            draft.is_done = (
                len(draft.token_ids) >= draft.most or ids[index] in sampling.eos_token_ids or chances[index] < threshold
            )

    def _give_up(self, sequence: Sequence, error: BaseException) -> None:
        self.forget(sequence)
        self._failed.add(sequence)
        logger.warning(
            "An assistant model failed, so request %r goes on without drafts: %s: %s",
            sequence.request.request_id,
            type(error).__name__,
            error,
        )


def _draw(generators: list[torch.Generator | None], probs: torch.Tensor) -> torch.Tensor:
    if all(generator is None for generator in generators):
        return torch.multinomial(probs, 1).squeeze(1)
    return torch.cat(
        [torch.multinomial(row, 1, generator=generator) for row, generator in zip(probs, generators, strict=True)]
    )
