"""Beam searches of a pipeline's items that run together, each in stock's own loop, as if it were alone.

Stock's loop can't be left in its middle, so each search has a thread of its own that stands still until its logits are
there. Only one thread ever runs: whoever drives the engine wakes the searches one after another, and waits for each.

    driver    step ─┬─ wake 1 ─┬─ wake 2 ─┬─ wake 3 ─┬─ step ─ ...     one packed step for the beams of all searches
    search 1        └ choose ──┘          │          │                 stock's loop, to its next forward
    search 2                   └ choose ──┘          │
    search 3                              └ choose ──┘
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hf_paged.engine.engine import PagedEngine
from hf_paged.engine.external import ExternalRows
from hf_paged.errors import PagedError
from hf_paged.integrations import beams
from hf_paged.integrations.decoding import Batch

# Searches that have begun. Each thread that computes gets a team of torch's own threads.
_MOST_RUNNING = 32


class _Cancelled(BaseException):
    """Unwinds a search that nobody waits for any more."""


class BeamCall:
    """A `generate` call of one prompt with beams whose tokens come later.

    Args:
        original: stock's `_beam_search`.
        model: the one that it was called on.
        engine: the model's.
        batch: what it was called with; rows `[num_beams, P]`.
        seed: where beams are sampled, they draw as stock's do after `torch.manual_seed(seed)`.
    """

    def __init__(
        self, original: Callable[..., Any], model: Any, engine: PagedEngine, batch: Batch, seed: int | None
    ) -> None:
        self.engine = engine
        self.num_sequences: int = batch.config.num_beams
        self.num_prompt_tokens = batch.input_ids.shape[1]
        self.error: BaseException | None = None
        self.num_blocks = 0  # that the pool was asked to have for it
        self._search = (original, model, engine, batch)
        self._device = batch.input_ids.device
        self._seed = seed
        self._random: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._result: torch.Tensor | None = None
        self._rows: ExternalRows | None = None
        self._awaited: Sequence[int] = ()
        self._is_cancelled = False
        self._go, self._stands_still = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the tokens, or an error, are there."""
        return self._result is not None or self.error is not None

    @property
    def is_ready(self) -> bool:
        """Whether it can go on: its logits are there, or will never be."""
        return self._rows is None or self._rows.are_ready(self._awaited)

    def sequences(self) -> torch.Tensor:
        """What the call would have returned: `[num_return_sequences, P + new]` on the CPU.

        Raises what ended the search early.
        """
        if self.error is not None:
            raise self.error
        assert self._result is not None
        return self._result.cpu()

    def most_blocks(self) -> int:
        """Blocks that its beams hold at most."""
        _, _, engine, batch = self._search
        return beams.most_blocks(engine, batch)

    def go_on(self, reserve: Callable[[int], int]) -> None:
        """Runs the search to its next forward, or to its end. Not to be called under the engine's lock.

        Args:
            reserve: called with the blocks that its beams may hold from now on.
        """
        with self._own_random():
            if self._thread is None:
                # what the caller's thread was told about gradients holds in its own, too
                is_inference = torch.is_inference_mode_enabled()
                name = f"beams of {self.num_prompt_tokens} tokens"
                self._thread = threading.Thread(target=self._main, args=(is_inference, reserve), name=name, daemon=True)
                self._thread.start()
            else:
                self._go.release()
            self._stands_still.acquire()

    def _main(self, is_inference: bool, reserve: Callable[[int], int]) -> None:
        try:
            with torch.inference_mode() if is_inference else torch.no_grad():
                self._result = beams.search(*self._search, wait=self._wait, reserve=reserve)
        except _Cancelled:
            pass
        except BaseException as error:  # it is raised where the result is asked for
            self.error = error
        finally:
            self._rows = None
            self._stands_still.release()

    def _wait(self, rows: ExternalRows, awaited: Sequence[int]) -> None:
        # in the search's thread
        self._rows, self._awaited = rows, awaited
        self._stands_still.release()
        self._go.acquire()
        if self._is_cancelled:
            raise _Cancelled

    def cancel(self) -> None:
        """Gives up its blocks. The thread ends by itself: whoever cancels may hold locks that it asks for."""
        rows = self._rows
        if rows is not None:
            rows.close()
            self._is_cancelled = True
            self._go.release()

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        # torch's generators are those of this search while it runs
        if self._seed is None:
            yield
            return
        device = None if self._device.type in ("cpu", "meta") else self._device
        kind = "cuda" if device is None else device.type
        with torch.random.fork_rng([] if device is None else [device], device_type=kind):
            if self._random is None:
                torch.manual_seed(self._seed)
            else:
                torch.set_rng_state(self._random[0])
                if device is not None:
                    getattr(torch, kind).set_rng_state(self._random[1], device)
            yield
            self._random = (
                torch.get_rng_state(),
                None if device is None else getattr(torch, kind).get_rng_state(device),
            )


class BeamsInFlight:
    """The unfinished beam searches of a caller, who drives the engine's loop. `close` ends what is left."""

    def __init__(self) -> None:
        self._waiting: list[BeamCall] = []
        self._running: list[BeamCall] = []
        self._process = os.getpid()

    @property
    def num_sequences(self) -> int:
        """Beams of all unfinished searches."""
        return sum(call.num_sequences for call in (*self._waiting, *self._running))

    def submit(self, call: BeamCall) -> None:
        """Lets a search begin as soon as the pool has room for its beams beside the others'."""
        self._waiting.append(call)

    def has_room(self, engine: PagedEngine) -> bool:
        """Whether one more search could begin soon."""
        return self.num_sequences < engine.config.max_requests_per_batch

    def step(self, engine: PagedEngine) -> list[BeamCall]:
        """Lets every search that has its logits choose, then runs one step for everybody; returns which ended.

        Raises:
            EngineClosedError: the engine was closed.
        """
        while self._waiting and self._may_begin(engine, self._waiting[0]):
            self._running.append(self._waiting.pop(0))
            self._go_on(engine, self._running[-1])
        for call in self._running:
            if not call.is_finished and call.is_ready:
                self._go_on(engine, call)
        ended = [call for call in self._running if call.is_finished]
        if ended:
            self._running = [call for call in self._running if not call.is_finished]
            return ended
        with engine.lock:
            if not engine.advance():
                raise PagedError("The engine has beams to compute but nothing to run; its scheduler has a defect.")
        return []

    def _may_begin(self, engine: PagedEngine, call: BeamCall) -> bool:
        most = engine.config.max_queue_size
        if most is not None and engine.core.scheduler.num_waiting >= most:
            return False
        if not self._running:
            return True
        held = sum(other.most_blocks() for other in self._running)
        return len(self._running) < _MOST_RUNNING and held + call.most_blocks() <= engine.room()

    def _go_on(self, engine: PagedEngine, call: BeamCall) -> None:
        def reserve(num_blocks: int) -> int:
            call.num_blocks = num_blocks
            return engine.reserve(sum(other.num_blocks for other in self._running))

        call.go_on(reserve)

    def close(self) -> None:
        """Ends what has not ended. Closing twice does nothing."""
        running, self._running, self._waiting = self._running, [], []
        if os.getpid() != self._process:  # a forked child: the threads, the locks and the requests are its parent's
            return
        for call in running:
            call.cancel()
