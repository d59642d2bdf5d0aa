"""What processors and criteria see of a sequence, without building it anew for every token."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from hf_paged.request import Sequence


def history_of(sequence: Sequence, device: torch.device, drafts: SequenceOf[int] = ()) -> torch.Tensor:
    """`[1, tokens]` int64 on a device: left padding, prompt if it has tokens, what was generated so far, and `drafts`.

    A view of a buffer that grows with the sequence, so a processor must not write to it, as it must not in stock.
    """
    buffers: dict[torch.device, tuple[torch.Tensor | None, int]] = sequence.history or {}
    sequence.history = buffers
    start: tuple[int, ...] = sequence.request.sampling.history_start
    skipped = 0 if sequence.request.prompt_embeds is None else sequence.request.num_prompt_tokens
    length = len(start) + sequence.num_tokens - skipped
    whole = length + len(drafts)
    buffer, filled = buffers.get(device, (None, 0))
    # Outside inference mode: whoever drives the next step may not be in it, and must be able to write here.
    with torch.inference_mode(False), torch.no_grad():
        if buffer is None or whole > len(buffer):
            grown = torch.empty(2 * whole, dtype=torch.int64, device=device)
            if buffer is not None:
                grown[:filled] = buffer[:filled]
            buffer = grown
        if filled < length:
            known = max(0, filled - len(start)) + skipped
            tokens = [*(start if filled == 0 else ()), *sequence.token_ids[known:]]
            buffer[filled:length] = torch.tensor(tokens, dtype=torch.int64)
        buffers[device] = (buffer, length)
        if drafts:  # the next tokens are written over them
            buffer[length:whole] = torch.tensor(drafts, dtype=torch.int64)
    return buffer[None, :whole]
