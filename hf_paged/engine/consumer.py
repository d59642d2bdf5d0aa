"""A caller that waits for requests of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import TYPE_CHECKING

from hf_paged.errors import GenerationFailedError
from hf_paged.request import Request, RequestOutput

if TYPE_CHECKING:
    from hf_paged.engine.engine import PagedEngine


class Consumer:
    """Queues of one caller's requests, from before they are added until it leaves; what it leaves behind is aborted."""

    def __init__(self, engine: PagedEngine, requests: SequenceOf[Request]) -> None:
        self._engine = engine
        self._requests = requests
        self._added: list[Request] = []

    def __enter__(self) -> list[deque[RequestOutput]]:
        queues = []
        with self._engine.lock:
            self._engine.core.notice_weights()
            try:
                for request in self._requests:
                    self._engine.admit(request)
                    self._added.append(request)
                    queue = self._engine.open_queue(request.request_id)
                    queues.append(queue)
            except BaseException:
                self._leave()
                raise
        return queues

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._engine.lock:
            self._leave()

    def _leave(self) -> None:
        for request in self._added:
            self._engine.close_queue(request.request_id)
            request.is_abandoned = True
            self._engine.core.abort(request)


def raise_failure(outputs: SequenceOf[RequestOutput]) -> None:
    """Raises GenerationFailedError, with all outputs, if one of them failed."""
    failed = [output for output in outputs if output.error is not None]
    if failed:
        error = failed[0].error
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise GenerationFailedError(
            f"Request {failed[0].request_id!r}{others} failed: {type(error).__name__}: {error}", outputs
        ) from error
