"""What a peer is, and what it says of a run.

Nothing but the standard library: other engines' environments load this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.workloads import WorkloadRequest

Tokens = list[list[int]]  # one list an answer: those of the first request, then those of the second, and so on

# A request with a token of its own: what a fresh process does first.
FIRST = (WorkloadRequest(tuple(range(10, 18)), 1),)
WARM_UP = (WorkloadRequest(tuple(range(10, 18)), 4), WorkloadRequest(tuple(range(20, 24)), 4))


@dataclass(frozen=True)
class Settings:
    """What peers that have such a setting share, so that they get the same room."""

    batch_size: int = 16  # rows of a padded batch
    kv_tokens: int = 8192  # tokens that a pool holds
    max_batch_tokens: int = 512  # tokens computed in a step


@dataclass(frozen=True)
class Report:
    """What a peer says of a run, besides its tokens. None: it has no way to tell, or it doesn't apply."""

    kv_bytes: int  # reserved for K and V
    token_occupancy: float | None  # slots that held tokens per slot allocated, over all steps
    done_seconds: tuple[float, ...]  # from the start until each request's last token was there
    first_token_seconds: tuple[float, ...] | None = None
    num_steps: int | None = None
    num_preemptions: int | None = None
    num_fallbacks: int | None = None
    prefix_hit_rate: float | None = None  # prompt tokens that were cached already, per prompt token


class Peer(Protocol):
    """Started once in a process of its own, then asked for one workload."""

    def run(self, requests: Sequence[WorkloadRequest]) -> tuple[Tokens, Report]:
        """All requests at once; none follows another. Exactly the tokens that are wanted come back."""

    def close(self) -> None:
        """Ends what runs in the background."""
