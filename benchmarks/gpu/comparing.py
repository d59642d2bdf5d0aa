"""How far a result is from the exact one, and whether that will do."""

from __future__ import annotations

import math
from typing import Any

import torch

from hf_paged.kernels.kv_blocks import KVBlocks
from tests.kernels.tolerances import TOLERANCES


def errors(actual: torch.Tensor, exact: torch.Tensor) -> dict[str, Any]:
    """How far a result is from the float64 one, and whether that is within the tolerance of its dtype."""
    tolerance = TOLERANCES[actual.dtype]
    difference = (actual.double() - exact).abs()
    allowed = tolerance["atol"] + tolerance["rtol"] * exact.abs()
    share = float((difference / allowed).max())
    return {
        "ok": actual.shape == exact.shape and share <= 1,  # false for NaN
        "has_nan": not bool(actual.isfinite().all()),
        "max_error": known(float(difference.max())),
        "relative_error": known(float(difference.norm() / exact.norm())),  # of the whole result, in the 2-norm
        "share_of_tolerance": known(share),
    }


def known(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None


def dtype_name(dtype: torch.dtype, blocks: KVBlocks) -> str:
    """What is computed in, and what is stored in where that differs."""
    stored = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in (blocks.keys, blocks.values))
    computed = str(dtype).removeprefix("torch.")
    return computed if list(stored) == [computed] else f"{computed} on {' and '.join(stored)}"
