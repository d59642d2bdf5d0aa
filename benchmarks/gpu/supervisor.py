"""Keeps the check within its time: runs workers as processes, ends those that hang, replaces those that die."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.journal import Journal

SPOILT = 3  # exit status of a worker: the device is unusable for its process, another one may go on
GRACE = 10.0  # seconds that a row may run past its part's deadline
MAX_RESTARTS = 20  # of one worker: each costs a row at the least, but a broken set-up must not loop
POLL = 0.2


class Supervisor:
    """Runs groups of workers.

    Args:
        command: makes the command line of shard i of n over some parts.
        journal: what the workers write.
        deadlines: of every part.
        changed: called when the journal has grown.
    """

    def __init__(
        self,
        command: Callable[[Sequence[str], tuple[int, int]], list[str]],
        journal: Journal,
        deadlines: Mapping[str, float],
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._command = command
        self._journal = journal
        self._deadlines = deadlines
        self._changed = changed
        self._size = -1

    def run(self, parts: Sequence[str], num_shards: int = 1) -> None:
        """Runs some parts to their end, or to their deadline."""
        shards = [(index, num_shards) for index in range(num_shards)]
        workers = {shard: self._start(parts, shard) for shard in shards}
        restarts = dict.fromkeys(shards, 0)
        last = max(self._deadlines[part] for part in parts) + GRACE
        try:
            while workers:
                time.sleep(POLL)
                self._look()
                for shard, worker in list(workers.items()):
                    if worker.poll() is None:
                        if time.time() > last or self._is_overdue(worker.pid):
                            worker.kill()
                            worker.wait()
                        else:
                            continue
                    del workers[shard]
                    if worker.returncode == 0:
                        continue
                    self._note_death(worker)
                    restarts[shard] += 1
                    if time.time() < last - GRACE and restarts[shard] <= MAX_RESTARTS:
                        workers[shard] = self._start(parts, shard)
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
            self._look()

    def _start(self, parts: Sequence[str], shard: tuple[int, int]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command(parts, shard), cwd=Path(__file__).parent.parent.parent)

    def _is_overdue(self, process: int) -> bool:
        row = self._journal.running(process)
        return row is not None and time.time() > self._deadlines[row["part"]] + GRACE

    def _note_death(self, worker: subprocess.Popen[bytes]) -> None:
        row = self._journal.running(worker.pid)
        if row is None:
            if worker.returncode != SPOILT:
                print(f"A worker ended with status {worker.returncode} outside of any row.", flush=True)
            return
        late = time.time() > self._deadlines[row["part"]]
        reason = "was ended at its part's deadline" if late else f"ended its process with status {worker.returncode}"
        self._journal.append("finished", row["part"], key=row["key"], status="error", error=f"The row {reason}.")

    def _look(self) -> None:
        size = self._journal.path.stat().st_size if self._journal.path.exists() else 0
        if size != self._size:
            self._size = size
            self._changed()
