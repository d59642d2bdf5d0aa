"""Sequences, allocators and steps for tests without a model: what is scheduled counts as computed."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from hf_paged.cache.allocator import BlockAllocator, BlockCopy, BlockGroup
from hf_paged.request import Request, Sequence
from hf_paged.scheduler.output import SchedulerOutput
from hf_paged.scheduler.scheduler import Scheduler


def sequence_of(
    tokens: SequenceOf[int] | int, request_id: str = "a", max_new_tokens: int = 50, **options: Any
) -> Sequence:
    """The first sequence of a new request; a number stands for that many different tokens."""
    prompt = range(100, 100 + tokens) if isinstance(tokens, int) else tokens
    return Request(request_id, prompt, max_new_tokens, **options).sequences[0]


def allocator_of(
    num_blocks: int, windows: SequenceOf[int | None] = (None,), max_batch_tokens: int = 8, **options: Any
) -> BlockAllocator:
    """An allocator with blocks of 4 tokens and one group a window, None for full context."""
    settings = {"block_size": 4, "max_sequences": 8, **options}
    groups = [BlockGroup(window) for window in windows]
    return BlockAllocator(groups, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, **settings)


def compute(allocator: BlockAllocator, sequence: Sequence, num_tokens: int | None = None) -> list[list[BlockCopy]]:
    """Admits a sequence if it has no blocks, computes some of its tokens (default: all), and returns the copies."""
    if not sequence.block_tables:
        assert allocator.admit(sequence, allocator.find_prefix(sequence))
    num_tokens = sequence.num_uncomputed_tokens if num_tokens is None else num_tokens
    copies = allocator.allocate(sequence, num_tokens)
    assert copies is not None
    sequence.num_computed_tokens += num_tokens
    allocator.commit(sequence)
    return copies


def tables(sequence: Sequence) -> list[list[int]]:
    """Physical blocks, one list a group."""
    return [list(table.blocks) for table in sequence.block_tables]


def scheduler_of(
    num_blocks: int, windows: SequenceOf[int | None] = (None,), budget: int = 8, max_sequences: int = 8, **options: Any
) -> Scheduler:
    """A scheduler over blocks of 4 tokens."""
    allocator = allocator_of(num_blocks, windows, max_batch_tokens=budget, max_sequences=max_sequences, **options)
    return Scheduler(allocator, budget, max_sequences)


def names(sequences: Iterable[Sequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


def shape(output: SchedulerOutput) -> list[tuple[str, int]]:
    """Who got how many tokens, in order."""
    return [(item.sequence.request.request_id, item.num_new_tokens) for item in output.scheduled]


def step(scheduler: Scheduler, next_token: int | None = 7) -> list[tuple[str, int]]:
    """One step: schedules, counts as computed, and gives `next_token` to whoever caught up (None: nobody)."""
    output = scheduler.schedule()
    assert output.num_tokens == sum(item.num_new_tokens for item in output.scheduled) <= scheduler.max_batch_tokens
    for item in output.scheduled:
        is_last_chunk = item.is_last_chunk
        item.sequence.num_computed_tokens += item.num_new_tokens
        scheduler.allocator.commit(item.sequence)
        if is_last_chunk and next_token is not None:
            item.sequence.token_ids.append(next_token)
    scheduler.allocator.check(scheduler.running)
    return shape(output)
