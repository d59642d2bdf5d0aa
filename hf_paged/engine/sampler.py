"""Chooses the next token of every row of a ragged batch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from hf_paged.engine.grammar import mask_scores
from hf_paged.engine.history import history_of
from hf_paged.engine.params import SamplingParams
from hf_paged.errors import GrammarError
from hf_paged.request import Sequence, TokenLogprobs


@dataclass(frozen=True)
class SamplerRow:
    """A sequence that gets its next token from row `row` of the logits."""

    sequence: Sequence
    row: int


@dataclass(frozen=True)
class Choice:
    """What a row got: a token, or the exception that kept it from one."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: Exception | None = None


class NonFiniteLogitsError(ArithmeticError):
    """The scores of a request are NaN, or leave no token to draw."""


def choose(rows: list[SamplerRow], logits: torch.Tensor) -> list[Choice]:
    """The next token of each row; `logits` [R, vocab] float32 are not changed.

    Rows whose processors look at nothing but their scores, with equal settings, are processed together; others one by
    one with their own history. What a request's processor raises is that request's error alone.
    """
    logits = logits[[row.row for row in rows]] if [row.row for row in rows] != list(range(len(logits))) else logits
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    is_bad = torch.zeros_like(tokens)
    errors: dict[int, Exception] = {}
    scores = _allowed_by_grammars(rows, logits, errors)
    for members in _groups(rows).values():
        _choose_group(rows, members, scores, tokens, is_bad, errors)
    ids, bad = torch.stack((tokens, is_bad)).tolist()  # wait: the only one of a step
    for index in [index for index, flag in enumerate(bad) if flag and index not in errors]:
        errors[index] = NonFiniteLogitsError(
            "The model, or a logits processor, gave this request NaN scores or left it no token to draw."
        )
    logprobs = _logprobs(rows, logits, ids)
    return [Choice(ids[index], logprobs.get(index), errors.get(index)) for index in range(len(rows))]


def _allowed_by_grammars(rows: list[SamplerRow], logits: torch.Tensor, errors: dict[int, Exception]) -> torch.Tensor:
    # scores with -inf where a row's grammar doesn't go on; those of rows without a grammar as they are
    indices, bits = [], []
    for index, row in enumerate(rows):
        sequence = row.sequence
        grammar = sequence.request.sampling.grammar
        if grammar is not None:
            try:
                bits.append(grammar.next_bits(sequence.index, sequence.token_ids[sequence.request.num_prompt_tokens :]))
                indices.append(index)
            except GrammarError as error:
                errors[index] = error
    if not indices:
        return logits
    scores = logits.clone()
    scores[indices] = mask_scores(logits[indices], bits)
    return scores


def _groups(rows: list[SamplerRow]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        sampling: SamplingParams = row.sequence.request.sampling
        key = (index,) if sampling.shared_key is None else (sampling.do_sample, sampling.shared_key)
        groups.setdefault(key, []).append(index)
    return groups


def _choose_group(
    rows: list[SamplerRow],
    members: list[int],
    logits: torch.Tensor,
    tokens: torch.Tensor,
    is_bad: torch.Tensor,
    errors: dict[int, Exception],
) -> None:
    sequence = rows[members[0]].sequence
    sampling: SamplingParams = sequence.request.sampling
    everything = len(members) == len(rows)
    scores = logits if everything else logits[members]
    if sampling.processors:
        shared = sampling.shared_key is not None
        try:
            history = tokens.new_empty(len(members), 0) if shared else history_of(sequence, logits.device)
            scores = sampling.processors(history, scores.clone())
        except Exception as error:
            errors.update(dict.fromkeys(members, error))
            return
    if sampling.do_sample:
        chosen, bad = _draw(rows, members, scores)
    else:
        best, chosen = scores.max(dim=-1)
        bad = best.isnan()
    if everything:
        tokens.copy_(chosen)
        is_bad.copy_(bad)
    else:
        tokens[members] = chosen
        is_bad[members] = bad.to(is_bad.dtype)


def _draw(rows: list[SamplerRow], members: list[int], scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities = scores.softmax(dim=-1)
    bad = ~probabilities.isfinite().all(dim=-1)
    # multinomial would raise for everybody
    probabilities = torch.where(bad[:, None], torch.ones_like(probabilities), probabilities)
    generators = [
        rows[index].sequence.request.sampling.generator(rows[index].sequence.index, scores.device) for index in members
    ]
    if all(generator is None for generator in generators):
        return torch.multinomial(probabilities, 1).squeeze(1), bad
    drawn = [
        torch.multinomial(row, 1, generator=generator) for row, generator in zip(probabilities, generators, strict=True)
    ]
    return torch.cat(drawn), bad


def _logprobs(rows: list[SamplerRow], logits: torch.Tensor, ids: list[int]) -> dict[int, TokenLogprobs]:
    wanted = [index for index, row in enumerate(rows) if row.sequence.request.wants_logprobs]
    if not wanted:
        return {}
    counts = [rows[index].sequence.request.sampling.num_logprobs or 0 for index in wanted]
    entries = token_logprobs(logits[wanted], [ids[index] for index in wanted], counts)
    return dict(zip(wanted, entries, strict=True))


def token_logprobs(logits: torch.Tensor, token_ids: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """Log probabilities of given tokens and of the `counts[i]` likeliest ones of each row of `logits` [R, vocab]."""
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.tensor(token_ids, device=logits.device)
    chosen = logprobs.gather(1, ids[:, None]).squeeze(1).tolist()  # wait: asked for
    values, indices = (item.tolist() for item in logprobs.topk(max(counts, default=0), dim=-1))  # wait: the same
    return [
        TokenLogprobs(token, value, tuple(zip(top_ids[:count], top[:count], strict=True)))
        for token, value, count, top, top_ids in zip(token_ids, chosen, counts, values, indices, strict=True)
    ]
