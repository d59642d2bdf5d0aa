"""The pipelines that are compared."""

from __future__ import annotations

OURS = "hf_paged pipeline"
STOCK = "stock pipeline, batch_size="
BATCH_SIZES = (1, 4, 8, 16)
ALONE = f"{STOCK}1"  # what the others' tokens are compared with
NAMES = (*(f"{STOCK}{size}" for size in BATCH_SIZES), OURS)


def batch_size_of(name: str) -> int:
    """The batch size of a stock pipeline's name."""
    return int(name.removeprefix(STOCK))
