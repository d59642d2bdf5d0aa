"""Blocks in a pool of 100,000."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.host import BLOCK_SIZE, computed, fill_with_cached, make_allocator, make_sequence
from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_pool import BlockPool
from hf_paged.request import Request, Sequence

NUM_BLOCKS = 100_000
BLOCKS_PER_SEQUENCE = 1_000


@pytest.fixture(scope="module")
def used() -> BlockAllocator:
    """A pool whose 100,000 blocks are all cached, of 100 sequences that came and went."""
    allocator = make_allocator(NUM_BLOCKS)
    fill_with_cached(allocator, NUM_BLOCKS // BLOCKS_PER_SEQUENCE, BLOCKS_PER_SEQUENCE)
    assert allocator.pools[0].num_cached_unreferenced == NUM_BLOCKS
    return allocator


def test_allocating_and_freeing_every_block(benchmark: BenchmarkFixture) -> None:
    pool = BlockPool(NUM_BLOCKS)

    def allocate_and_free() -> int:
        blocks = [pool.allocate() for _ in range(NUM_BLOCKS)]
        pool.free(reversed(blocks))
        return len(set(blocks))

    assert benchmark(allocate_and_free) == NUM_BLOCKS
    assert pool.num_free == NUM_BLOCKS


def test_looking_up_a_prompt_of_a_thousand_cached_blocks(benchmark: BenchmarkFixture, used: BlockAllocator) -> None:
    sequence = make_sequence(10, BLOCKS_PER_SEQUENCE * BLOCK_SIZE)
    prefix = benchmark(used.find_prefix, sequence)
    assert prefix.num_tokens == (BLOCKS_PER_SEQUENCE - 1) * BLOCK_SIZE  # a token is always left to compute


def test_looking_up_a_prompt_that_is_not_there(benchmark: BenchmarkFixture, used: BlockAllocator) -> None:
    sequence = make_sequence(1_000, BLOCKS_PER_SEQUENCE * BLOCK_SIZE)
    assert benchmark(used.find_prefix, sequence).num_tokens == 0


def test_forking_a_sequence_of_a_thousand_blocks(benchmark: BenchmarkFixture) -> None:
    allocator = make_allocator(NUM_BLOCKS)
    parent = computed(allocator, make_sequence(0, BLOCKS_PER_SEQUENCE * BLOCK_SIZE))
    child = Sequence(Request("child", (1,), 1), 1, list(parent.token_ids))

    def fork_and_free() -> int:
        allocator.fork(parent, child)
        count = allocator.pools[0].ref_count(parent.block_tables[0].blocks[0])
        allocator.free(child)
        return count

    assert benchmark(fork_and_free) == 2
    allocator.check([parent])


def test_allocating_from_a_pool_where_every_block_must_be_evicted(benchmark: BenchmarkFixture) -> None:
    allocator = make_allocator(2 * BLOCKS_PER_SEQUENCE)
    fill_with_cached(allocator, 2, BLOCKS_PER_SEQUENCE)
    newcomers = iter(range(100, 1_000_000))

    def evict_a_thousand() -> None:
        allocator.free(computed(allocator, make_sequence(next(newcomers), BLOCKS_PER_SEQUENCE * BLOCK_SIZE)))

    benchmark(evict_a_thousand)
    assert allocator.pools[0].num_free == 0
    allocator.check([])
