"""When requests arrive: seconds from the start, one a request. Equal arguments, equal times."""

from __future__ import annotations

import random


def gamma_arrivals(count: int, rate: float, cv: float, seed: int = 1) -> list[float]:
    """Arrivals at `rate` a second whose gaps are gamma-distributed; the first comes after a gap too.

    Args:
        count: how many.
        rate: mean arrivals a second, above 0.
        cv: coefficient of variation of the gaps: 1 is a Poisson process, more comes in bursts, 0 is a clock.
        seed: of the draws.

    Raises:
        ValueError: the rate isn't above 0, or the cv is below 0.
    """
    if rate <= 0 or cv < 0:
        raise ValueError(f"A rate must be above 0 and a cv at least 0, not {rate:g} and {cv:g}.")
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        # shape k and scale s have mean k * s and cv 1 / sqrt(k)
        now += rng.gammavariate(1 / cv**2, cv**2 / rate) if cv else 1 / rate
        times.append(now)
    return times


def poisson_arrivals(count: int, rate: float, seed: int = 1) -> list[float]:
    """A Poisson process at `rate` a second.

    Raises:
        ValueError: the rate isn't above 0.
    """
    return gamma_arrivals(count, rate, 1.0, seed)
