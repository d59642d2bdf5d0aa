"""Block ids: the order in which they are handed out, shared, kept and evicted."""

from __future__ import annotations

import pytest

from hf_paged.cache.block_pool import BlockPool
from hf_paged.errors import PagedError


def _take(pool: BlockPool, count: int) -> list[int]:
    return [pool.allocate() for _ in range(count)]


def _cached(pool: BlockPool, count: int) -> list[int]:
    """Blocks that were written and indexed, and that nobody holds any more."""
    blocks = _take(pool, count)
    for block_id in blocks:
        pool.mark_cached(block_id)
    pool.free(reversed(blocks))
    return blocks


def test_new_ids_are_handed_out_in_ascending_order() -> None:
    assert _take(BlockPool(4), 4) == [0, 1, 2, 3]


def test_the_block_freed_last_is_reused_first() -> None:
    pool = BlockPool(6)
    blocks = _take(pool, 4)
    pool.free(reversed(blocks))  # 3, 2, 1, 0
    assert _take(pool, 6) == [0, 1, 2, 3, 4, 5]


def test_allocating_from_an_empty_pool_raises() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(PagedError, match="empty"):
        pool.allocate()
    with pytest.raises(PagedError, match="empty"):
        BlockPool(0).allocate()


def test_a_block_comes_back_when_its_last_table_lets_go() -> None:
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.touch(block_id)
    pool.free([block_id])
    assert (pool.ref_count(block_id), pool.num_free, pool.num_referenced) == (1, 1, 1)
    pool.free([block_id])
    assert (pool.ref_count(block_id), pool.num_free, pool.num_referenced) == (0, 2, 0)
    pool.check({})


def test_freeing_once_too_often_raises() -> None:
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.free([block_id])
    with pytest.raises(PagedError, match="more often"):
        pool.free([block_id])
    pool.check({})


def test_a_free_block_can_not_be_shared_nor_indexed() -> None:
    pool = BlockPool(2)
    with pytest.raises(PagedError, match="is free"):
        pool.touch(0)
    with pytest.raises(PagedError, match="not referenced"):
        pool.mark_cached(0)


def test_a_cached_block_outlives_its_last_table_and_can_be_taken_up_again() -> None:
    pool = BlockPool(2)
    [block_id] = _cached(pool, 1)
    assert (pool.num_free, pool.num_cached_unreferenced, pool.num_referenced) == (1, 1, 0)
    pool.touch(block_id)
    assert (pool.num_free, pool.num_cached_unreferenced, pool.num_referenced) == (1, 0, 1)
    assert pool.is_cached(block_id)
    pool.check({block_id: 1})


def test_unused_blocks_are_taken_before_cached_ones_are_evicted() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    _cached(pool, 2)
    assert _take(pool, 2) == [2, 3]
    assert evicted == []
    assert sorted(_take(pool, 2)) == [0, 1]


def test_tails_are_evicted_before_heads_and_older_sequences_before_newer_ones() -> None:
    evicted: list[int] = []
    pool = BlockPool(6, on_evict=evicted.append)
    assert _cached(pool, 3) == [0, 1, 2]
    assert _cached(pool, 3) == [3, 4, 5]
    assert _take(pool, 6) == [2, 1, 0, 5, 4, 3]
    assert evicted == [2, 1, 0, 5, 4, 3]
    assert not any(map(pool.is_cached, range(6)))


def test_a_hit_makes_a_block_the_most_recently_used() -> None:
    pool = BlockPool(3)
    _cached(pool, 3)  # evicted as 2, 1, 0 if nothing happens
    pool.touch(2)
    pool.free([2])
    assert _take(pool, 3) == [1, 0, 2]


def test_the_callback_sees_the_block_before_its_content_is_given_up() -> None:
    seen: list[bool] = []
    pool = BlockPool(1, on_evict=lambda block_id: seen.append(pool.is_cached(block_id)))
    _cached(pool, 1)
    pool.allocate()
    assert seen == [True]


def test_the_reserved_number_of_cached_blocks_is_left_in_place() -> None:
    pool = BlockPool(4, num_reserved=2)
    _cached(pool, 3)
    assert pool.num_allocatable == 2  # the unused one, and one of the three cached
    assert _take(pool, 2) == [3, 2]
    assert pool.num_allocatable == 0
    with pytest.raises(PagedError, match="empty"):
        pool.allocate()
    assert pool.num_cached_unreferenced == 2


def test_a_reserve_larger_than_what_is_cached_takes_nothing_from_the_unused_blocks() -> None:
    pool = BlockPool(4, num_reserved=3)
    _cached(pool, 1)
    assert pool.num_allocatable == 3


def test_the_peak_counts_shared_blocks_once_and_never_goes_down() -> None:
    pool = BlockPool(4)
    blocks = _take(pool, 3)
    pool.touch(blocks[0])
    pool.free(blocks)
    pool.allocate()
    assert pool.peak_referenced == 3


def test_the_peak_counts_blocks_that_a_hit_revives() -> None:
    pool = BlockPool(4)
    cached = _cached(pool, 2)
    _take(pool, 2)
    for block_id in cached:
        pool.touch(block_id)
    assert pool.peak_referenced == 4


def test_evicting_all_forgets_the_content_of_referenced_blocks_too_but_leaves_them_to_their_owner() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    held = pool.allocate()
    pool.mark_cached(held)
    _cached(pool, 2)
    pool.evict_all()
    assert sorted(evicted) == [0, 1, 2]
    assert pool.cached_blocks() == set()
    assert (pool.num_free, pool.num_cached_unreferenced, pool.num_referenced) == (3, 0, 1)
    pool.check({held: 1})
    pool.free([held])
    assert pool.num_free == 4


def test_growing_keeps_what_is_there_and_hands_out_the_new_ids_last() -> None:
    pool = BlockPool(3)
    held = _take(pool, 2)
    pool.mark_cached(1)
    pool.free([1])
    pool.grow(6)
    assert pool.num_blocks == 6
    assert _take(pool, 4) == [2, 3, 4, 5]
    pool.check({held[0]: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    assert pool.is_cached(1)


def test_growing_to_fewer_blocks_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.grow(2)
    assert _take(pool, 3) == [0, 1, 2]
    pool.check()


def test_check_finds_a_count_that_no_table_accounts_for() -> None:
    pool = BlockPool(2)
    pool.allocate()
    pool.check({0: 1})
    with pytest.raises(PagedError, match="Block 0 has count 1, but 0 tables"):
        pool.check({})
    with pytest.raises(PagedError, match="Block 1 has count 0, but 1 tables"):
        pool.check({0: 1, 1: 1})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "free list twice"),
        (lambda pool: pool._evictable.update({pool._free[0]: None}), "both free and cached"),
        (lambda pool: pool._free.pop(), "differs from the number of blocks"),
        (lambda pool: pool._is_cached.__setitem__(3, 1), "free but still indexed"),
        (lambda pool: pool._is_cached.__setitem__(1, 0), "content that is not indexed"),
        (lambda pool: pool._ref_counts.__setitem__(slice(0, 2), [0, 1]), "count 0 but is not idle"),
        (lambda pool: pool._ref_counts.__setitem__(1, 1), "differs from the number of blocks"),
    ],
)
def test_check_finds_damage(damage: object, message: str) -> None:
    pool = BlockPool(4)
    _take(pool, 1)
    _take(pool, 1)
    pool.mark_cached(1)
    pool.free([1])
    pool.check({0: 1})
    damage(pool)  # type: ignore[operator]
    with pytest.raises(PagedError, match=message):
        pool.check({0: 1})
