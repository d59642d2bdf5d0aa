"""P50, P95 and P99."""

from __future__ import annotations

from collections.abc import Sequence

SHARES = (50, 95, 99)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The smallest value that at least so many percent of the values don't pass, for each of `SHARES`."""
    ordered = sorted(values)
    return {f"p{share}": ordered[max(0, -(-len(ordered) * share // 100) - 1)] for share in SHARES}
