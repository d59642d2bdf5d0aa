"""Requests of one caller that join one after another, while earlier ones run."""

from __future__ import annotations

import os

from hf_paged.engine.engine import PagedEngine
from hf_paged.errors import PagedError
from hf_paged.request import Request

# New tokens a sequence that the pool is made for at first; it grows with those that last longer.
_HORIZON = 256
_STEPS_BETWEEN_LOOKS = 64


class InFlight:
    """The unfinished requests of a caller who reads the requests themselves, and who drives the engine's loop.

    `close` aborts what is left; the caller sees to it that it is called.
    """

    def __init__(self) -> None:
        self._joining: list[tuple[PagedEngine, Request]] = []  # to be admitted by the next step, under its lock
        self._running: list[tuple[PagedEngine, Request]] = []
        self._must_notice_weights = False
        self._steps_until_look = 0
        self._process = os.getpid()

    @property
    def num_sequences(self) -> int:
        """Sequences that the unfinished requests have, or will have."""
        return sum(request.num_sequences for _, request in (*self._joining, *self._running))

    def submit(self, engine: PagedEngine, request: Request, *, notice_weights: bool) -> None:
        """Lets a request join at the next step.

        Args:
            engine: the one that runs it.
            request: with an id of its own.
            notice_weights: whether the weights may have changed since the caller's last request.
        """
        request.is_abandoned = True
        self._joining.append((engine, request))
        self._must_notice_weights |= notice_weights

    def has_room(self, engine: PagedEngine) -> bool:
        """Whether one more request could start within the next steps."""
        return self.num_sequences < engine.config.max_requests_per_batch and not self._is_queue_full(engine)

    def _is_queue_full(self, engine: PagedEngine, num_joining: int | None = None) -> bool:
        most = engine.config.max_queue_size
        num_joining = len(self._joining) if num_joining is None else num_joining
        return most is not None and engine.core.scheduler.num_waiting + num_joining >= most

    def step(self, engine: PagedEngine, awaited: Request) -> list[Request]:
        """Runs one step for everybody, unless the request that is waited for has ended; returns who ended since.

        Raises:
            EngineClosedError: the engine was closed.
        """
        with engine.lock:
            if not awaited.is_finished:
                self._admit(engine)
                self._reserve(engine)
                if not engine.advance():
                    raise PagedError(
                        "The engine has unfinished requests but nothing to run; its scheduler has a defect."
                    )
            ended = [request for _, request in self._running if request.is_finished]
        if ended:
            self._running = [pair for pair in self._running if not pair[1].is_finished]
        return ended

    def _admit(self, engine: PagedEngine) -> None:
        joining, self._joining = self._joining, []
        if joining and self._must_notice_weights:
            engine.core.notice_weights()
            self._must_notice_weights = False
        for asked_of, request in joining:
            if asked_of is engine and not self._is_queue_full(engine, 0):
                engine.admit(request)
                self._running.append((engine, request))
                self._steps_until_look = 0
            else:  # others have filled the queue meanwhile
                self._joining.append((asked_of, request))

    def _reserve(self, engine: PagedEngine) -> None:
        # for all that the engine runs: callers that shared a pool made for one of them would take it from each other
        self._steps_until_look -= 1
        if self._steps_until_look >= 0:
            return
        self._steps_until_look = _STEPS_BETWEEN_LOOKS
        needed = 0
        for request in engine.core.requests.values():
            longest = max(sequence.num_generated_tokens for sequence in request.sequences)
            num_new_tokens = min(request.max_new_tokens, max(_HORIZON, 2 * longest))
            needed += request.num_sequences * engine.core.allocator.blocks_for(
                request.num_prompt_tokens + num_new_tokens
            )
        engine.reserve(needed)

    def close(self) -> None:
        """Aborts what has not ended. Closing twice does nothing."""
        running, self._running, self._joining = self._running, [], []
        if os.getpid() != self._process:  # a forked child: the locks and the requests are its parent's
            return
        for engine, request in running:
            with engine.lock:
                engine.core.abort(request)
