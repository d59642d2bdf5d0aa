"""Beam search and beam sampling of `generate`, on an engine.

Stock's own loop keeps the books: scores, finished beams, penalties, draws. What it takes for its model and its cache
are the rows of an engine:

    stock's _beam_search                    here                         engine
      _prefill(prompts)                 ──▶ a request a prompt       ──▶ computed once, shared by its beams
      cache.reorder_cache(parents)      ──▶ noted
      self(sequences)                   ──▶ forks, drops, appends    ──▶ one packed step for all beams
    logits [B * num_beams, 1, vocab]    ◀──                          ◀──
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad as pad_columns
from transformers import LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as stopping

from hf_paged.compat import CACHE_KEYWORD
from hf_paged.engine.engine import PagedEngine
from hf_paged.engine.external import ExternalRows, external_sampling
from hf_paged.engine.params import eos_ids
from hf_paged.integrations.decoding import HISTORY_PROCESSORS, Batch
from hf_paged.request import Request

# Processors that never forbid more tokens than the end-of-sequence ones.
_MILD_PROCESSORS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.LogitNormalization,
)

# Stock scores what can't be chosen, and beams that aren't there yet, with -1e9.
_REAL_SCORE = -1e8

# New tokens that the pool is made for at first.
_HORIZON = 256

logger = logging.getLogger("hf_paged")


def search(original: Callable[..., Any], model: Any, engine: PagedEngine, batch: Batch) -> Any:
    """What stock's `_beam_search` would return.

    Args:
        original: stock's loop.
        model: the model that it was called on.
        engine: the model's.
        batch: what it was called with; rows `[B * num_beams, L]`, the beams of a prompt one after another.

    Raises:
        CapacityError: one beam alone is more than the pool can ever hold.
    """
    parts = _parts(engine, batch)
    if len(parts) > 1:
        results = []
        for part in parts:
            result, is_decided = _search(original, model, engine, part)
            if not is_decided:
                break
            results.append(result)
        else:
            return _joined(results, batch)
    return _search(original, model, engine, batch)[0]


def _search(original: Callable[..., Any], model: Any, engine: PagedEngine, batch: Batch) -> tuple[Any, bool]:
    # stock's result, and whether each prompt's is what it would be whatever other prompts there are
    beams = batch.config.num_beams
    prompts = batch.prompts()[::beams]
    requests = [
        Request(
            f"generate-{uuid.uuid4().hex}",
            prompt,
            batch.max_new_tokens,
            num_sequences=beams,
            sampling=external_sampling(),
        )
        for prompt in prompts
    ]

    def reserve(num_new_tokens: int) -> None:
        engine.reserve(_blocks(engine, prompts, beams, min(num_new_tokens, batch.max_new_tokens)))

    reserve(_HORIZON)
    with ExternalRows(engine, requests) as rows:
        cache = _Parents()
        driven = _DrivenModel(model, rows, cache, batch, reserve)
        result = original(
            driven,
            batch.input_ids,
            logits_processor=batch.processors,
            stopping_criteria=batch.criteria,
            generation_config=batch.config,
            use_cache=True,
            **{CACHE_KEYWORD: cache},
        )
        if batch.config.return_dict_in_generate:
            result = _with_cache(result, rows, cache)
        return result, driven.is_decided()


def _parts(engine: PagedEngine, batch: Batch) -> list[Batch]:
    # as many prompts at a time as fit with all their beams, where a prompt's result doesn't depend on the others'
    beams = batch.config.num_beams
    prompts = batch.prompts()[::beams]
    room = engine.room()
    if batch.config.do_sample or not _are_independent(batch):
        return [batch]
    bounds, held = [0], 0
    for index, prompt in enumerate(prompts):
        needed = _blocks(engine, [prompt], beams, batch.max_new_tokens)
        if held and held + needed > room:
            bounds.append(index)
            held = 0
        held += needed
    bounds.append(len(prompts))
    if len(bounds) == 2:
        return [batch]
    return [_part(batch, start * beams, stop * beams) for start, stop in itertools.pairwise(bounds)]


def _part(batch: Batch, start: int, stop: int) -> Batch:
    return dataclasses.replace(
        batch,
        input_ids=batch.input_ids[start:stop],
        attention_mask=None if batch.attention_mask is None else batch.attention_mask[start:stop],
        processors=LogitsProcessorList(_for_rows(processor, start, stop) for processor in batch.processors),
    )


def _for_rows(processor: Any, start: int, stop: int) -> Any:
    # from 5.24 on the repetition penalty holds one padding length a row
    lengths = getattr(processor, "prompt_ignore_length", None)
    if isinstance(lengths, torch.Tensor) and lengths.numel() > 1:
        return logits_process.RepetitionPenaltyLogitsProcessor(
            processor.penalty, prompt_ignore_length=lengths[start:stop]
        )
    return processor


def _joined(results: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    # [B * num_return_sequences, L + longest], filled behind shorter ones with what stock fills with
    pad, ends = batch.config._pad_token_tensor, batch.config._eos_token_tensor
    fill = -1 if ends is None else int(pad or ends[0])
    width = max(result.shape[1] for result in results)
    return torch.cat([pad_columns(result, (0, width - result.shape[1]), value=fill) for result in results])


def _blocks(engine: PagedEngine, prompts: list[list[int]], beams: int, num_new_tokens: int) -> int:
    # the most that beams can hold: full blocks of the prompt once, the rest each its own
    size, needed = engine.config.block_size, 0
    for prompt in prompts:
        shared = len(prompt) // size
        needed += shared + beams * (-(-(len(prompt) + num_new_tokens - 1) // size) - shared)
    return needed


def _with_cache(result: Any, rows: ExternalRows, cache: _Parents) -> Any:
    # as stock returns it: one row a beam, in the order of the next round
    if cache.beam_idx is not None:
        rows.reorder(range(len(cache.beam_idx)), cache.beam_idx.tolist())
    copied = rows.copy()
    if copied is None:
        logger.warning("A beam was preempted, so this call returns no cache; give the cache_config more num_blocks.")
    return type(result)(**{**result, CACHE_KEYWORD: copied})


@dataclass
class _Parents:
    """What stock's loop takes for its cache: the rows that rows go on from, `[B * num_beams]`, of the last round."""

    beam_idx: torch.Tensor | None = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.beam_idx = beam_idx


