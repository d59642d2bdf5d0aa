"""What the host does, at several sizes each: what grows, and how it should."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.host import (
    BLOCK_SIZE,
    add_waiting,
    computed,
    fill_with_cached,
    finish_step,
    make_allocator,
    make_sequence,
    running,
)
from hf_paged.cache.block_pool import BlockPool
from hf_paged.engine.batch import pack
from hf_paged.engine.params import SamplingParams
from hf_paged.engine.sampler import SamplerRow, choose
from hf_paged.kernels.torch_plan import plan_of
from hf_paged.request import Request, Sequence
from hf_paged.scheduler.output import SchedulerOutput
from hf_paged.scheduler.scheduler import Scheduler

LARGE_POOL = 100_000  # blocks
VOCABULARY = 49_152
MAX_REPEATS = 50  # what a case's state has room for
CPU = torch.device("cpu")

Operation = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One operation.

    `prepare` takes a size and returns what is timed, which may run up to MAX_REPEATS times. `exponent` is how the
    operation's time should grow with the size: 0 not at all, 1 in proportion.
    """

    name: str
    sizes: tuple[int, ...]
    exponent: float
    prepare: Callable[[int], Operation]


def _allocate_and_free(num_blocks: int) -> Operation:
    pool = BlockPool(num_blocks)

    def run() -> None:
        pool.free([pool.allocate() for _ in range(num_blocks)])

    return run


def _look_up(num_blocks: int) -> Operation:
    allocator = make_allocator(LARGE_POOL)
    fill_with_cached(allocator, 1, num_blocks)
    return functools.partial(allocator.find_prefix, make_sequence(0, num_blocks * BLOCK_SIZE))


