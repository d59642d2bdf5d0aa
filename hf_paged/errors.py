"""The exceptions of the package. Every message says what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class PagedError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(PagedError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class RequestError(PagedError, ValueError):
    """A request is malformed and was not accepted. Nothing else is affected."""


class CapacityError(RequestError):
    """A request can never fit, or the queue is full. The message holds the number that would fit."""


class UnknownRequestError(PagedError, KeyError):
    """No request of that id is known to the engine."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class EngineClosedError(PagedError, RuntimeError):
    """The engine was closed; make a new one."""


class UnsupportedModelError(PagedError, RuntimeError):
    """The model can't run in a packed step; the message says why."""


class PackedStepError(PagedError, RuntimeError):
    """A packed step met attention that it can't prove right, so it stopped instead of returning wrong numbers."""


class GrammarError(PagedError, RuntimeError):
    """A request can't go on as its grammar says, because of the vocabulary or of other settings."""


class GenerationFailedError(PagedError, RuntimeError):
    """A request ended with `finish_reason="error"`. `__cause__` is what ended it, `outputs` are all of the call's."""

    def __init__(self, message: str, outputs: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.outputs = tuple(outputs)


class PoolMemoryError(PagedError, MemoryError):
    """The block pool doesn't fit into memory; the message names the setting to change."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known ones, or the whole list."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(known)}"
