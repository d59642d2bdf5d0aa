"""Rows that someone outside the engine drives: the engine computes their logits, the caller chooses their tokens."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from types import TracebackType

import torch
from transformers import LogitsProcessorList
from transformers.cache_utils import Cache

from hf_paged.engine.engine import PagedEngine
from hf_paged.engine.params import SamplingParams
from hf_paged.engine.returned_cache import copy_rows, dense_rows
from hf_paged.errors import CapacityError, PagedError
from hf_paged.request import Request, Sequence, SequenceState


def external_sampling() -> SamplingParams:
    """The sampling of a request whose tokens are chosen outside."""
    return SamplingParams(LogitsProcessorList(), (), frozenset(), False, (), is_external=True)


class ExternalRows:
    """The sequences of some requests, as rows 0, 1, 2, ... A context manager: leaving ends those that haven't ended.

    Rows may go on from one another, as beams do: `reorder` moves row numbers between sequences, and forks only where
    two rows go on from one.

        row           0  1  2  3
        sequence      a  b  c  d
        goes on from  2  0  2  0
        sequence      c  a  b  d      c and a change their rows; b and d give up their blocks and share c's and a's

    The requests' `max_new_tokens` may be more than fits: most rows end long before, and `append` raises if one doesn't.

    Args:
        engine: computes the rows, together with whatever else it runs.
        requests: with `external_sampling()`; siblings are rows one after another.
    """

    def __init__(self, engine: PagedEngine, requests: SequenceOf[Request]) -> None:
        self._engine = engine
        self._core = engine.core
        self._requests: list[Request] = []
        self._asked = requests
        self._reordered: list[Sequence] = []  # by row, once a row went on from another

    def __enter__(self) -> ExternalRows:
        with self._engine.lock:
            self._core.notice_weights()
            try:
                for request in self._asked:
                    self._engine.admit(request)
                    self._requests.append(request)
            except BaseException:
                self.finish(range(len(self._sequences())))
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _sequences(self) -> list[Sequence]:
        return self._reordered or [sequence for request in self._requests for sequence in request.sequences]

    def logits(self, rows: SequenceOf[int]) -> list[torch.Tensor]:
        """Logits `[vocab]` float32 for the next token of each of `rows`. Runs steps until they are there.

        Raises what ended a row early.
        """
        while True:
            with self._engine.lock:
                found = self._found(rows)
                if found is not None:
                    return found
                if not self._engine.advance():
                    raise PagedError(
                        "The engine has rows without logits but nothing to run; its scheduler has a defect."
                    )

    def are_ready(self, rows: SequenceOf[int]) -> bool:
        """Whether `logits` would return, or raise, without running a step."""
        with self._engine.lock:
            try:
                return self._found(rows) is not None
            except Exception:
                return True

    def _found(self, rows: SequenceOf[int]) -> list[torch.Tensor] | None:
        for request in self._requests:
            if request.error is not None:
                raise request.error
        if any(len(request.sequences) < request.num_sequences for request in self._requests):
            return None
        sequences = self._sequences()
        found = [sequences[row].next_logits for row in rows]
        return None if any(logits is None for logits in found) else found

    def reorder(self, rows: SequenceOf[int], parents: SequenceOf[int]) -> None:
        """Row `rows[i]` goes on from what row `parents[i]` has been; blocks are shared, and copied when written.

        To be called when the rows have their logits and before their next tokens. Rows go on from siblings only.

        Raises:
            PagedError: a parent is not among the rows, or of another request.
        """
        with self._engine.lock:
            sequences = self._sequences()
            sources = [sequences[parent] for parent in parents]
            if not set(parents) <= set(rows):
                raise PagedError("A row can only go on from one of the rows that are reordered together.")
            if any(sequences[row].request is not source.request for row, source in zip(rows, sources, strict=True)):
                raise PagedError("A row can only go on from a row of the same request.")
            given_up: dict[int, list[Sequence]] = {}
            for row in set(rows) - set(parents):
                given_up.setdefault(id(sequences[row].request), []).append(sequences[row])
            reordered, taken = list(sequences), set()
            for row, parent, source in zip(rows, parents, sources, strict=True):
                reordered[row] = source
                if parent in taken:
                    reordered[row] = given_up[id(source.request)].pop()
                    self._core.scheduler.replace(reordered[row], source)
                taken.add(parent)
            self._reordered = reordered

    def append(self, rows: SequenceOf[int], token_ids: SequenceOf[int]) -> None:
        """Gives rows their next tokens.

        Raises:
            CapacityError: a row alone has outgrown the pool, or the model's positions.
        """
        limits = [self._core.position_limit, self._core.allocator.max_tokens_per_sequence]
        limit = min((limit for limit in limits if limit is not None), default=None)
        with self._engine.lock:
            sequences = self._sequences()
            for row, token_id in zip(rows, token_ids, strict=True):
                sequence = sequences[row]
                if limit is not None and sequence.num_tokens >= limit:
                    raise CapacityError(
                        f"A row has {sequence.num_tokens} tokens and no room for more: the pool, or the model's "
                        f"positions, hold {limit}. Lower max_new_tokens, or raise num_blocks or memory_fraction of the "
                        "cache_config."
                    )
                sequence.token_ids.append(token_id)
                sequence.next_logits = None
                if sequence.state is SequenceState.IDLE:
                    self._core.scheduler.add(sequence)

    def finish(self, rows: SequenceOf[int]) -> None:
        """Ends rows and takes their blocks; those that have ended are left alone."""
        with self._engine.lock:
            sequences = self._sequences()
            for row in rows:
                sequences[row].next_logits = None
                if not sequences[row].is_finished:
                    self._core.finish(sequences[row], "stop", None)

    def close(self) -> None:
        """Ends all rows. Closing twice does nothing."""
        self.finish(range(len(self._sequences())))

    def copy(self, width: int) -> Cache | None:
        """The K and V of all rows as a cache of their own, `width` tokens a row; None if one of them was preempted."""
        with self._engine.lock:
            pool = self._core.runner.cache
            return None if pool is None else copy_rows(pool, self._core.get_model().config, self._sequences(), width)

    def extend(self, cache: Cache, start: int, width: int) -> None:
        """Adds the K and V of all rows to a cache: columns `start` to `width - 1` of the batch, left padding included.

        A row that was preempted is computed again for it. Raises what ended a row early.
        """
        sequences = self._sequences()
        with self._engine.lock:
            parts = [self._columns(sequences, start, width)] if all(map(_is_whole, sequences)) else []
        if not parts:  # perhaps they don't fit together
            parts = [self._columns_again(sequence, start, width) for sequence in sequences]
        with torch.no_grad():
            for layers in zip(*parts, strict=True):
                keys, values = (torch.cat([layer[index] for layer in layers]) for index in (1, 2))
                cache.update(keys, values, layers[0][0])

    def _columns(
        self, sequences: SequenceOf[Sequence], start: int, width: int
    ) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        pool = self._core.runner.cache
        assert pool is not None
        return list(dense_rows(pool, sequences, start, width))

    def _columns_again(
        self, sequence: Sequence, start: int, width: int
    ) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        while True:
            with self._engine.lock:
                if sequence.request.error is not None:
                    raise sequence.request.error
                if _is_whole(sequence):
                    return self._columns([sequence], start, width)
                if sequence.state is SequenceState.IDLE:
                    self._core.scheduler.add(sequence)
                if not self._engine.advance():
                    raise PagedError("A row was preempted and can't run again; the engine's scheduler has a defect.")


def _is_whole(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.RUNNING and sequence.num_uncomputed_tokens == 0
