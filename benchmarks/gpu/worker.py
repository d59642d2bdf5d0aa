"""Runs rows, one after another, and writes down each one's result."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.part import Row, Setting, rows_of
from benchmarks.gpu.supervisor import SPOILT


def work(
    parts: Sequence[str],
    setting: Setting,
    journal: Journal,
    deadlines: Mapping[str, float],
    since: float,
    shard: tuple[int, int] = (0, 1),
) -> int:
    """Runs the rows of some parts that aren't done yet, as far as time goes.

    Args:
        parts: their names.
        setting: where to run.
        journal: what is done already, and where results go.
        deadlines: when each part ends, as time.time() gives it.
        since: when this run began.
        shard: (i, n): only every n-th row, from the i-th.

    Returns:
        0, or SPOILT when a row left the device unusable.
    """
    for part in parts:
        own = replace(setting, deadline=deadlines[part])
        rows = rows_of(part, own)
        journal.append("planned", part, keys=[row.key for row in rows])
        done = journal.to_skip(since)
        for row in rows[shard[0] :: shard[1]]:
            if (part, row.key) in done:
                continue
            if own.time_left() <= 0:
                break
            journal.append("started", part, key=row.key)
            begin = time.perf_counter()
            result = _run(row, setting.device)
            journal.append("finished", part, key=row.key, seconds=time.perf_counter() - begin, **result)
            if not _is_usable(setting.device):
                return SPOILT
        del rows
        _free(setting.device)
    return 0


def _run(row: Row, device: torch.device) -> dict[str, Any]:
    try:
        result = row.run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        _free(device)
        return {"status": "error", "error": f"out of memory: {error}"[:500]}
    except Exception as error:  # a broken row must not end the others
        return {"status": "error", "error": f"{type(error).__name__}: {error}"[:2000]}
    return {"status": "ok" if result.get("ok", True) else "wrong", **result}


def _is_usable(device: torch.device) -> bool:
    """Whether the device still answers: after an illegal access everything fails until the process ends."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
