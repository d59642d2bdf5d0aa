"""The results of a paged pipeline over many inputs, in their order, each as soon as it and those before it are there.

inputs ─ preprocess ─ forward (deferred) ─▶ │ window: item, item, item, ... │ ─▶ postprocess, yielded
         one more whenever there is room    └── all in flight on the engine ┘    the oldest, once it has ended
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers.pipelines.pt_utils import PipelineDataset, PipelineIterator

from hf_paged.engine.in_flight import InFlight
from hf_paged.integrations.beam_calls import BeamCall, BeamsInFlight
from hf_paged.integrations.deferral import Deferral, DeferredCall, deferring
from hf_paged.integrations.progress import Progress

if TYPE_CHECKING:
    from transformers import Pipeline

    from hf_paged.request import Request

# Items taken from an iterator and not yet given to the caller, for each sequence that the engine runs at once: one slow
# item at the front shouldn't leave the engine idle, and an endless iterator shouldn't be read for ever.
_WINDOW_PER_SEQUENCE = 4

logger = logging.getLogger("hf_paged")


@functools.cache
def say_once(message: str) -> None:
    """A warning, once a process."""
    logger.warning(message)


@dataclass
class _Item:
    """One input on its way: an error, the outputs of forward, or both those and the tokens that are still to come."""

    outputs: dict[str, Any] | None = None
    call: DeferredCall | BeamCall | None = None
    error: Exception | None = None


class EarlierError(Exception):
    """The cause of an error that is raised later than it happened: where it happened, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def _detached(error: Exception) -> Exception:
    # An error that waits for its turn in the window must not hold the frames that it came through: they hold the
    # iterator, and one that is dropped would live, and its requests with it, until the collector finds the circle.
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error.__traceback__ = error.__context__ = None
    error.__cause__ = EarlierError(text)
    return error


