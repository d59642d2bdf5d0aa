"""The two ways to answer the demo's prompts, timed alike and measured alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from hf_paged import PagedConfig, PagedEngine
from hf_paged.compat import CACHE_KEYWORD

STOCK_BATCH = 16
BLOCK_SIZE = 16

# Called as work goes on: finished rows, tokens of the answers so far, seconds since the start.
Report = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Run:
    """What a run gave and took.

    `rows` holds each prompt's answer: its tokens up to its own limit, its end-of-sequence token included.
    `kv_bytes` is the KV memory reserved at the peak. `occupancy` is the slots that held tokens of a prompt or of its
    answer per slot reserved, summed over all steps.
    """

    rows: list[list[int]]
    seconds: float
    kv_bytes: int
    occupancy: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens in all answers."""
        return sum(len(row) for row in self.rows)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers per second."""
        return self.num_tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
        """The measures, without the answers."""
        return {
            "seconds": self.seconds,
            "output_tokens": self.num_tokens,
            "output_tokens_per_second": self.tokens_per_second,
            "kv_bytes_reserved": self.kv_bytes,
            "token_occupancy": self.occupancy,
            **self.details,
        }


def _ignore(num_finished: int, num_tokens: int, seconds: float) -> None:
    """A report to nobody."""


def run_stock(model: Any, ids: Sequence[list[int]], limits: Sequence[int], report: Report = _ignore) -> Run:
    """Stock `generate`, left-padded batches in the order of arrival.

    A batch runs until its longest answer is done, as `generate` has one limit a call; each row is then cut to its own.

    Args:
        model: a causal language model on any device.
        ids: token ids of each prompt.
        limits: most tokens of each answer.
        report: told of the progress after every token.
    """
    rows: list[list[int]] = []
    kv_bytes = held = slots = num_steps = 0
    start = time.perf_counter()
    for first in range(0, len(ids), STOCK_BATCH):
        batch, batch_limits = ids[first : first + STOCK_BATCH], limits[first : first + STOCK_BATCH]
        streamer = _ProgressStreamer(batch_limits, _eos_ids(model), len(rows), sum(map(len, rows)), start, report)
        input_ids, mask = _left_padded(batch, model)
        output = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=max(batch_limits),
            do_sample=False,
            streamer=streamer,
            return_dict_in_generate=True,
        )
        width = input_ids.shape[1]
        answers = [
            _cut(row, limit, _eos_ids(model))
            for row, limit in zip(output.sequences[:, width:].tolist(), batch_limits, strict=True)
        ]
        rows += answers
        kv_bytes = max(kv_bytes, _cache_bytes(getattr(output, CACHE_KEYWORD)))
        # A step's cache is as wide as the padded prompts and the tokens fed so far, whoever still needs them.
        steps = output.sequences.shape[1] - width
        slots += sum(len(batch) * (width + step) for step in range(steps))
        held += sum(len(p) + min(step, len(a)) for step in range(steps) for p, a in zip(batch, answers, strict=True))
        num_steps += steps
    seconds = time.perf_counter() - start
    report(len(rows), sum(map(len, rows)), seconds)
    return Run(rows, seconds, kv_bytes, held / slots, {"num_steps": num_steps, "batch_size": STOCK_BATCH})


def run_paged(model: Any, ids: Sequence[list[int]], limits: Sequence[int], report: Report = _ignore) -> Run:
    """The engine, all prompts submitted at once. Setting it up and taking the pool's memory is in the time.

    Args:
        model: a causal language model on any device.
        ids: token ids of each prompt.
        limits: most tokens of each answer.
        report: told of the progress after every step.
    """
    rows: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    start = time.perf_counter()
    config = PagedConfig(block_size=BLOCK_SIZE, num_blocks=_pool_blocks(ids, limits))
    with PagedEngine(model, config) as engine:
        order = [
            engine.add_request(row, max_new_tokens=limit, do_sample=False)
            for row, limit in zip(ids, limits, strict=True)
        ]
        while engine.has_unfinished_requests:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                lengths[output.request_id] = output.outputs[0].num_tokens
                if output.finished:
                    rows[output.request_id] = list(output.token_ids)
            report(len(rows), sum(lengths.values()), time.perf_counter() - start)
        seconds = time.perf_counter() - start
        stats = engine.stats()
    names = ("num_steps", "num_blocks", "peak_blocks", "num_preemptions", "prefix_hit_tokens")
    return Run(
        rows=[rows[request_id] for request_id in order],
        seconds=seconds,
        kv_bytes=stats["pool_bytes"],
        occupancy=stats["token_occupancy"],
        details={"block_size": BLOCK_SIZE, **{name: stats[name] for name in names}},
    )


def _pool_blocks(ids: Sequence[list[int]], limits: Sequence[int]) -> int:
    """Blocks for half of all prompts and answers at their longest: they come and go, never all there at once."""
    lengths = [len(row) + limit for row, limit in zip(ids, limits, strict=True)]
    return -(-max(*lengths, sum(lengths) // 2) // BLOCK_SIZE) + 1


def _left_padded(batch: Sequence[list[int]], model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # `[batch, longest]` ids and mask
    width = max(map(len, batch))
    padding = model.generation_config.pad_token_id
    ids = torch.full((len(batch), width), 0 if padding is None else padding)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(batch):
        ids[index, width - len(row) :] = torch.tensor(row)
        mask[index, width - len(row) :] = 1
    return ids.to(model.device), mask.to(model.device)


def _eos_ids(model: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)


def _cut(row: Sequence[int], limit: int, eos_ids: frozenset[int]) -> list[int]:
    # up to the limit or the first end-of-sequence token, that one included
    row = row[:limit]
    end = next((index + 1 for index, token in enumerate(row) if token in eos_ids), len(row))
    return list(row[:end])


def _cache_bytes(cache: Any) -> int:
    return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in cache.layers)


class _ProgressStreamer(BaseStreamer):  # type: ignore[misc, unused-ignore]
    """Counts a batch's rows and useful tokens as stock generates them."""

    def __init__(
        self,
        limits: Sequence[int],
        eos_ids: frozenset[int],
        num_finished: int,
        num_tokens: int,
        start: float,
        report: Report,
    ) -> None:
        self._limits = limits
        self._eos_ids = eos_ids
        self._lengths = [0] * len(limits)
        self._done = [False] * len(limits)
        self._before = (num_finished, num_tokens)
        self._start = start
        self._report = report
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompts `[batch, length]` first, then the tokens `[batch]` of every step."""
        if self._is_prompt:
            self._is_prompt = False
            return
        for index, token in enumerate(value.tolist()):
            if not self._done[index]:
                self._lengths[index] += 1
                self._done[index] = token in self._eos_ids or self._lengths[index] == self._limits[index]
        finished, tokens = self._before
        # The caller gets no row before the batch is done, but this is what the rows are.
        self._report(finished + sum(self._done), tokens + sum(self._lengths), time.perf_counter() - self._start)

    def end(self) -> None:
        """Nothing is left to show."""
