"""Each entry in a process of its own with a time limit: a crash or a hang in one model loses no other.

A server process imports torch and transformers once; each run is a fork of it, which takes milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.models.entries import Entry
from tests.models.judging import judge

TIME_LIMIT_S = 240.0  # most take two seconds


Judge = Callable[[Entry], dict[str, Any]]


def _child(entry: Entry, connection: Connection, judge: Judge) -> None:
    import torch

    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        outcome = judge(entry)
    except Exception as error:
        outcome = {"mode": "failed", "why": f"{type(error).__name__}: {error}"}
    connection.send(outcome | {"seconds": round(time.monotonic() - started, 1)})
    connection.close()


def judge_isolated(
    all_entries: Iterable[Entry], num_processes: int = 1, time_limit_s: float = TIME_LIMIT_S, judge: Judge = judge
) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Judges entries, `num_processes` at a time; yields each with its outcome as it is done.

    An entry that crashes or takes longer than `time_limit_s` seconds has the mode "failed".
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.models.preloaded"])
    waiting = list(all_entries)[::-1]
    running: dict[Connection, tuple[Entry, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < num_processes:
            entry = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(entry, theirs, judge), daemon=True)
            process.start()
            theirs.close()
            running[ours] = (entry, process, time.monotonic() + time_limit_s)
        first_end = min(end for _, _, end in running.values())
        ready = wait(list(running), timeout=max(0.0, first_end - time.monotonic()))
        for connection, (entry, process, end) in list(running.items()):
            if connection not in ready and time.monotonic() < end:
                continue
            outcome = _received(connection, connection in ready, process, time_limit_s)
            del running[connection]
            connection.close()
            yield entry, {"class": entry.class_name, **outcome}


def _received(connection: Connection, is_ready: bool, process: Any, time_limit_s: float) -> dict[str, Any]:
    if not is_ready:
        process.kill()
        process.join()
        return {"mode": "failed", "why": f"it took more than {time_limit_s:.0f} seconds"}
    try:
        outcome: dict[str, Any] = connection.recv()
    except EOFError:
        process.join()
        return {"mode": "failed", "why": f"its process ended with code {process.exitcode}"}
    process.join()
    return outcome
