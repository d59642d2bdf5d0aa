"""Which block size and token budget suit a machine, a model and its prompts: measured, within a time limit.

the defaults  ─▶  other token budgets  ─▶  other block sizes at the best budget  ─▶  the best and the defaults again
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_paged import PagedConfig

BUDGETS = (1024, 256, 2048)
BLOCK_SIZES = (32, 8, 64)
# Two runs of the same settings differ by some percent: less than this isn't worth a setting.
WORTH = 0.05

Run = Callable[[PagedConfig], float]  # seconds of all prompts with these settings


@dataclass(frozen=True)
class Trial:
    """The best time of one pair of settings."""

    block_size: int
    max_batch_tokens: int
    seconds: float
    num_runs: int = 1


@dataclass(frozen=True)
class Tuning:
    """What was tried, the defaults first, and which of them is advised."""

    trials: Sequence[Trial]
    advised: Trial
    is_complete: bool  # whether the time was enough for all

    @property
    def default(self) -> Trial:
        """The trial of the defaults."""
        return self.trials[0]

    @property
    def keeps_defaults(self) -> bool:
        """Whether nothing that was tried is clearly faster."""
        return self.advised is self.default


def tune(run: Run, default_seconds: float, seconds: float, clock: Callable[[], float] = time.monotonic) -> Tuning:
    """Tries settings one after another while a run as long as the defaults' fits into what is left of the time.

    Args:
        run: runs all prompts with given settings; returns the seconds.
        default_seconds: what the defaults took.
        seconds: time for all tries.
        clock: gives seconds.
    """
    until = clock() + seconds
    defaults = PagedConfig()
    trials = {(defaults.block_size, defaults.max_batch_tokens): default_seconds}
    runs = dict.fromkeys(trials, 1)

    def attempt(block_size: int, max_batch_tokens: int) -> bool:
        if clock() + default_seconds > until:
            return False
        key = (block_size, max_batch_tokens)
        taken = run(PagedConfig(block_size=block_size, max_batch_tokens=max_batch_tokens))
        trials[key] = min(taken, trials.get(key, taken))
        runs[key] = runs.get(key, 0) + 1
        return True

    def best() -> tuple[int, int]:
        return min(trials, key=lambda key: trials[key])

    default = next(iter(trials))
    is_complete = all(attempt(defaults.block_size, budget) for budget in BUDGETS)
    budget = best()[1]
    is_complete = is_complete and all(attempt(size, budget) for size in BLOCK_SIZES)
    candidate = best()
    if candidate != default:  # one lucky run is no reason
        is_complete = attempt(*default) and attempt(*candidate) and is_complete
    done = {key: Trial(*key, taken, runs[key]) for key, taken in trials.items()}
    is_better = done[candidate].seconds < done[default].seconds * (1 - WORTH)
    return Tuning(tuple(done.values()), done[candidate if is_better else default], is_complete)