def _look_up_among(num_blocks: int) -> Operation:
    # a prompt of 100 blocks in a pool that has cached so many
    allocator = make_allocator(LARGE_POOL)
    fill_with_cached(allocator, num_blocks // 100, 100)
    return functools.partial(allocator.find_prefix, make_sequence(0, 100 * BLOCK_SIZE))


def _fork(num_blocks: int) -> Operation:
    allocator = make_allocator(LARGE_POOL)
    parent = computed(allocator, make_sequence(0, num_blocks * BLOCK_SIZE))
    child = Sequence(Request("child", (1,), 1), 1, list(parent.token_ids))

    def run() -> None:
        allocator.fork(parent, child)
        allocator.free(child)

    return run


def _evict(num_blocks: int) -> Operation:
    # every block of the newcomer takes a cached one's place
    allocator = make_allocator(2 * num_blocks)
    fill_with_cached(allocator, 2, num_blocks)
    newcomers = itertools.count(10)
    return lambda: allocator.free(computed(allocator, make_sequence(next(newcomers), num_blocks * BLOCK_SIZE)))


def _decode_step(num_running: int) -> Operation:
    scheduler = running(num_running, num_tokens=64, num_blocks=num_running * 10)

    def run() -> None:
        finish_step(scheduler, scheduler.schedule())

    return run


def _step_beside_a_queue(num_waiting: int) -> Operation:
    # 100 run and fill the pool; schedule() alone makes the same step every time
    scheduler = running(100, num_tokens=62, num_blocks=400)
    add_waiting(scheduler, num_waiting, num_tokens=62)
    return scheduler.schedule


def _queue(num_waiting: int) -> Operation:
    scheduler = running(10, num_tokens=62, num_blocks=100)
    add_waiting(scheduler, num_waiting, num_tokens=62)
    newcomers = iter([make_sequence(10_000 + num_waiting + index, 62) for index in range(MAX_REPEATS)])
    return lambda: scheduler.add(next(newcomers))


def _leave_and_come(num_running: int) -> Operation:
    scheduler = running(num_running, num_tokens=64, num_blocks=num_running * 12)
    newcomers = iter([make_sequence(num_running + index, 64) for index in range(MAX_REPEATS)])

    def run() -> None:
        scheduler.finish(scheduler.running[num_running // 2])
        scheduler.add(next(newcomers))
        finish_step(scheduler, scheduler.schedule())

    return run


def _admit_all(num_requests: int) -> Operation:
    # all come at once and start in one step; then they leave and queue again
    allocator = make_allocator(num_requests * 5, max_batch_tokens=num_requests * 64, max_sequences=num_requests)
    scheduler = Scheduler(allocator, num_requests * 64, num_requests)
    for index in range(num_requests):
        scheduler.add(make_sequence(index, 64))

    def run() -> None:
        scheduler.schedule()
        for sequence in list(scheduler.running):
            scheduler.finish(sequence)
            scheduler.add(sequence)

    return run


def _pack(output: SchedulerOutput, is_planned: bool = False) -> None:
    batch = pack(output, BLOCK_SIZE, 1, CPU)
    if is_planned:
        plan_of(batch.metadata[0], None, None)


def _pack_decodes(num_sequences: int) -> Operation:
    output = running(num_sequences, num_tokens=512, num_blocks=num_sequences * 34).schedule()
    return functools.partial(_pack, output)


def _pack_and_plan_decodes(num_sequences: int) -> Operation:
    output = running(num_sequences, num_tokens=512, num_blocks=num_sequences * 34).schedule()
    return functools.partial(_pack, output, True)


def _pack_prompts(num_tokens: int) -> Operation:
    scheduler = running(8, num_tokens=num_tokens // 8, num_blocks=num_tokens)
    for sequence in list(scheduler.running):
        scheduler.finish(sequence)
    for index in range(8, 16):
        scheduler.add(make_sequence(index, num_tokens // 8))
    return functools.partial(_pack, scheduler.schedule())


def _sampler_rows(num_rows: int, **keywords: Any) -> list[SamplerRow]:
    from transformers import LogitsProcessorList, TopKLogitsWarper

    do_sample = bool(keywords.get("do_sample"))
    rows = []
    for index in range(num_rows):
        processors = LogitsProcessorList([TopKLogitsWarper(50)] if do_sample else [])
        seed = keywords["seed"] + index if do_sample else None
        sampling = SamplingParams(processors, (), frozenset(), do_sample, "alike", seed)
        rows.append(SamplerRow(Request(f"request-{index}", range(8), 8, sampling=sampling).sequences[0], index))
    return rows


def _choose(num_rows: int, vocabulary: int, **keywords: Any) -> Operation:
    logits = torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(0))
    return functools.partial(choose, _sampler_rows(num_rows, **keywords), logits)


CASES = (
    Case("allocate and free, by blocks", (1_000, 10_000, 100_000), 1, _allocate_and_free),
    Case("look up a cached prompt, by its blocks", (10, 100, 1_000), 1, _look_up),
    Case("look up 100 blocks, by cached blocks", (1_000, 10_000, 100_000), 0, _look_up_among),
    Case("fork and free, by blocks", (10, 100, 1_000, 10_000), 1, _fork),
    Case("admit, evict, index and free, by blocks", (10, 100, 1_000), 1, _evict),
    Case("decode step, by running sequences", (10, 100, 1_000), 1, _decode_step),
    Case("decode step of 100 with a full pool, by waiting requests", (100, 1_000, 10_000), 0, _step_beside_a_queue),
    Case("queue a request, by waiting requests", (100, 1_000, 10_000), 0, _queue),
    Case("step where one leaves and one comes, by running sequences", (10, 100, 1_000), 1, _leave_and_come),
    Case("step that admits all, by requests", (10, 100, 1_000), 1, _admit_all),
    Case("pack decodes, by sequences", (16, 64, 256, 1_024), 1, _pack_decodes),
    Case("pack and plan decodes, by sequences", (16, 64, 256, 1_024), 1, _pack_and_plan_decodes),
    Case("pack eight prompts, by their tokens", (512, 2_048, 8_192), 1, _pack_prompts),
    Case("choose greedily, by rows", (4, 16, 64, 256), 1, lambda rows: _choose(rows, VOCABULARY)),
    Case(
        "draw among 50 with a seed each, by rows",
        (4, 16, 64, 256),
        1,
        lambda rows: _choose(rows, VOCABULARY, do_sample=True, seed=1),
    ),
    Case("choose greedily for 64 rows, by vocabulary", (8_192, 32_768, 131_072), 1, lambda size: _choose(64, size)),
)
