"""`generate` calls that give their request away instead of running it, so that a pipeline can run many together.

pipeline ─ forward ─▶ generate            stock prepares inputs, processors, criteria
                        └─▶ _sample ─▶ run_or_defer ─┬─▶ decode           nobody defers, or this call can't be
             input_ids, unchanged ◀──────────────────┘   Deferral.taken   its request, to be run with others
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor

from hf_paged.engine.draft_source import DraftSource
from hf_paged.engine.engine import PagedEngine
from hf_paged.engine.grammar_processor import GrammarProcessor
from hf_paged.engine.params import SamplingParams, eos_ids, shared_key
from hf_paged.errors import CapacityError, PagedError, RequestError
from hf_paged.integrations.beam_calls import BeamCall
from hf_paged.integrations.decoding import _ROW_CRITERIA, HISTORY_PROCESSORS, Batch, _for_row, _row_criteria, decode
from hf_paged.request import Request


@dataclass(frozen=True)
class DeferredCall:
    """A `generate` call of one prompt whose tokens come later. n rows of P prompt tokens."""

    engine: PagedEngine
    request: Request
    input_ids: torch.Tensor  # [n, P]
    pad_token_id: int
    max_new_tokens: int  # what was asked for; the request has fewer where the model has no positions for more

    @property
    def is_finished(self) -> bool:
        """Whether the tokens, or an error, are there."""
        return self.request.is_finished

    def sequences(self) -> torch.Tensor:
        """What the call would have returned: `[n, P + new]` on the CPU, shorter rows padded.

        Raises what ended the request early.
        """
        request = self.request
        if request.error is not None:
            raise request.error
        new = [sequence.token_ids[request.num_prompt_tokens :] for sequence in request.sequences]
        reasons = {sequence.finish_reason for sequence in request.sequences}
        if "abort" in reasons:
            raise PagedError("This prompt was aborted: its engine was closed, or released, while it ran.")
        if "length" in reasons and max(map(len, new)) < self.max_new_tokens:
            raise CapacityError(
                f"A prompt of {request.num_prompt_tokens} tokens and {self.max_new_tokens} new ones pass the model's "
                f"{self.engine.core.position_limit} positions, and it did not end before them; set max_new_tokens to "
                f"at most {request.max_new_tokens}, or shorten the prompt."
            )
        width = max(map(len, new))
        padded = [[*row, *[self.pad_token_id] * (width - len(row))] for row in new]
        input_ids = self.input_ids.cpu()
        return torch.cat([input_ids, torch.tensor(padded, dtype=input_ids.dtype)], dim=-1)


@dataclass
class Deferral:
    """What the calls inside a `deferring` scope are told, and what became of them.

    Args:
        seed: of the request's generator, if it samples. Its first sequence draws like stock after
            `torch.manual_seed(seed)`.
        own: processors that the caller brings: one object for many prompts.
    """

    seed: int
    own: tuple[Any, ...] = ()
    taken: DeferredCall | BeamCall | None = None
    why_not: str | None = None

    def take(self, engine: PagedEngine, batch: Batch, drafts: DraftSource | None = None) -> bool:
        """Makes a request of the call, if it can run beside others and return what it would return alone.

        Args:
            engine: runs it.
            batch: what the call asks for.
            drafts: who guesses its next tokens, if anyone does.

        Raises:
            CapacityError: the prompt is longer than the model has positions.
            RequestError: the prompt has tokens that the model has not.
        """
        self.why_not = _why_at_once(batch, self.own)
        if len(set(batch.adapters)) > 1:
            self.why_not = "adapter_names that differ"
        if self.why_not is None:
            self.taken = _deferred(engine, batch, self.seed, drafts, has_own=bool(self.own))
        return self.why_not is None

    def take_beams(self, original: Callable[..., Any], model: Any, engine: PagedEngine, batch: Batch) -> bool:
        """Makes a beam search to be run beside others of the call, if that returns what it would return alone.

        Args:
            original: stock's `_beam_search`.
            model: the one that it was called on.
            engine: the model's.
            batch: what it was called with.

        Raises:
            RequestError: the prompt has tokens that the model has not.
        """
        self.why_not = _why_at_once(batch, self.own)
        if self.why_not is None:
            _require_known(engine, batch.prompts()[0])
            seed = self.seed if batch.config.do_sample else None
            self.taken = BeamCall(original, model, engine, batch, seed)
        return self.why_not is None


class _Local(threading.local):
    deferral: Deferral | None = None


_local = _Local()


@contextmanager
def deferring(deferral: Deferral) -> Iterator[None]:
    """Lets the paged `generate` call inside give its request away."""
    previous, _local.deferral = _local.deferral, deferral
    try:
        yield
    finally:
        _local.deferral = previous


def run_or_defer(engine: PagedEngine, batch: Batch) -> Any:
    """What stock's `_sample` would return; in a deferred call the prompt alone, in the same shape."""
    return batch.input_ids if was_deferred(engine, batch) else decode(engine, batch)


