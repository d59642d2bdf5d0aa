"""The parts of the check, and how long each may take. No torch: it is read before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence

# Seconds kept for each part, in the order they run. What a part leaves goes to the next one.
BUDGETS: dict[str, float] = {
    "correctness": 95,
    "ceilings": 30,  # most of it for the start of the process that times; shares need these rows
    "decode": 110,
    "prefill": 55,
    "end_to_end": 160,
}
EXTRA_BUDGETS: dict[str, float] = {"tune_compile": 130, "tune": 180}  # only when asked for by name
SHARDED = ("correctness", "tune_compile")  # nothing is timed in them, so that several processes may share the card
ALL_PARTS = (*BUDGETS, *EXTRA_BUDGETS)


def deadlines(parts: Sequence[str], started: float, seconds: float) -> dict[str, float]:
    """When each part has to end so that the later ones still get what is kept for them.

    Args:
        parts: their names, in the order they run.
        started: when the first one starts, as time.time() gives it.
        seconds: for all of them.
    """
    budgets = {**BUDGETS, **EXTRA_BUDGETS}
    # Together they may want more than there is: then each gets its share.
    scale = min(1.0, seconds / sum(budgets[part] for part in parts))
    return {
        part: started + seconds - scale * sum(budgets[later] for later in parts[index + 1 :])
        for index, part in enumerate(parts)
    }
