"""Prompts given as embeddings instead of tokens.

request        e0 e1 e2 e3, then tokens 7 and 9           token_ids  0 0 0 0 7 9     the zeros only count
packed step    embed(token_ids), and over it the prompt's   e2 e3  |  embed(7) ...
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from hf_paged.scheduler.output import ScheduledSequence

# The first packed position of a run of given embeddings, and these: [n, hidden].
EmbeddedRows = tuple[tuple[int, torch.Tensor], ...]

# Two forwards of the same numbers: what is left is what a library does differently from call to call.
_TOLERANCE = 1e-4


def embedded_rows(scheduled: Sequence[ScheduledSequence]) -> EmbeddedRows:
    """Where a step has prompts that were given as embeddings, and which rows of them."""
    found = []
    position = 0
    for item in scheduled:
        embeds = item.sequence.request.prompt_embeds
        start = item.sequence.num_computed_tokens
        if embeds is not None and start < len(embeds):
            found.append((position, embeds[start : start + item.num_new_tokens]))
        position += item.num_new_tokens
    return tuple(found)


def embed_inputs(model: PreTrainedModel, input_ids: torch.Tensor, rows: EmbeddedRows) -> torch.Tensor:
    """`[B, N, hidden]`: the embeddings of `input_ids` [B, N], but those that were given where they were."""
    embeds: torch.Tensor = model.get_input_embeddings()(input_ids)
    flat = embeds.view(-1, embeds.shape[-1])
    for start, given in rows:
        flat[start : start + len(given)] = given.to(embeds)
    return embeds


def why_no_embeds(model: PreTrainedModel, device: torch.device) -> str | None:
    """Why tokens and embeddings can't stand side by side in a forward, or None if they can. Hold the model's lock.

    Stock gives embeddings for the prompt and tokens after it. One packed forward has both, so tokens are embedded
    before; some models do more with tokens than that.
    """
    name = type(model).__name__
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no inputs_embeds"
    ids = torch.tensor([[3, 1, 2]], device=device)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        actual = model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False).logits
    largest = float(expected.abs().amax())
    if not bool((actual - expected).abs().amax() <= _TOLERANCE * largest):
        return f"{name} does more with tokens than to embed them"
    return None
