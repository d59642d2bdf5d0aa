"""A re-entrant lock that serves its waiters in the order they came."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """First come, first served, and the holder may take it again.

    Threads that drive one engine release and take its lock once a step. With a plain lock the one that just released
    it nearly always wins, and another thread's new request could wait for a whole generation.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._next_ticket = 0
        self._serving = 0
        self._abandoned: set[int] = set()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> FairLock:
        me = threading.get_ident()
        with self._condition:
            if self._owner == me:
                self._depth += 1
                return self
            ticket = self._next_ticket
            self._next_ticket += 1
            try:
                while self._serving != ticket:
                    self._condition.wait()
            except BaseException:
                self._give_up(ticket)
                raise
            self._owner, self._depth = me, 1
        return self

    def _give_up(self, ticket: int) -> None:
        # an interrupted waiter's turn is passed on, now or when it comes
        if self._serving == ticket:
            self._serve_next()
        else:
            self._abandoned.add(ticket)

    def _serve_next(self) -> None:
        self._serving += 1
        while self._serving in self._abandoned:
            self._abandoned.discard(self._serving)
            self._serving += 1
        self._condition.notify_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._condition:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._serve_next()
