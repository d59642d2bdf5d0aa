"""logit_bias as a logits processor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import LogitsProcessor

from hf_paged.errors import RequestError


class LogitBiasProcessor(LogitsProcessor):
    """Adds a constant to the logits of some tokens.

    Args:
        bias: token id (or its decimal string, as JSON has it) to the value added to its logit.
        vocab_size: ids must be below it.
    """

    def __init__(self, bias: Mapping[int | str, float], vocab_size: int) -> None:
        try:
            entries = {int(token): float(value) for token, value in bias.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise RequestError("logit_bias must map token ids to numbers, such as {5: -100}.") from error
        wrong = [token for token in entries if not 0 <= token < vocab_size]
        if wrong:
            raise RequestError(f"logit_bias names token {wrong[0]}; ids go from 0 to {vocab_size - 1}.")
        self._tokens = torch.tensor(list(entries), dtype=torch.int64)
        self._values = torch.tensor(list(entries.values()))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` [R, vocab] with the biases added."""
        return scores.index_add(
            1,
            self._tokens.to(scores.device),
            self._values.to(scores.device, scores.dtype).expand(scores.shape[0], -1),
        )
