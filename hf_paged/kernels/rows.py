"""From the shape that a model computes in, `[B, H, n, D]`, to the packed one, `[T, H, D]` with T = B * n, and back.

A packed step has one row of all tokens, `[1, H, T, D]`. Models with recurrent states compute one row a sequence; their
tokens are packed row after row, which is the order of the step's sequences.
"""

from __future__ import annotations

import torch


def by_token(states: torch.Tensor) -> torch.Tensor:
    """`[B, H, n, D]` -> `[B * n, H, D]`, a view where B or n is 1."""
    if states.shape[0] == 1:
        return states[0].transpose(0, 1)
    return states.transpose(1, 2).flatten(0, 1)


def by_head(states: torch.Tensor) -> torch.Tensor:
    """`[B, H, n, D]` -> `[H, B * n, D]`, a view where B is 1."""
    if states.shape[0] == 1:
        return states[0]
    return states.transpose(0, 1).flatten(1, 2)


def in_rows(output: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`[B * n, H, D]` -> `[B, n, H, D]`, a view."""
    return output.unsqueeze(0) if num_rows == 1 else output.view(num_rows, -1, *output.shape[1:])
