"""The decoding loop of `generate`, on an engine.

in lockstep     the whole batch fits: every row gets its next token in the same round, from stock's processors on
                stock's own [B, L + t] history, with one draw for all rows. Whatever processors, criteria and
                streamers do, they see what they see in stock.
one by one      it doesn't fit: rows come and go as blocks allow, each with its own history, and where tokens are
                sampled, its own generator.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as stopping
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_paged.compat import CACHE_KEYWORD
from hf_paged.engine.draft_source import DraftSource
from hf_paged.engine.engine import PagedEngine
from hf_paged.engine.external import ExternalRows, external_sampling
from hf_paged.engine.grammar_processor import GrammarProcessor
from hf_paged.engine.params import ROW_PROCESSORS, SamplingParams, eos_ids, shared_key
from hf_paged.errors import RequestError
from hf_paged.integrations.continuing import given_rows
from hf_paged.integrations.peft import adapters_of_call
from hf_paged.request import Request

# Processors of a row's own history or length, without state: a row may go through them by itself.
HISTORY_PROCESSORS = (
    *ROW_PROCESSORS,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
    GrammarProcessor,
)

# New tokens a row that the pool is made for at first; it grows with the rows that last longer. Limits on new tokens are
# often set high and seldom reached.
_HORIZON = 256

_ROW_CRITERIA = (stopping.MaxLengthCriteria, stopping.EosTokenCriteria, stopping.StopStringCriteria)

logger = logging.getLogger("hf_paged")


@dataclass(frozen=True)
class Batch:
    """What stock's `_sample` was called with. B rows, L padded prompt tokens."""

    input_ids: torch.Tensor  # [B, L]
    attention_mask: torch.Tensor | None  # [B, L]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any
    embeds: torch.Tensor | None  # [B, P, hidden]: the prompts, where input_ids have none; the mask is [B, P] then
    adapters: Sequence[str | None]  # one a row, None for the model's active ones
    given: Cache | None  # the caller's, with the first columns of input_ids; it gets the others

    @property
    def max_new_tokens(self) -> int:
        """Most tokens that any row gets."""
        return int(self.criteria.max_length) - self.input_ids.shape[1]

    @property
    def has_eos(self) -> bool:
        """Whether rows can end at a token, and are padded from there on."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    @property
    def num_siblings(self) -> int:
        """Rows in a row that have the same prompt (`num_return_sequences`)."""
        return 1 if self.given is not None else max(1, self.config.num_return_sequences or 1)

    def prompts(self) -> list[list[int]]:
        """The rows' tokens without padding; zeros for embeddings."""
        rows: list[list[int]] = self.input_ids.tolist()
        if self.embeds is not None:
            rows = [[0] * self.embeds.shape[1]] * len(rows)
        if self.attention_mask is None:
            return rows
        masks = self.attention_mask.bool().tolist()
        kept = [
            [token for token, keep in zip(row, mask, strict=True) if keep]
            for row, mask in zip(rows, masks, strict=True)
        ]
        for index, row in enumerate(kept):
            if not row:
                raise RequestError(f"Row {index} of the batch has no tokens: its attention_mask is all zeros.")
        return kept

    def request_of(self, row: int, prompt: list[int], num_sequences: int, given: Any = None) -> Request:
        """A request of a row's prompt whose tokens are chosen outside the engine."""
        return Request(
            f"generate-{uuid.uuid4().hex}",
            prompt,
            self.max_new_tokens,
            num_sequences=num_sequences,
            adapter=self.adapters[row],
            prompt_embeds=self.prompt_embeds(row),
            given=given,
            cache_salt=None if self.embeds is None else uuid.uuid4().hex,  # zeros say nothing about the prompt
            sampling=external_sampling(),
        )

    def prompt_embeds(self, row: int) -> torch.Tensor | None:
        """`[prompt, hidden]`: a row's embeddings without padding; None if it has tokens."""
        if self.embeds is None or self.attention_mask is None:
            return None if self.embeds is None else self.embeds[row]
        return self.embeds[row][self.attention_mask[row].bool()]


def batch_of(
    model: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    streamer: Any = None,
) -> Batch:
    """What one of stock's loops was called with: also its rows' embeddings, their adapters, and the caller's cache."""
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    embeds = None if embeds is None else embeds.detach()
    adapters = adapters_of_call(model, len(input_ids))
    given = model_kwargs.get(CACHE_KEYWORD)
    return Batch(input_ids, mask, processors, criteria, config, streamer, embeds, adapters, given)