def was_deferred(engine: PagedEngine, batch: Batch, drafts: DraftSource | None = None) -> bool:
    """Whether the call under way gave its request away, with `drafts` to go with it."""
    deferral = _local.deferral
    return deferral is not None and deferral.take(engine, batch, drafts)


def were_deferred(original: Callable[..., Any], model: Any, engine: PagedEngine, batch: Batch) -> bool:
    """Whether the call under way gave its beam search away; `original` is stock's loop."""
    deferral = _local.deferral
    return deferral is not None and deferral.take_beams(original, model, engine, batch)


def _why_at_once(batch: Batch, own: tuple[Any, ...]) -> str | None:
    """Why a call must run by itself, or None."""
    has_beams = batch.config.num_beams > 1
    num_rows = batch.config.num_beams if has_beams else batch.num_siblings
    if len(batch.input_ids) != num_rows:
        return "a call of several prompts"
    if batch.streamer is not None:
        return "a streamer"
    if batch.embeds is not None:
        return "inputs_embeds"
    if batch.given is not None:
        return "a cache of one's own"
    if batch.config.return_dict_in_generate:
        return "return_dict_in_generate"
    for criterion in batch.criteria:
        if type(criterion) not in _ROW_CRITERIA:
            return type(criterion).__name__
    if not has_beams and num_rows > 1 and not batch.has_eos and len(batch.criteria) > 1:
        return "num_return_sequences with stop strings but no end-of-sequence token"
    brought = {id(processor) for processor in own}
    for processor in batch.processors:
        # made for this call, it serves one row only; the caller's may remember what it has seen
        is_alone = (has_beams or num_rows == 1) and id(processor) not in brought
        if not is_alone and (type(processor) not in HISTORY_PROCESSORS or (num_rows > 1 and _counts_rows(processor))):
            return type(processor).__name__
    return None


def _counts_rows(processor: Any) -> bool:
    # is told which row it is, or is made for one
    return isinstance(processor, PrefixConstrainedLogitsProcessor | GrammarProcessor)


def _deferred(
    engine: PagedEngine, batch: Batch, seed: int, drafts: DraftSource | None, *, has_own: bool
) -> DeferredCall:
    row, prompt = batch.input_ids[0].tolist(), batch.prompts()[0]
    _require_known(engine, prompt)
    limit, max_new_tokens = engine.core.position_limit, batch.max_new_tokens
    if limit is not None:
        if len(prompt) > limit:
            raise CapacityError(
                f"A prompt of {len(prompt)} tokens passes the model's {limit} positions; shorten it, or give "
                'truncation=True, or handle_long_generation="hole".'
            )
        max_new_tokens = min(max_new_tokens, limit - len(prompt) + 1)
    processors = LogitsProcessorList(_for_row(processor, 0, len(row)) for processor in batch.processors)
    pad = batch.config._pad_token_tensor
    request = Request(
        f"pipeline-{uuid.uuid4().hex}",
        prompt,
        max_new_tokens,
        num_sequences=batch.num_siblings,
        adapter=batch.adapters[0],
        sampling=SamplingParams(
            processors=processors,
            criteria=_row_criteria(batch.criteria),
            eos_token_ids=eos_ids(batch.config),
            do_sample=bool(batch.config.do_sample),
            shared_key=None if has_own else shared_key(batch.config, processors),
            seed=seed if batch.config.do_sample else None,
            history_start=tuple(row[: len(row) - len(prompt)]),
            draft_source=drafts,
        ),
    )
    pad_token_id = int(pad.flatten()[0]) if pad is not None else 0
    return DeferredCall(engine, request, batch.input_ids, pad_token_id, batch.max_new_tokens)


def _require_known(engine: PagedEngine, prompt: list[int]) -> None:
    outside = next((token for token in prompt if not 0 <= token < engine.core.vocab_size), None)
    if outside is not None:
        raise RequestError(
            f"The prompt has token id {outside}; the model's ids go from 0 to {engine.core.vocab_size - 1}. Use the "
            "tokenizer that belongs to the model."
        )
