"""presence_penalty and frequency_penalty, as OpenAI's API defines them: by what was generated, never by the prompt."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor


class OutputPenaltyProcessor(LogitsProcessor):
    """Lowers the logit of each generated token by `frequency * count`, and once by `presence`.

    Args:
        presence: taken once from every token that was generated, -2 to 2 in that API.
        frequency: taken for each time that it was.
        num_prompt_tokens: tokens before the generated ones.
    """

    def __init__(self, presence: float, frequency: float, num_prompt_tokens: int) -> None:
        self._presence = presence
        self._frequency = frequency
        self._start = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` [R, vocab] with the penalties of `input_ids` [R, tokens] taken off."""
        generated = input_ids[:, self._start :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)