def decode(engine: PagedEngine, batch: Batch) -> Any:
    """What stock's `_sample` would return for the batch."""
    prompts = batch.prompts()
    whole = _blocks(engine, batch, prompts, batch.max_new_tokens)
    if engine.room() >= whole or not _can_go_one_by_one(batch):
        return _in_lockstep(engine, batch, prompts)
    engine.reserve(whole)
    return _one_by_one(engine, batch, prompts)


def _blocks(engine: PagedEngine, batch: Batch, prompts: list[list[int]], num_new_tokens: int) -> int:
    # blocks that the rows hold together when each has that many new tokens
    size, siblings, needed = engine.config.block_size, batch.num_siblings, 0
    for prompt in prompts[::siblings]:
        row = -(-(len(prompt) + min(num_new_tokens, batch.max_new_tokens) - 1) // size)
        shared = len(prompt) // size if siblings > 1 else 0
        needed += shared + siblings * (row - shared)
    return needed


def _can_go_one_by_one(batch: Batch) -> bool:
    return (
        batch.streamer is None
        and batch.embeds is None
        and batch.given is None
        and not batch.config.return_dict_in_generate
        and all(type(item) in HISTORY_PROCESSORS for item in batch.processors)
        and all(type(item) in _ROW_CRITERIA for item in batch.criteria)
        and (batch.has_eos or len(batch.criteria) == 1)
    )


# -- in lockstep -----------------------------------------------------------------------------------------------------


def _in_lockstep(engine: PagedEngine, batch: Batch, prompts: list[list[int]]) -> Any:
    given = given_rows(batch, prompts)
    requests = [
        batch.request_of(row, prompt, batch.num_siblings, given[row])
        for row, prompt in list(enumerate(prompts))[:: batch.num_siblings]
    ]

    def reserve(num_new_tokens: int) -> None:
        engine.reserve(_blocks(engine, batch, prompts, num_new_tokens))

    reserve(_HORIZON)
    with ExternalRows(engine, requests) as rows:
        return _lockstep_rounds(rows, batch, reserve)


def _lockstep_rounds(rows: ExternalRows, batch: Batch, reserve: Callable[[int], None]) -> Any:
    config, input_ids = batch.config, batch.input_ids
    num_rows = input_ids.shape[0]
    keep_scores = config.return_dict_in_generate and config.output_scores
    keep_logits = config.return_dict_in_generate and config.output_logits
    # Stock feeds finished rows on until the last one is done, with padding where there is an end-of-sequence token.
    # Who asked for more than tokens gets those rows' scores and cache; without such a token their tokens are returned.
    # A processor of unknown class may look from one row at another.
    feeds_finished = (
        config.return_dict_in_generate
        or batch.given is not None
        or not batch.has_eos
        or any(type(processor) not in HISTORY_PROCESSORS for processor in batch.processors)
    )
    pad = config._pad_token_tensor.to(input_ids.device) if config._pad_token_tensor is not None else None
    unfinished = torch.ones(num_rows, dtype=torch.int64, device=input_ids.device)
    active = list(range(num_rows))
    scores: tuple[torch.Tensor, ...] = ()
    raw_logits: tuple[torch.Tensor, ...] = ()
    horizon = _HORIZON
    while True:
        if input_ids.shape[1] - batch.input_ids.shape[1] >= horizon:
            horizon *= 2
            reserve(horizon)
        logits = _all_rows(rows.logits(active), active, num_rows, input_ids.device)
        processed = batch.processors(input_ids, logits)
        if keep_scores:
            scores += (processed,)
        if keep_logits:
            raw_logits += (logits,)
        if config.do_sample:
            tokens = torch.multinomial(processed.softmax(dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = processed.argmax(dim=-1)
        if batch.has_eos and pad is not None:  # stock sees to it that there is one
            tokens = tokens * unfinished + pad * (1 - unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        unfinished = unfinished & ~batch.criteria(input_ids, scores if keep_scores else None)
        if batch.streamer is not None:
            batch.streamer.put(tokens.cpu())
        token_ids, goes_on = tokens.tolist(), unfinished.tolist()
        if not any(goes_on):
            break
        ended = [row for row in active if not (goes_on[row] or feeds_finished)]
        active = [row for row in active if goes_on[row] or feeds_finished]
        rows.append(active, [token_ids[row] for row in active])
        rows.finish(ended)
    if batch.streamer is not None:
        batch.streamer.end()
    prompt = batch.input_ids if batch.embeds is None else batch.embeds
    width = prompt.shape[1] + input_ids.shape[1] - batch.input_ids.shape[1] - 1  # the last token isn't computed yet
    if batch.given is not None:
        rows.extend(batch.given, batch.given.get_seq_length(), width)
    if not config.return_dict_in_generate:
        return input_ids
    cache = rows.copy(width) if batch.given is None else batch.given
    if cache is None:
        logger.warning("A row was preempted, so this call returns no cache; give the cache_config more num_blocks.")
    return GenerateDecoderOnlyOutput(
        sequences=input_ids,
        scores=scores if keep_scores else None,
        logits=raw_logits if keep_logits else None,
        **{CACHE_KEYWORD: cache},
    )


def _all_rows(found: list[torch.Tensor], active: list[int], num_rows: int, device: torch.device) -> torch.Tensor:
    stacked = torch.stack(found).to(device)
    if len(active) == num_rows:
        return stacked
    # finished rows take part in processing and drawing, as in stock; what they get is replaced by padding
    full = stacked.new_zeros(num_rows, stacked.shape[1])
    full[active] = stacked
    return full


# -- one by one ------------------------------------------------------------------------------------------------------


def _one_by_one(engine: PagedEngine, batch: Batch, prompts: list[list[int]]) -> torch.Tensor:
    requests = row_requests(engine, batch, prompts, is_seeded=bool(batch.config.do_sample))
    return padded(batch, [output.token_ids for output in engine.run(requests)])


def row_requests(
    engine: PagedEngine,
    batch: Batch,
    prompts: list[list[int]],
    *,
    is_seeded: bool,
    draft_source: DraftSource | None = None,
) -> list[Request]:
    """A request a row of the batch, with processors and criteria of that row alone."""
    rows = batch.input_ids.tolist()
    requests = []
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        processors = LogitsProcessorList(_for_row(processor, index, len(row)) for processor in batch.processors)
        requests.append(
            Request(
                f"generate-{uuid.uuid4().hex}",
                prompt,
                batch.max_new_tokens,
                adapter=batch.adapters[index],
                sampling=SamplingParams(
                    processors=processors,
                    criteria=_row_criteria(batch.criteria),
                    eos_token_ids=eos_ids(batch.config),
                    do_sample=bool(batch.config.do_sample),
                    shared_key=shared_key(batch.config, processors),
                    seed=int(torch.randint(2**62, ())) if is_seeded else None,
                    history_start=tuple(row[: len(row) - len(prompt)]),
                    draft_source=draft_source,
                ),
            )
        )
    return requests


def padded(batch: Batch, new_token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """`[B, L + longest]`: the batch with each row's new tokens behind it."""
    width = max(map(len, new_token_ids))
    pad = int(batch.config._pad_token_tensor) if batch.config._pad_token_tensor is not None else 0
    generated = [[*row, *[pad] * (width - len(row))] for row in new_token_ids]
    new = torch.tensor(generated, dtype=batch.input_ids.dtype, device=batch.input_ids.device)
    return torch.cat([batch.input_ids, new], dim=-1)


def _for_row(processor: Any, index: int, width: int) -> Any:
    if isinstance(processor, GrammarProcessor):
        return processor.bound(width)
    if isinstance(processor, logits_process.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return logits_process.PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed(index, tokens), 1)
    # from 5.24 on the repetition penalty holds one padding length a row
    lengths = getattr(processor, "prompt_ignore_length", None)
    if isinstance(lengths, torch.Tensor) and lengths.numel() > 1:
        return logits_process.RepetitionPenaltyLogitsProcessor(
            processor.penalty, prompt_ignore_length=lengths[index : index + 1]
        )
    return processor


def _row_criteria(criteria: StoppingCriteriaList) -> tuple[tuple[str, None, Any], ...]:
    return tuple(
        ("stop", None, criterion)
        for criterion in criteria
        if not isinstance(criterion, stopping.MaxLengthCriteria | stopping.EosTokenCriteria)
    )