class PagedPipelineIterator(IterableDataset[Any]):
    """An iterator as stock's pipelines return: iterating again starts again, where the inputs allow it.

    An item that fails raises in its place; those behind it are unharmed, and `next` goes on with them. Dropping the
    iterator, or `close`, aborts what runs.

    Args:
        pipe: the pipeline, for its steps.
        inputs: a sized dataset, or an iterable.
        params: keywords of preprocess, forward and postprocess.
        num_workers: processes of a DataLoader that preprocess ahead; 0 does it here.
        seed: item i's generator is seeded with seed + i. None draws it from torch's own generator when one samples.
        has_progress: whether a bar is shown.
        is_eager: the caller reads everything before it does anything else, and gives up at the first error.
        why_at_once: why no item may run beside others; None if they may.
    """

    def __init__(
        self,
        pipe: Pipeline,
        inputs: Any,
        params: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]],
        *,
        num_workers: int,
        seed: int | None,
        has_progress: bool,
        is_eager: bool,
        why_at_once: str | None,
    ) -> None:
        self._pipe = pipe
        self._inputs = inputs
        self._preprocess_params, self._forward_params, self._postprocess_params = params
        self._num_workers = num_workers
        self._given_seed = seed
        self._has_progress = has_progress
        self._is_eager = is_eager
        self._why_at_once = why_at_once
        self._source: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> PagedPipelineIterator:
        goes_on = self._source is not None and isinstance(self._inputs, Iterator)
        if not goes_on:
            self._start()
        return self

    def __enter__(self) -> PagedPipelineIterator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self.close()
        self._source = self._preprocessed()
        self._seed = self._given_seed
        self._num_taken = 0
        self._window: deque[_Item] = deque()
        self._in_flight = InFlight()
        self._beams = BeamsInFlight()
        self._finalizer = weakref.finalize(self, _close, self._in_flight, self._beams)
        self._finalizer.atexit = False
        self._may_have_changed = True  # the weights, since the last submitted request
        is_sized = isinstance(self._inputs, Sized)
        self._progress = Progress(len(self._inputs) if is_sized else None) if self._has_progress else None

    def close(self) -> None:
        """Aborts what runs. The iterator ends."""
        if self._source is None:
            return
        self._finalizer()
        self._source = iter(())
        self._window.clear()
        if self._progress is not None:
            self._progress.close()

    def _preprocessed(self) -> Iterator[Any]:
        is_indexed = isinstance(self._inputs, Sized) and not isinstance(self._inputs, IterableDataset)
        if self._num_workers:
            wrap = PipelineDataset if is_indexed else PipelineIterator
            dataset = wrap(self._inputs, self._pipe.preprocess, self._preprocess_params)
            num_workers = self._num_workers if is_indexed else 1  # each worker would read the whole iterable
            return iter(DataLoader(dataset, batch_size=None, num_workers=num_workers, collate_fn=_unchanged))
        return map(
            functools.partial(_preprocess, self._pipe, self._preprocess_params),
            _Indexed(self._inputs) if is_indexed else iter(self._inputs),
        )

    # -- taking items in --------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        while self._has_room():
            try:
                self._window.append(self._take())
            except StopIteration:
                self._source = iter(())
                return

    def _has_room(self) -> bool:
        if not self._window:
            return True
        newest = self._window[-1].call
        if newest is None:  # it ran at once, or failed; more of its kind would keep the first ones waiting
            return False
        most = newest.engine.config.max_requests_per_batch * _WINDOW_PER_SEQUENCE
        in_flight = self._beams if isinstance(newest, BeamCall) else self._in_flight
        return (self._is_eager or len(self._window) < most) and in_flight.has_room(newest.engine)

    def _take(self) -> _Item:
        assert self._source is not None
        try:
            return self._forward(next(self._source))
        except StopIteration:
            raise
        except Exception as error:
            return _Item(error=_detached(error) if self._window else error)
        finally:
            self._num_taken += 1

    def _forward(self, model_inputs: Any) -> _Item:
        if self._seed is None and self._why_at_once is None:
            self._seed = int(torch.randint(2**62, ()))
        own = tuple(self._forward_params.get("logits_processor") or ())
        deferral = Deferral((self._seed or 0) + self._num_taken, own)
        with contextlib.ExitStack() as stack:
            if self._given_seed is not None:  # for those that run at once
                stack.enter_context(seeded(self._given_seed + self._num_taken, self._pipe.device))
            if self._why_at_once is None:
                stack.enter_context(deferring(deferral))
            outputs = self._pipe.forward(model_inputs, **self._forward_params)
        why = self._why_at_once or deferral.why_not
        if why is not None:
            say_once(f"A pipeline runs its prompts one after another because of {why}.")
        if deferral.taken is None:
            self._count(1, _num_new_tokens(outputs))
            return _Item(outputs)
        call = deferral.taken
        if isinstance(call, BeamCall):
            self._beams.submit(call)
            return _Item(outputs, call)
        self._in_flight.submit(call.engine, call.request, notice_weights=self._may_have_changed)
        self._may_have_changed = False
        return _Item(outputs, call)

    # -- giving results out -----------------------------------------------------------------------------------------

    def __next__(self) -> Any:
        if self._source is None:
            self._start()
        try:
            with self._pipe.device_placement(), torch.no_grad():
                outputs = self._next_outputs()
            return self._pipe.postprocess(outputs, **self._postprocess_params)
        except BaseException:
            if self._is_eager:
                self.close()
            raise

    def _next_outputs(self) -> dict[str, Any]:
        self._may_have_changed |= not self._is_eager  # the caller had its turn
        self._fill()
        if not self._window:
            self.close()
            raise StopIteration
        while (call := self._window[0].call) is not None and not call.is_finished:
            if self._step(call):
                self._fill()
        item = self._window.popleft()
        if item.error is not None:
            raise item.error
        assert item.outputs is not None
        if item.call is None:
            return item.outputs
        return {**item.outputs, "generated_sequence": item.call.sequences()[None]}

    def _step(self, awaited: DeferredCall | BeamCall) -> int:
        # how many items have ended since the last step
        ended: Sequence[Request | BeamCall]
        if isinstance(awaited, BeamCall):
            ended = calls = self._beams.step(awaited.engine)
            tokens = sum(_num_new_beam_tokens(call) for call in calls)
        else:
            ended = requests = self._in_flight.step(awaited.engine, awaited.request)
            tokens = sum(sequence.num_generated_tokens for request in requests for sequence in request.sequences)
        for one in ended:
            if isinstance(one.error, Exception):
                _detached(one.error)
        if ended:
            self._count(len(ended), tokens)
        return len(ended)

    def _count(self, num_prompts: int, num_tokens: int) -> None:
        if self._progress is not None:
            self._progress.count(num_prompts, num_tokens, self._in_flight.num_sequences + self._beams.num_sequences)


class _Indexed(Iterator[Any]):
    """The items of a dataset by index: one that raises doesn't end it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._index = 0

    def __next__(self) -> Any:
        if self._index >= len(self._dataset):
            raise StopIteration
        self._index += 1
        return self._dataset[self._index - 1]


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's generators as after `torch.manual_seed(seed)`; behind it, those of the CPU and of `device` go on."""
    devices = [device] if device.type not in ("cpu", "meta") else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def _close(in_flight: InFlight, beams: BeamsInFlight) -> None:
    in_flight.close()
    beams.close()


def _num_new_beam_tokens(call: BeamCall) -> int:
    if call.error is not None:
        return 0
    sequences = call.sequences()
    return len(sequences) * (sequences.shape[1] - call.num_prompt_tokens)


def _preprocess(pipe: Pipeline, params: Mapping[str, Any], item: Any) -> Any:
    return pipe.preprocess(item, **params)


def _unchanged(item: Any) -> Any:
    return item


def _num_new_tokens(outputs: Mapping[str, Any]) -> int:
    sequences, prompt = outputs["generated_sequence"], outputs["input_ids"]
    num_prompt_tokens = prompt.shape[-1] if prompt is not None else 0
    return int(sequences.shape[1] * (sequences.shape[-1] - num_prompt_tokens))
