"""From records to what a user of a server feels.

    due ──────────▶ first token ──▶ token ──▶ ... ──▶ last token
     └──── TTFT ─────┘└──── ITL ─────┘                 │
     └────────────────────── end to end ───────────────┘      TPOT: first to last token, per token after the first

Goodput is the requests a second that keep every goal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load import Record
from benchmarks.percentiles import percentiles


@dataclass(frozen=True)
class Goals:
    """Seconds that a request may take; None: as long as it likes."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def are_kept(self, record: Record) -> bool:
        """Whether the request ended well and within all of them."""
        if record.error is not None:
            return False
        pairs = ((self.ttft, ttft(record)), (self.tpot, tpot(record)), (self.e2e, e2e(record)))
        return all(goal is None or value is None or value <= goal for goal, value in pairs)


def ttft(record: Record) -> float:
    """Seconds from when a request was due to its first token."""
    return record.arrivals[0] - record.due


def e2e(record: Record) -> float:
    """Seconds from when a request was due to its last token."""
    return record.arrivals[-1] - record.due


def tpot(record: Record) -> float | None:
    """Seconds for a token after the first; None where there is no other."""
    if record.num_tokens < 2:
        return None
    return (record.arrivals[-1] - record.arrivals[0]) / (record.num_tokens - 1)


def gaps(record: Record) -> list[float]:
    """Seconds between one arrival of tokens and the next."""
    return [later - earlier for earlier, later in itertools.pairwise(record.arrivals)]


def summarise(records: Sequence[Record], goals: Goals) -> dict[str, Any]:
    """What a result file says of one load. Percentiles are over the requests that ended well; None without any.

    `seconds` is from the start to the last token.
    """
    good = [record for record in records if record.error is None]
    seconds = max((record.arrivals[-1] for record in good), default=0.0)
    num_kept = sum(map(goals.are_kept, records))
    samples = {
        "ttft": [ttft(record) for record in good],
        "tpot": [value for value in map(tpot, good) if value is not None],
        "itl": [gap for record in good for gap in gaps(record)],
        "e2e": [e2e(record) for record in good],
    }
    return {
        "num_requests": len(records),
        "num_failed": len(records) - len(good),
        "errors": sorted({record.error for record in records if record.error is not None})[:5],
        "seconds": seconds,
        "requests_per_second": len(good) / seconds if seconds else 0.0,
        "output_tokens_per_second": sum(record.num_tokens for record in good) / seconds if seconds else 0.0,
        "goodput_requests_per_second": num_kept / seconds if seconds else 0.0,
        "share_within_goals": num_kept / len(records) if records else 0.0,
        **{f"{name}_seconds": percentiles(values) if values else None for name, values in samples.items()},
    }
