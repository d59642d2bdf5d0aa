"""A grammar as a logits processor, for `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from hf_paged.engine.grammar import Grammar, mask_scores


class GrammarProcessor(LogitsProcessor):
    """Keeps each row of a `generate` call in a grammar: `logits_processor=[GrammarProcessor(tokenizer, regex=...)]`.

    Beams, candidates of assisted generation and preempted rows are where their tokens say. The first call tells where
    the prompt ends; input that doesn't go on from what was seen is a new prompt.

    Args:
        tokenizer: the model's.
        regex: a regular expression that the whole text matches.
        json_schema: a JSON schema, as a dict, as JSON, or as a pydantic model; see `Grammar`.
        ebnf: a grammar in xgrammar's EBNF; its first rule is called `root`.
        stop_token_ids: tokens that end a text; empty for the tokenizer's end-of-sequence token.

    Raises:
        RequestError: not exactly one of the three is given, it can't be compiled, or xgrammar isn't installed.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        regex: str | None = None,
        json_schema: Any = None,
        ebnf: str | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._arguments = {"regex": regex, "json_schema": json_schema, "ebnf": ebnf, "stop_token_ids": stop_token_ids}
        self._tokenizer = tokenizer
        self._grammar = Grammar(tokenizer, **self._arguments)
        self._start = 0  # tokens of the prompt
        self._prompt: torch.Tensor | None = None
        self._longest = 0  # input since the prompt
        self._is_bound = False

    def bound(self, num_prompt_tokens: int) -> GrammarProcessor:
        """One for a single call whose prompt has that many tokens, padding included."""
        bound = GrammarProcessor(self._tokenizer, **self._arguments)
        bound._start, bound._is_bound = num_prompt_tokens, True
        return bound

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` [R, vocab] with -inf for what the grammar doesn't allow after `input_ids` [R, tokens].

        Raises:
            GrammarError: no token of the tokenizer can go on with a row.
        """
        width = input_ids.shape[1]
        if not self._is_bound:
            if width > self._longest + 1 or not self._has_seen(input_ids):
                self._grammar.forget()
                self._start, self._prompt, self._longest = width, input_ids.clone(), width
            self._longest = max(self._longest, width)
        bits = []
        for row, generated in enumerate(input_ids[:, self._start :].tolist()):  # host: the grammar follows them there
            place = self._grammar.place(row)
            # A row that has ended is padded, and one that other processors forced out of the grammar can only end.
            bits.append(self._grammar.next_bits(row, generated) if place.follow(generated) else place.end_bits())
        return mask_scores(scores, bits)

    def _has_seen(self, input_ids: torch.Tensor) -> bool:
        return self._prompt is not None and torch.equal(input_ids[:, : self._start], self._prompt)
