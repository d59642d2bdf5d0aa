"""Beam search and beam sampling of `generate`, on an engine.

Stock's own loop keeps the books: scores, finished beams, penalties, draws. What it takes for its model and its cache
are the rows of an engine:

    stock's _beam_search                    beam_model.py                engine
      _prefill(prompts)                 ──▶ a request a prompt       ──▶ computed once, shared by its beams
      cache.reorder_cache(parents)      ──▶ noted
      self(sequences)                   ──▶ forks, drops, appends    ──▶ one packed step for all beams
    logits [B * num_beams, 1, vocab]    ◀──                          ◀──
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad as pad_columns
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from hf_paged.compat import CACHE_KEYWORD
from hf_paged.engine.engine import PagedEngine
from hf_paged.engine.external import ExternalRows
from hf_paged.integrations.beam_model import BeamModel, Parents, Wait, are_independent
from hf_paged.integrations.decoding import Batch

# New tokens that the pool is made for at first.
_HORIZON = 256

logger = logging.getLogger("hf_paged")


def search(
    original: Callable[..., Any],
    model: Any,
    engine: PagedEngine,
    batch: Batch,
    *,
    wait: Wait | None = None,
    reserve: Callable[[int], int] | None = None,
) -> Any:
    """What stock's `_beam_search` would return.

    Args:
        original: stock's loop.
        model: the model that it was called on.
        engine: the model's.
        batch: what it was called with; rows `[B * num_beams, L]`, the beams of a prompt one after another.
        wait: as in `BeamModel`, for someone else who runs the engine's steps; None runs them here.
        reserve: called with the blocks that the beams may hold from now on; None for the engine's own.

    Raises:
        CapacityError: one beam alone is more than the pool can ever hold.
    """
    run = functools.partial(_search, original, model, engine, wait=wait, reserve=reserve or engine.reserve)
    parts = _parts(engine, batch)
    if len(parts) > 1:
        results = []
        for part in parts:
            result, is_decided = run(part)
            if not is_decided:
                break
            results.append(result)
        else:
            return _joined(results, batch)
    return run(batch)[0]


def _search(
    original: Callable[..., Any],
    model: Any,
    engine: PagedEngine,
    batch: Batch,
    *,
    wait: Wait | None,
    reserve: Callable[[int], int],
) -> tuple[Any, bool]:
    # stock's result, and whether each prompt's is what it would be whatever other prompts there are
    beams = batch.config.num_beams
    prompts = batch.prompts()[::beams]
    requests = [batch.request_of(index * beams, prompt, beams) for index, prompt in enumerate(prompts)]

    horizon = 0

    def make_room(num_new_tokens: int) -> None:
        nonlocal horizon
        if num_new_tokens >= horizon:
            horizon = max(_HORIZON, 2 * horizon)
            reserve(_blocks(engine, prompts, beams, min(horizon, batch.max_new_tokens)))

    make_room(0)
    with ExternalRows(engine, requests) as rows:
        cache = Parents()
        beam_model = BeamModel(model, rows, cache, batch, make_room, wait)
        result = original(
            beam_model,
            batch.input_ids,
            logits_processor=batch.processors,
            stopping_criteria=batch.criteria,
            generation_config=batch.config,
            use_cache=True,
            **{CACHE_KEYWORD: cache},
        )
        if batch.config.return_dict_in_generate:
            result = _with_cache(result, rows, cache, beam_model.width)
        return result, beam_model.is_decided()


def _parts(engine: PagedEngine, batch: Batch) -> list[Batch]:
    # as many prompts at a time as fit with all their beams, where a prompt's result doesn't depend on the others'
    beams = batch.config.num_beams
    prompts = batch.prompts()[::beams]
    room = engine.room()
    if batch.config.do_sample or not are_independent(batch):
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
        embeds=None if batch.embeds is None else batch.embeds[start:stop],
        adapters=batch.adapters[start:stop],
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


def most_blocks(engine: PagedEngine, batch: Batch) -> int:
    """Blocks that the beams of a call hold at most."""
    return _blocks(engine, batch.prompts()[:: batch.config.num_beams], batch.config.num_beams, batch.max_new_tokens)


def _with_cache(result: Any, rows: ExternalRows, cache: Parents, width: int) -> Any:
    # as stock returns it: one row a beam, in the order of the next round
    if cache.beam_idx is not None:
        rows.reorder(range(len(cache.beam_idx)), cache.beam_idx.tolist())
    copied = rows.copy(width)
    if copied is None:
        logger.warning("A beam was preempted, so this call returns no cache; give the cache_config more num_blocks.")
    return type(result)(**{**result, CACHE_KEYWORD: copied})
