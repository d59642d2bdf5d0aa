"""Chooses the next token of every row of a ragged batch, and checks draft tokens.

A check is a choice like any other, made behind the drafts before it; the first that isn't the draft ends the walk.

row                         0         1         2          drafts  a b
its history           ... last    last a   last a b
compared with               a         b         -
chosen                      a         c        (d)         emitted: a c
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from hf_paged.engine.grammar import mask_scores
from hf_paged.engine.history import history_of
from hf_paged.engine.params import SamplingParams
from hf_paged.errors import GrammarError
from hf_paged.request import Sequence, TokenLogprobs


@dataclass(frozen=True)
class SamplerRow:
    """A sequence that gets a token from row `row` of the logits.

    `drafts` stand behind the sequence's own tokens. `draft_token_id` is what the choice will be compared with, and
    `draft_probs` [vocab] what it was drawn with, if it was drawn independently of this choice.
    """

    sequence: Sequence
    row: int
    drafts: SequenceOf[int] = ()
    draft_token_id: int | None = None
    draft_probs: torch.Tensor | None = None


@dataclass(frozen=True)
class Choice:
    """What a row got: a token, or the exception that kept it from one.

    `generator_state` is that of the sequence's generator after a choice that further ones may follow in the same step.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: Exception | None = None
    generator_state: torch.Tensor | None = None


class NonFiniteLogitsError(ArithmeticError):
    """The scores of a request are NaN, or leave no token to draw."""


def choose(rows: list[SamplerRow], logits: torch.Tensor) -> list[Choice]:
    """The next token of each row; `logits` [R, vocab] float32 are not changed.

    Rows whose processors look at nothing but their scores, with equal settings, are processed together; others one by
    one with their own history. What a request's processor raises is that request's error alone.
    """
    logits = logits[[row.row for row in rows]] if [row.row for row in rows] != list(range(len(logits))) else logits
    errors: dict[int, Exception] = {}
    states: dict[int, torch.Tensor] = {}
    scores = process(rows, logits, errors)
    tokens, is_bad = _pick(rows, scores, states)
    ids, bad = torch.stack((tokens, is_bad.to(tokens.dtype))).tolist()  # wait: the only one of a step
    for index in [index for index, flag in enumerate(bad) if flag and index not in errors]:
        errors[index] = NonFiniteLogitsError(
            "The model, or a logits processor, gave this request NaN scores or left it no token to draw."
        )
    logprobs = _logprobs(rows, logits, ids)
    return [Choice(ids[i], logprobs.get(i), errors.get(i), states.get(i)) for i in range(len(rows))]


def _allowed_by_grammars(
    rows: SequenceOf[SamplerRow], logits: torch.Tensor, errors: dict[int, Exception]
) -> torch.Tensor:
    # scores with -inf where a row's grammar doesn't go on; those of rows without a grammar as they are
    indices, bits = [], []
    for index, row in enumerate(rows):
        sequence = row.sequence
        grammar = sequence.request.sampling.grammar
        if grammar is not None:
            try:
                generated = sequence.token_ids[sequence.request.num_prompt_tokens :]
                bits.append(grammar.next_bits(sequence.index, [*generated, *row.drafts]))
                indices.append(index)
            except GrammarError as error:
                errors[index] = error
    if not indices:
        return logits
    scores = logits.clone()
    scores[indices] = mask_scores(logits[indices], bits)
    return scores


def process(rows: SequenceOf[SamplerRow], logits: torch.Tensor, errors: dict[int, Exception]) -> torch.Tensor:
    """What the rows' grammars and processors make of `logits` [R, vocab], which are not changed.

    `errors` gets what they raise, by row.
    """
    scores = logits = _allowed_by_grammars(rows, logits, errors)
    for members in _groups(rows).values():
        row = rows[members[0]]
        sampling: SamplingParams = row.sequence.request.sampling
        if not sampling.processors:
            continue
        everything = len(members) == len(rows)
        part: torch.Tensor = logits.clone() if everything else logits[members]
        try:
            if sampling.shared_key is not None:
                history = torch.empty(len(members), 0, dtype=torch.int64, device=logits.device)
            else:
                history = history_of(row.sequence, logits.device, row.drafts)
            part = sampling.processors(history, part)
        except Exception as error:
            errors.update(dict.fromkeys(members, error))
            continue
        if everything:
            return part
        scores = logits.clone() if scores is logits else scores
        scores[members] = part
    return scores


def _groups(rows: SequenceOf[SamplerRow]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        sampling: SamplingParams = row.sequence.request.sampling
        key = (index,) if sampling.shared_key is None else (sampling.do_sample, sampling.shared_key)
        groups.setdefault(key, []).append(index)
    return groups


def _pick(
    rows: list[SamplerRow], scores: torch.Tensor, states: dict[int, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = [index for index, row in enumerate(rows) if row.sequence.request.sampling.do_sample]
    if len(drawn) == len(rows):
        return _draw(rows, drawn, scores, states)
    best, tokens = scores.max(dim=-1)
    is_bad = best.isnan()
    if drawn:
        tokens[drawn], is_bad[drawn] = _draw(rows, drawn, scores[drawn], states)
    return tokens, is_bad


def _draw(
    rows: list[SamplerRow], members: list[int], scores: torch.Tensor, states: dict[int, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities = scores.softmax(dim=-1)
    bad = ~probabilities.isfinite().all(dim=-1)
    # multinomial would raise for everybody
    probabilities = torch.where(bad[:, None], torch.ones_like(probabilities), probabilities)
    probabilities = _accept_or_residual([rows[index] for index in members], probabilities)
    generators = [
        rows[index].sequence.request.sampling.generator(rows[index].sequence.index, scores.device) for index in members
    ]
    if all(generator is None for generator in generators):
        return torch.multinomial(probabilities, 1).squeeze(1), bad
    drawn = []
    for index, row, generator in zip(members, probabilities, generators, strict=True):
        drawn.append(torch.multinomial(row, 1, generator=generator))
        if generator is not None and rows[index].draft_token_id is not None:
            states[index] = generator.get_state()
    return torch.cat(drawn), bad


def _accept_or_residual(rows: list[SamplerRow], probabilities: torch.Tensor) -> torch.Tensor:
    """What to draw from, `[R, vocab]`, so that a draft x drawn with q stands with probability min(1, p(x) / q(x)).

    If it stands, there is nothing but x to draw; if not, what p has more than q of each token, which is never x.
    Together the tokens are distributed as p (Leviathan et al., https://arxiv.org/abs/2211.17192, algorithm 1).
    """
    checked = [index for index, row in enumerate(rows) if row.draft_probs is not None]
    if not checked:
        return probabilities
    p = probabilities[checked]
    q = torch.stack([rows[index].draft_probs for index in checked]).to(p)  # type: ignore[misc]
    drafts = torch.tensor([[rows[index].draft_token_id] for index in checked], device=p.device)
    p_draft, q_draft = p.gather(1, drafts), q.gather(1, drafts)
    stands = torch.rand_like(q_draft) * q_draft < p_draft
    residual = (p - q).clamp_min(0)
    # p = q but for rounding: there is no more to draw of any token
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    only = torch.zeros_like(p).scatter_(1, drafts, 1.0)
    probabilities = probabilities.clone()
    probabilities[checked] = torch.where(stands, only, residual)
    return probabilities


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
