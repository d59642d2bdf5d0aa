"""Classifier-free guidance of one request: its scores, pushed away from those of another prompt.

    scores        log p(next | prompt, generated)
    unconditional log p(next | negative prompt, generated)
    result        unconditional + scale * (scores - unconditional)

The other prompt has a cache of its own outside the pool, as in stock. Stock's processor counts its calls to know where
it is; here the tokens say it, so siblings, preemption and a step that is repeated change nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel

from hf_paged.compat import CACHE_KEYWORD
from hf_paged.engine.attention_swap import model_lock


class _Branch:
    """One continuation of the negative prompt: its tokens, their cache, and the logits after them."""

    def __init__(self, config: Any) -> None:
        self.tokens: list[int] = []
        self.cache: Any = DynamicCache(config=config)
        self.logits = torch.empty(0)


class GuidanceProcessor(LogitsProcessor):
    """What stock's `guidance_scale` does, for the rows of one request.

    Args:
        scale: 1 changes nothing.
        model: computes the unconditional scores.
        num_prompt_tokens: of the request.
        negative_ids: the negative prompt; None for the prompt's last token, as in stock.
        num_rows: sequences of the request; so many branches are kept.
    """

    def __init__(
        self,
        scale: float,
        model: PreTrainedModel,
        num_prompt_tokens: int,
        negative_ids: list[int] | None = None,
        num_rows: int = 1,
    ) -> None:
        self._scale = scale
        self._model = model
        self._start = num_prompt_tokens
        self._negative_ids = negative_ids
        self._branches: deque[_Branch] = deque(maxlen=num_rows)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` [1, vocab], guided, of a row with history `input_ids` [1, tokens]."""
        scores = scores.log_softmax(dim=-1)
        row: list[int] = input_ids[0, self._start - 1 :].tolist()  # host: branches are told apart by their tokens
        logits = self._unconditional([*(self._negative_ids or row[:1]), *row[1:]], input_ids.device)
        unconditional = logits.to(scores.device).log_softmax(dim=-1)
        return self._scale * (scores - unconditional) + unconditional

    def _unconditional(self, tokens: list[int], device: torch.device) -> torch.Tensor:
        # logits [1, vocab] after these tokens, on the longest branch that leads there
        leading = [branch for branch in self._branches if tokens[: len(branch.tokens)] == branch.tokens]
        branch = max(leading, key=lambda branch: len(branch.tokens), default=None)
        if branch is None:
            branch = _Branch(self._model.config)
            self._branches.append(branch)  # the one that was made first goes, if there are too many
        new = tokens[len(branch.tokens) :]
        if new:
            ids = torch.tensor([new], device=device)
            mask = torch.ones(1, len(tokens), dtype=torch.int64, device=device)
            with model_lock(self._model), torch.no_grad():
                result = self._model(ids, attention_mask=mask, use_cache=True, **{CACHE_KEYWORD: branch.cache})
            branch.tokens, branch.logits = tokens, result.logits[:, -1]
        return branch.logits
