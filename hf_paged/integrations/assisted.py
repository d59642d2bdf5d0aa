"""Assisted decoding of `generate`, on an engine: each row is a request of its own, and gets drafts of its own.

Stock takes one row. Here a ragged batch goes as well, its rows at different paces. What has to see all rows step by
step (a streamer of a batch, a processor of unknown class) runs without drafts, which changes nothing but the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as stopping

from hf_paged.engine.consumer import Consumer
from hf_paged.engine.draft_source import Assistant, DraftSource, why_not_drafted
from hf_paged.engine.draft_source import draft_source as source_of
from hf_paged.engine.engine import PagedEngine
from hf_paged.engine.unwrap import unwrap_model
from hf_paged.errors import PagedError, UnsupportedModelError
from hf_paged.integrations import decoding
from hf_paged.integrations.decoding import (
    _HORIZON,
    _ROW_CRITERIA,
    HISTORY_PROCESSORS,
    Batch,
    _blocks,
    padded,
    row_requests,
)
from hf_paged.request import RequestOutput

# What stock hands to its loop that is no input of the model.
KEYWORDS = frozenset({"inputs_tensor", "assistant_tokenizer", "tokenizer"})

_STATEFUL = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)
_CRITERIA = (*_ROW_CRITERIA, stopping.MaxTimeCriteria)


def why_stock(model: Any, batch: Batch, assistant: Any, keywords: Mapping[str, Any]) -> str | None:
    """Why stock's loop has to run a call of its `_assisted_decoding`, or None if an engine can."""
    if batch.config.return_dict_in_generate and batch.input_ids.shape[0] == 1:
        return "assisted generation that returns more than tokens runs stock's loop"
    if any(isinstance(item, _STATEFUL) for item in batch.processors) and batch.input_ids.shape[0] == 1:
        return "assisted generation with a processor that remembers what it has seen runs stock's loop"
    if keywords.get("inputs_embeds") is not None:
        return "assisted generation from embeddings runs stock's loop"
    if keywords.get("assistant_tokenizer") is not None:
        return "an assistant of another tokenizer drafts in stock's loop"
    return why_not_drafted(model, batch.config, None if assistant is None else unwrap_model(assistant))


def draft_source(engine: PagedEngine, batch: Batch, assistant: Any) -> tuple[DraftSource | None, str | None]:
    """Who drafts for the rows; None, and the reason, if they run without drafts."""
    num_rows = batch.input_ids.shape[0]
    if not engine.core.can_take_back:
        return None, "recurrent states can't be taken back, so there are no drafts"
    limit = engine.core.position_limit
    if limit is not None and int(batch.criteria.max_length) > limit:
        return None, f"a call that may pass the model's {limit} positions runs without drafts"
    if num_rows > 1:
        if batch.streamer is not None:
            return None, "a streamer of several rows gets a token of each at a time, so there are no drafts"
        if batch.config.return_dict_in_generate:
            return None, "several rows that return more than tokens run without drafts"
        unknown = [item for item in batch.processors if type(item) not in HISTORY_PROCESSORS]
        unknown += [item for item in batch.criteria if type(item) not in _CRITERIA]
        if unknown:
            return None, f"{type(unknown[0]).__name__} may look at several rows together, so there are no drafts"
    model = None if assistant is None else unwrap_model(assistant)
    source = source_of(engine.core.get_model(), batch.config, model)
    if isinstance(source, Assistant):
        try:
            with engine.lock:
                engine.core.speculator.drafter(source.model)
        except UnsupportedModelError as error:
            return None, f"the assistant can't run packed, so there are no drafts: {error}"
    return source, None


def decode(engine: PagedEngine, batch: Batch, drafts: DraftSource | None) -> Any:
    """What stock's `_assisted_decoding` would return for each row; `[B, L + longest]`."""
    if drafts is None:
        return decoding.decode(engine, batch)
    prompts = batch.prompts()
    requests = row_requests(engine, batch, prompts, is_seeded=False, draft_source=drafts)
    horizon = _HORIZON
    engine.reserve(_blocks(engine, batch, prompts, horizon))
    final: list[RequestOutput | None] = [None] * len(requests)
    num_streamed = 0
    with Consumer(engine, requests) as queues:
        while any(output is None or not output.finished for output in final):
            with engine.lock:
                if not any(queues) and not engine.advance():
                    raise PagedError("The engine has rows to decode but nothing to run; its scheduler has a defect.")
            for index, queue in enumerate(queues):
                while queue:
                    final[index] = queue.popleft()
            outputs = [output for output in final if output is not None]
            for output in outputs:
                if output.error is not None:
                    raise output.error
            if batch.streamer is not None and outputs:
                for token in outputs[0].token_ids[num_streamed:]:
                    batch.streamer.put(torch.tensor([token]))
                num_streamed = len(outputs[0].token_ids)
            if any(len(output.token_ids) >= horizon for output in outputs):
                horizon *= 2
                engine.reserve(_blocks(engine, batch, prompts, horizon))
    if batch.streamer is not None:
        batch.streamer.end()
    return padded(batch, [output.token_ids for output in final if output is not None])
