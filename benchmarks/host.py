"""Requests and steps of a given size, without a model: what the host does in a step, for micro-benchmarks."""

from __future__ import annotations

from hf_paged.cache.allocator import BlockAllocator, BlockGroup
from hf_paged.request import Request, Sequence
from hf_paged.scheduler.output import SchedulerOutput
from hf_paged.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16


def make_allocator(num_blocks: int, *, max_batch_tokens: int = 512, max_sequences: int = 1024) -> BlockAllocator:
    """A pool for full attention."""
    return BlockAllocator(
        [BlockGroup()], BLOCK_SIZE, num_blocks, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences
    )


def make_sequence(index: int, num_tokens: int, max_new_tokens: int = 10_000) -> Sequence:
    """A sequence whose tokens no other index has."""
    first = index * num_tokens
    return Request(f"request-{index}", range(first, first + num_tokens), max_new_tokens).sequences[0]


def computed(allocator: BlockAllocator, sequence: Sequence) -> Sequence:
    """Gives a sequence blocks for all its tokens, as if a step had written them."""
    assert allocator.admit(sequence, allocator.find_prefix(sequence))
    assert allocator.allocate(sequence, sequence.num_uncomputed_tokens) is not None
    sequence.num_computed_tokens = sequence.num_tokens
    allocator.commit(sequence)
    return sequence


def fill_with_cached(allocator: BlockAllocator, num_sequences: int, blocks_per_sequence: int) -> None:
    """Lets sequences come and go; their blocks stay cached."""
    for index in range(num_sequences):
        allocator.free(computed(allocator, make_sequence(index, blocks_per_sequence * BLOCK_SIZE)))


def running(num_sequences: int, num_tokens: int, num_blocks: int) -> Scheduler:
    """A scheduler whose sequences have computed their prompts, and have their next token."""
    budget = num_sequences * num_tokens
    allocator = make_allocator(num_blocks, max_batch_tokens=budget, max_sequences=2 * num_sequences)
    scheduler = Scheduler(allocator, budget, 2 * num_sequences)
    for index in range(num_sequences):
        scheduler.add(make_sequence(index, num_tokens))
    finish_step(scheduler, scheduler.schedule())
    assert len(scheduler.running) == num_sequences
    return scheduler


def add_waiting(scheduler: Scheduler, count: int, num_tokens: int) -> None:
    """Queues newcomers behind those that run."""
    first = len(scheduler.running)
    for index in range(first, first + count):
        scheduler.add(make_sequence(index, num_tokens))


def finish_step(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """What the engine does after the forward, with the token 1 for everyone."""
    for item in output.scheduled:
        item.sequence.num_computed_tokens += item.num_new_tokens
        scheduler.allocator.commit(item.sequence)
        item.sequence.token_ids.append(1)
