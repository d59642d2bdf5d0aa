"""How far back queries see, for the plans that are made on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def first_visible(position: npt.NDArray[np.int64], window: int | None, chunk: int | None) -> npt.NDArray[np.int64]:
    """The first key that a query at each position sees."""
    first = np.zeros_like(position)
    if window is not None:
        first = np.maximum(first, position - window + 1)
    if chunk is not None:
        first = np.maximum(first, position // chunk * chunk)
    return first
