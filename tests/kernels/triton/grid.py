"""The large grid of kernel settings: every seventh of all combinations, so that each value meets each of the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

GRID_NAMES = ("group_size", "options", "dtype", "block_size")


def grid(features: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any], torch.dtype, int]]:
    """Values of GRID_NAMES; options are none, or one of `features`."""
    combinations = itertools.product(
        [1, 3, 5, 8], [{}, *features], [torch.float32, torch.float16, torch.bfloat16], [8, 16, 32, 64, 128, 256]
    )
    return list(combinations)[::7]
