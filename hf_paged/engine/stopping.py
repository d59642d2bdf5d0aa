"""Decides, after a token was appended, whether a sequence goes on."""

from __future__ import annotations

import torch

from hf_paged.engine.history import history_of
from hf_paged.engine.params import SamplingParams
from hf_paged.request import Sequence


def finish_of(sequence: Sequence) -> tuple[str, int | str | None] | None:
    """The finish reason and the stop reason of a sequence that just got a token; None if it goes on."""
    request = sequence.request
    sampling: SamplingParams = request.sampling
    token = sequence.token_ids[-1]
    if token in sampling.eos_token_ids:
        return "stop", token
    if sampling.criteria:
        history = history_of(sequence, torch.device("cpu"))
        for finish_reason, stop_reason, criterion in sampling.criteria:
            if bool(torch.as_tensor(criterion(history, None)).any()):
                return finish_reason, stop_reason
    if sequence.num_generated_tokens >= request.max_new_tokens:
        return "length", None
    return None