@dataclass
class _Output:
    logits: torch.Tensor  # [B * num_beams, 1, vocab]


class _DrivenModel:
    """What stock's loop takes for its model: it computes on the engine, and is the model in everything else.

    A prompt whose search has settled is not computed any more, where nobody can see the difference. Stock goes on with
    it until the last prompt has settled, but whatever its beams become then, no score of theirs can be chosen: stock
    adds -1e9 to it.
    """

    def __init__(
        self, model: Any, rows: ExternalRows, cache: _Parents, batch: Batch, reserve: Callable[[int], None]
    ) -> None:
        self._model = model
        self._rows = rows
        self._cache = cache
        self._beams: int = batch.config.num_beams
        self._num_rows, self._prompt_width = batch.input_ids.shape
        self._device = batch.input_ids.device
        self._active = list(range(self._num_rows))
        self._reserve = reserve
        self._horizon = _HORIZON
        self._rounds_left = batch.max_new_tokens
        self._drops_settled = _are_independent(batch)
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
        return {"input_ids": input_ids}

    def __call__(self, input_ids: torch.Tensor, return_dict: bool = True) -> _Output:
        self._go_on(input_ids)
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
        if sequences.shape[1] - self._prompt_width >= self._horizon:
            self._horizon *= 2
            self._reserve(self._horizon)
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
        logits = torch.stack(self._rows.logits(self._active)).to(self._device)
        if len(self._active) < self._num_rows:
            full = logits.new_zeros(self._num_rows, logits.shape[1])
            full[self._active] = logits
            logits = full
        return _Output(logits[:, None])


def _are_independent(batch: Batch) -> bool:
    # Who asked for more than tokens gets the rows' scores and cache. A processor of unknown class may look from one row
    # at another. Where all continuations of a prompt can stop at once, stock ends when those of all prompts have; with
    # (number of end-of-sequence ids + 1) * num_beams continuations, those ids alone never stop them all.
    ends = eos_ids(batch.config)
    return (
        not batch.config.return_dict_in_generate
        and all(type(processor) in HISTORY_PROCESSORS for processor in batch.processors)
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
