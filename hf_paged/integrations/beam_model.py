"""What stock's beam loop takes for its model and its cache, so that it runs on an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as stopping

from hf_paged.engine.external import ExternalRows
from hf_paged.engine.grammar_processor import GrammarProcessor
from hf_paged.engine.params import eos_ids
from hf_paged.integrations.decoding import HISTORY_PROCESSORS, Batch

# Processors that never forbid more tokens than the end-of-sequence ones.
_MILD_PROCESSORS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.LogitNormalization,
)

# Processors that may raise at tokens which they would never have let a row have.
_STRICT_PROCESSORS = (logits_process.PrefixConstrainedLogitsProcessor, GrammarProcessor)

# Stock scores what can't be chosen, and beams that aren't there yet, with -1e9.
_REAL_SCORE = -1e8


Wait = Callable[[ExternalRows, Sequence[int]], None]


@dataclass
class Parents:
    """What stock's loop takes for its cache: the rows that rows go on from, `[B * num_beams]`, of the last round."""

    beam_idx: torch.Tensor | None = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from row `beam_idx[i]`."""
        self.beam_idx = beam_idx


@dataclass
class _Output:
    logits: torch.Tensor  # [B * num_beams, 1, vocab]


class BeamModel:
    """What stock's loop takes for its model: it computes on the engine, and is the model in everything else.

    A prompt whose search has settled is not computed any more, where nobody can see the difference. Stock goes on with
    it until the last prompt has settled, but whatever its beams become then, no score of theirs can be chosen: stock
    adds -1e9 to it.

    Args:
        model: the real one.
        rows: the beams, `[B * num_beams]`.
        cache: what the loop was given for its cache.
        batch: what `_beam_search` was called with.
        make_room: called with the number of new tokens before rows get that many.
        wait: called with the rows, and those of them whose logits are asked for next; returns when they are there.
    """

    def __init__(
        self,
        model: Any,
        rows: ExternalRows,
        cache: Parents,
        batch: Batch,
        make_room: Callable[[int], None],
        wait: Wait | None = None,
    ) -> None:
        self._model = model
        self._rows = rows
        self._cache = cache
        self._beams: int = batch.config.num_beams
        self._num_rows, self._prompt_width = batch.input_ids.shape
        self._num_embedded = 0 if batch.embeds is None else batch.embeds.shape[1]
        self.width = self._num_embedded + self._prompt_width  # tokens a row that are computed, padding included
        self._device = batch.input_ids.device
        self._active = list(range(self._num_rows))
        self._make_room = make_room
        self._wait = wait
        self._rounds_left = batch.max_new_tokens
        self._drops_settled = are_independent(batch)
        self._drops_full = self._drops_settled and _can_drop_full(batch)
        self._beam_scores: torch.Tensor | None = None  # [B, num_beams], of the finished ones, best first
        self._is_finished: torch.Tensor | None = None  # [B, num_beams] bool
        self._can_improve: torch.Tensor | None = None  # [B, 1] bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    # -- what the loop calls to compute -------------------------------------------------------------------------------

    def _prefill(self, *args: Any, **kwargs: Any) -> _Output:
        return self._logits()

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        """All tokens `[B * num_beams, L + t]`; the engine knows which of them are new."""
        return {"input_ids": input_ids}

    def __call__(self, input_ids: torch.Tensor, return_dict: bool = True) -> _Output:
        """One round: the rows go on from their parents by the tokens that were chosen."""
        self._go_on(input_ids)
        self.width = self._num_embedded + input_ids.shape[1]
        return self._logits()

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        return model_kwargs

    # -- what the loop calls to decide, watched -----------------------------------------------------------------------

    def _update_finished_beams(self, *args: Any, **kwargs: Any) -> Any:
        result = self._model._update_finished_beams(*args, **kwargs)
        _, self._beam_scores, _, self._is_finished = result
        return result

    def _check_early_stop_heuristic(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._can_improve = self._model._check_early_stop_heuristic(*args, **kwargs)
        return self._can_improve

    # -- the rows -----------------------------------------------------------------------------------------------------

    def _go_on(self, sequences: torch.Tensor) -> None:
        # sequences [B * num_beams, L + t], the token that was just chosen last
        assert self._cache.beam_idx is not None
        settled = self._settled().repeat_interleave(self._beams)
        chosen = torch.stack([self._cache.beam_idx.long(), sequences[:, -1], settled.long()])
        parents, tokens, is_settled = chosen.tolist()  # host: the round's choice, once for all rows
        self._rows.finish([row for row in self._active if is_settled[row]])
        self._active = [row for row in self._active if not is_settled[row]]
        self._make_room(sequences.shape[1] - self._prompt_width)
        self._rows.reorder(self._active, [parents[row] for row in self._active])
        self._rows.append(self._active, [tokens[row] for row in self._active])

    def _settled(self) -> torch.Tensor:
        # [B] bool: prompts with num_beams finished beams, of which none can be replaced any more
        assert self._can_improve is not None
        if self._drops_full:
            return self._full()
        return self._full() & ~self._can_improve[:, 0] & self._drops_settled

    def _full(self) -> torch.Tensor:
        # [B] bool: prompts that have num_beams finished beams
        assert self._beam_scores is not None
        assert self._is_finished is not None
        return (self._is_finished & (self._beam_scores > _REAL_SCORE)).all(dim=-1)

    def is_decided(self) -> bool:
        """Whether, after the last round, no prompt would have gone on for another one's sake and changed."""
        return self._rounds_left == 0 or bool(self._full().all())

    def _logits(self) -> _Output:
        self._rounds_left -= 1
        if self._wait is not None:
            self._wait(self._rows, self._active)
        logits = torch.stack(self._rows.logits(self._active)).to(self._device)
        if len(self._active) < self._num_rows:
            full = logits.new_zeros(self._num_rows, logits.shape[1])
            full[self._active] = logits
            logits = full
        return _Output(logits[:, None])


def are_independent(batch: Batch) -> bool:
    """Whether nobody sees what becomes of a prompt's beams once it has settled, and no other prompt depends on them."""
    # Who asked for more than tokens gets the rows' scores and cache. A processor of unknown class may look from one row
    # at another. Settled rows go on in the books, with tokens that mean nothing, at which some might raise. Where all
    # continuations of a prompt can stop at once, stock ends when those of all prompts have; with (number of
    # end-of-sequence ids + 1) * num_beams continuations, those ids alone never stop them all.
    ends = eos_ids(batch.config)
    return (
        not batch.config.return_dict_in_generate
        and all(type(processor) in HISTORY_PROCESSORS for processor in batch.processors)
        and not any(isinstance(processor, _STRICT_PROCESSORS) for processor in batch.processors)
        and all(_is_length_or_end(criterion, ends) for criterion in batch.criteria)
    )


def _is_length_or_end(criterion: Any, ends: frozenset[int]) -> bool:
    if type(criterion) is stopping.EosTokenCriteria:
        return set(criterion.eos_token_id.tolist()) <= ends  # host: once a call
    return type(criterion) is stopping.MaxLengthCriteria


def _can_drop_full(batch: Batch) -> bool:
    # With early_stopping=True a prompt that has its beams takes no more, but stock still asks whether they could be
    # improved, and ends when no prompt could be. That never decides as long as each prompt that isn't full has a beam
    # with a real score to run.
    return (
        batch.config.early_stopping is True
        and not batch.config.do_sample
        and batch.config.length_penalty >= 0
        and all(type(processor) in _MILD_PROCESSORS for processor in batch.processors)
    )
