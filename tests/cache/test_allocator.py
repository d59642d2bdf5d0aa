"""Which sequence gets which block: exact ids, over one group and several."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from hf_paged.cache.block_table import RELEASED
from hf_paged.errors import PagedError
from hf_paged.request import Sequence
from tests.scheduler.drive import allocator_of, compute, sequence_of, tables

R = RELEASED


def _child_of(parent: Sequence) -> Sequence:
    child = Sequence(parent.request, 1, list(parent.token_ids))
    parent.request.sequences.append(child)
    return child


# -- tables ------------------------------------------------------------------------------------------------------------


def test_a_table_grows_by_the_blocks_that_its_tokens_need() -> None:
    allocator = allocator_of(8)
    a, b = sequence_of(9, "a"), sequence_of([1, 2, 3], "b")
    compute(allocator, a, 4)
    assert tables(a) == [[0]]
    compute(allocator, a, 1)
    assert tables(a) == [[0, 1]]
    compute(allocator, b)
    assert tables(b) == [[2]]
    compute(allocator, a, 4)
    assert tables(a) == [[0, 1, 3]]
    allocator.check([a, b])


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert allocator_of(8).blocks_for(num_tokens) == num_blocks


def test_an_allocation_that_does_not_fit_changes_nothing_in_any_group() -> None:
    allocator = allocator_of(4, windows=(None, 8))
    a, b = sequence_of(8, "a"), sequence_of([1] * 4, "b")
    compute(allocator, a)
    compute(allocator, b)
    b.token_ids += [1] * 8
    before = tables(b)
    assert allocator.allocate(b, 8) is None
    assert tables(b) == before
    allocator.check([a, b])


def test_freeing_gives_tails_up_before_heads_and_forgets_the_sequence() -> None:
    allocator = allocator_of(3)
    a = sequence_of(12)
    compute(allocator, a)
    allocator.free(a)
    assert (a.block_tables, a.num_computed_tokens, a.prefix_node, a.num_indexed_blocks) == ([], 0, None, 0)
    other = sequence_of([1] * 12, "other")
    compute(allocator, other)
    assert tables(other) == [[2, 1, 0]]
    allocator.check([other])


def test_freeing_a_sequence_without_blocks_does_nothing() -> None:
    allocator = allocator_of(2)
    allocator.free(sequence_of(3))
    allocator.check([])


def test_check_finds_computed_tokens_without_a_block() -> None:
    allocator = allocator_of(4)
    a = sequence_of(8)
    compute(allocator, a)
    a.num_computed_tokens = 9
    with pytest.raises(PagedError, match="without a block"):
        allocator.check([a])


# -- admission ---------------------------------------------------------------------------------------------------------


def test_a_sequence_is_admitted_when_all_its_tokens_and_the_spare_blocks_fit() -> None:
    allocator = allocator_of(4)
    a = sequence_of(12)
    assert not allocator.admit(a, allocator.find_prefix(a), num_spare_blocks=2)
    assert a.block_tables == []
    assert allocator.admit(a, allocator.find_prefix(a), num_spare_blocks=1)
    assert tables(a) == [[]]
    allocator.check([a])


def test_a_sequence_larger_than_the_pool_is_not_admitted() -> None:
    for windows in ((None,), (None, 6)):
        allocator = allocator_of(4, windows=windows)
        a = sequence_of(17)
        assert not allocator.admit(a, allocator.find_prefix(a))


def test_cached_blocks_that_nobody_holds_count_as_taken_when_a_hit_revives_them() -> None:
    allocator = allocator_of(4)
    a = sequence_of(9)
    compute(allocator, a)
    allocator.free(a)
    again = sequence_of(13, "again")
    prefix = allocator.find_prefix(again)
    assert prefix.num_tokens == 8
    assert not allocator.admit(again, prefix, num_spare_blocks=1)  # 2 revived + 2 new of 4
    assert allocator.admit(again, prefix)
    allocator.check([again])


def test_cached_blocks_that_somebody_holds_cost_a_hit_nothing() -> None:
    allocator = allocator_of(4)
    a = sequence_of(12)
    compute(allocator, a)
    again = sequence_of(9, "again")
    assert allocator.admit(again, allocator.find_prefix(again))
    assert tables(again) == [[0, 1]]
    compute(allocator, again)
    assert tables(again) == [[0, 1, 3]]
    allocator.check([a, again])


# -- copy on write -----------------------------------------------------------------------------------------------------


def test_a_fork_shares_every_block_and_the_first_writer_gets_a_copy() -> None:
    allocator = allocator_of(8)
    parent = sequence_of(6)
    compute(allocator, parent)
    child = _child_of(parent)
    allocator.fork(parent, child)
    assert tables(child) == tables(parent) == [[0, 1]]
    assert [allocator.pools[0].ref_count(block) for block in (0, 1)] == [2, 2]
    for sequence in (parent, child):
        sequence.token_ids.append(9)
    assert compute(allocator, parent) == [[(1, 2)]]
    assert tables(parent) == [[0, 2]]
    assert [allocator.pools[0].ref_count(block) for block in (0, 1, 2)] == [2, 1, 1]
    assert compute(allocator, child) == [[]]  # the last of the sharers writes into the original
    assert tables(child) == [[0, 1]]
    allocator.check([parent, child])


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    allocator = allocator_of(8)
    parent = sequence_of(8)
    compute(allocator, parent)
    child = _child_of(parent)
    allocator.fork(parent, child)
    for sequence in (parent, child):
        sequence.token_ids.append(9)
        assert compute(allocator, sequence) == [[]]
    assert tables(parent) == [[0, 1, 2]]
    assert tables(child) == [[0, 1, 3]]
    allocator.check([parent, child])


def test_every_group_gets_its_own_copy() -> None:
    allocator = allocator_of(8, windows=(None, 6))
    parent = sequence_of(6)
    compute(allocator, parent)
    child = _child_of(parent)
    allocator.fork(parent, child)
    parent.token_ids.append(9)
    assert compute(allocator, parent) == [[(1, 2)], [(1, 2)]]
    allocator.check([parent, child])


def test_a_copy_that_finds_no_block_is_refused() -> None:
    allocator = allocator_of(2)
    parent = sequence_of(6)
    compute(allocator, parent)
    child = _child_of(parent)
    allocator.fork(parent, child)
    parent.token_ids.append(9)
    assert allocator.allocate(parent, 1) is None
    assert tables(parent) == [[0, 1]]
    allocator.free(child)
    assert allocator.allocate(parent, 1) == [[]]
    allocator.check([parent])


# -- windows -----------------------------------------------------------------------------------------------------------


def test_a_window_group_gives_back_the_blocks_that_no_later_query_sees() -> None:
    allocator = allocator_of(8, windows=(None, 6), enable_prefix_caching=False)
    a = sequence_of(20)
    seen = []
    for _ in range(5):
        compute(allocator, a, 4)
        seen.append((a.num_computed_tokens, tables(a)[1]))
    assert seen == [
        (4, [0]),
        (8, [0, 1]),  # the query at 8 sees 3 .. 8
        (12, [R, 1, 2]),  # the query at 12 sees 7 .. 12
        (16, [R, R, 2, 0]),
        (20, [R, R, R, 0, 1]),
    ]
    assert tables(a)[0] == [0, 1, 2, 3, 4]
    allocator.check([a])


def test_a_block_goes_back_in_the_step_after_which_its_last_token_is_out_of_sight() -> None:
    allocator = allocator_of(8, windows=(5,), enable_prefix_caching=False)
    a = sequence_of(9)
    compute(allocator, a, 7)  # the query at 7 sees 3 .. 7
    assert tables(a) == [[0, 1]]
    compute(allocator, a, 1)  # the query at 8 sees 4 .. 8
    assert tables(a) == [[R, 1]]


def test_a_fork_does_not_count_blocks_that_its_parent_gave_back() -> None:
    allocator = allocator_of(8, windows=(4,))
    parent = sequence_of(14)
    compute(allocator, parent, 8)
    compute(allocator, parent)
    child = _child_of(parent)
    allocator.fork(parent, child)
    assert tables(child) == [[R, R, 2, 3]]
    assert [allocator.pools[0].ref_count(block) for block in range(4)] == [0, 0, 2, 2]
    allocator.free(parent)
    allocator.check([child])


@pytest.mark.parametrize(
    ("window", "budget", "sequences", "num_blocks", "expected"),
    [
        (None, 8, 2, 50, 50),
        (6, 8, 1, 50, 5),  # 5 behind the query + 8 new = 13 tokens = 4 blocks, and one for where they start
        (6, 8, 3, 50, 15),
        (6, 8, 3, 10, 10),  # never more than full context
        (4, 1, 1, 50, 2),
        (5, 1, 1, 50, 3),
    ],
)
def test_a_window_group_gets_what_its_windows_need(
    window: int | None, budget: int, sequences: int, num_blocks: int, expected: int
) -> None:
    allocator = allocator_of(num_blocks, windows=(window,), max_batch_tokens=budget, max_sequences=sequences)
    assert allocator.pools[0].num_blocks == expected


@pytest.mark.parametrize(
    ("windows", "num_blocks", "options", "expected"),
    [
        ((None,), 10, {}, 40),
        ((None,), 10, {"prefix_cache_fraction": 0.25}, 32),  # 2 of the 10 blocks stay with cached prefixes
        ((None,), 10, {"prefix_cache_fraction": 0.25, "enable_prefix_caching": False}, 40),
        ((None, 6), 10, {}, 40),
        ((6,), 10, {}, None),  # 5 blocks carry a window of 6 and a step of 8 along without end
        ((6,), 5, {}, None),
        ((6,), 4, {}, 16),  # a window that doesn't fit beside a step: full context is the limit
        ((None,), 0, {}, 0),
        ((6,), 0, {}, 0),
    ],
)
def test_the_most_tokens_that_one_sequence_can_hold(
    windows: tuple[int | None, ...], num_blocks: int, options: dict[str, Any], expected: int | None
) -> None:
    allocator = allocator_of(num_blocks, windows=windows, max_batch_tokens=8, **options)
    assert allocator.max_tokens_per_sequence == expected


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 5, 6, 9, 30])
@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (3, 9)])
@pytest.mark.parametrize("fraction", [0.0, 0.4])
def test_a_lone_sequence_reaches_the_most_tokens_and_in_a_full_group_no_more(
    num_blocks: int, windows: tuple[int | None, ...], fraction: float
) -> None:
    allocator = allocator_of(num_blocks, windows=windows, max_batch_tokens=8, prefix_cache_fraction=fraction)
    old = sequence_of([1] * min(8, 4 * num_blocks), "old")  # leaves cached blocks behind, which the reserve protects
    if allocator.admit(old, allocator.find_prefix(old)) and allocator.allocate(old, old.num_tokens) is not None:
        old.num_computed_tokens = old.num_tokens
        allocator.commit(old)
    allocator.free(old)
    limit = allocator.max_tokens_per_sequence
    total = 200 if limit is None else limit
    if total == 0:
        return
    a = sequence_of(total)
    while a.num_uncomputed_tokens:
        compute(allocator, a, min(8, a.num_uncomputed_tokens))
    allocator.check([a])
    if None in windows and fraction == 0:
        a.token_ids.append(1)
        assert allocator.allocate(a, 1) is None


# -- prefixes ----------------------------------------------------------------------------------------------------------


def _hit(allocator: Any, tokens: Any, **options: Any) -> int:
    return int(allocator.find_prefix(sequence_of(tokens, "later", **options)).num_tokens)


def test_full_blocks_are_found_again_and_the_partial_one_is_not() -> None:
    allocator = allocator_of(8)
    a = sequence_of(11)
    compute(allocator, a)
    b = sequence_of(20, "b")
    prefix = allocator.find_prefix(b)
    assert (prefix.num_tokens, prefix.blocks) == (8, ((0, 1),))
    compute(allocator, b)
    assert tables(b) == [[0, 1, 3, 4, 5]]
    allocator.check([a, b])


def test_a_block_is_found_only_after_it_was_computed() -> None:
    allocator = allocator_of(8)
    a = sequence_of(12)
    assert allocator.admit(a, allocator.find_prefix(a))
    allocator.allocate(a, 12)
    assert _hit(allocator, 12) == 0
    a.num_computed_tokens = 7
    allocator.commit(a)
    assert _hit(allocator, 12) == 4


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_prompt_that_is_cached_as_a_whole_leaves_a_token_to_compute(length: int, hit: int) -> None:
    allocator = allocator_of(8)
    compute(allocator, sequence_of(16))
    assert _hit(allocator, length) == hit


def test_generated_tokens_are_found_by_a_prompt_that_continues_them() -> None:
    allocator = allocator_of(8)
    a = sequence_of(6)
    compute(allocator, a)
    a.token_ids += [1, 2, 3]
    compute(allocator, a)
    assert _hit(allocator, [*range(100, 106), 1, 2, 3, 4]) == 8


def test_another_salt_adapter_or_weights_version_shares_nothing() -> None:
    allocator = allocator_of(16)
    compute(allocator, sequence_of(8, cache_salt="one", adapter=("lora", 1)))
    same = {"cache_salt": "one", "adapter": ("lora", 1)}
    assert _hit(allocator, 9, **same) == 8
    assert _hit(allocator, 9, **{**same, "cache_salt": "two"}) == 0
    assert _hit(allocator, 9, **{**same, "cache_salt": None}) == 0
    assert _hit(allocator, 9, **{**same, "adapter": ("lora", 2)}) == 0
    allocator.weights_version = 1
    assert _hit(allocator, 9, **same) == 0
    allocator.weights_version = 0
    assert _hit(allocator, 9, **same) == 8


def test_tokens_are_compared_not_only_their_hashes() -> None:
    allocator = allocator_of(8)
    assert hash((2**61 - 1,) * 4) == hash((0,) * 4)
    compute(allocator, sequence_of([0] * 8))
    assert _hit(allocator, [2**61 - 1] * 9) == 0
    assert _hit(allocator, [0] * 4 + [2**61 - 1] * 5) == 4
    assert _hit(allocator, [0] * 9) == 8


def test_equal_blocks_computed_side_by_side_stay_private_and_only_one_is_indexed() -> None:
    allocator = allocator_of(8)
    a, b = sequence_of(5, "a"), sequence_of(5, "b")
    for sequence in (a, b):  # both start before either is indexed
        assert allocator.admit(sequence, allocator.find_prefix(sequence))
    compute(allocator, a)
    compute(allocator, b)
    assert (tables(a), tables(b)) == ([[0, 1]], [[2, 3]])
    assert allocator.pools[0].cached_blocks() == {0}
    allocator.free(a)
    allocator.free(b)
    assert allocator.pools[0].num_cached_unreferenced == 1
    allocator.check([])


def test_the_shorter_of_two_hits_is_what_every_group_holds() -> None:
    allocator = allocator_of(8, windows=(None, 6))
    compute(allocator, sequence_of(16))
    pool = allocator.pools[1]
    pool.check()
    # the window group lost the block of tokens 8 .. 11, which a query at 16 or 12 would see; one at 8 wouldn't
    victim = next(
        block for block in pool.cached_blocks() if allocator._index._nodes[1][block].key == (108, 109, 110, 111)
    )
    allocator._index.drop_block(1, victim)
    assert _hit(allocator, 17) == 8


def test_a_hit_needs_only_the_windows_blocks_of_a_window_group() -> None:
    allocator = allocator_of(8, windows=(None, 6), max_sequences=1)
    a = sequence_of(16)
    compute(allocator, a, 8)
    compute(allocator, a, 8)
    assert tables(a)[1] == [R, R, 2, 3]
    allocator.free(a)
    thief = sequence_of([1] * 8, "thief")  # evicts the window group's first two blocks
    compute(allocator, thief)
    assert allocator.pools[1].cached_blocks() >= {2, 3}
    allocator.free(thief)
    again = sequence_of(17, "again")
    prefix = allocator.find_prefix(again)
    assert prefix.num_tokens == 16
    assert prefix.blocks == ((0, 1, 2, 3), (R, R, 2, 3))
    assert allocator.admit(again, prefix)
    allocator.check([again])
    compute(allocator, again)
    allocator.check([again])


def test_a_prefix_whose_head_was_evicted_is_of_no_use_until_it_is_computed_again() -> None:
    allocator = allocator_of(6)
    compute(allocator, a := sequence_of(12))
    allocator.free(a)
    pool = allocator.pools[0]
    head = next(block for block in pool.cached_blocks() if allocator._index._nodes[0][block].key[0] == 100)
    pool.touch(head)
    for block in (1, 2):  # the tails are used once more, so that the head is the oldest
        pool.touch(block)
        pool.free([block])
    pool.free([head])
    pool._evictable.move_to_end(head, last=False)
    compute(allocator, thief := sequence_of([1] * 16, "thief"))
    assert _hit(allocator, 13) == 0
    allocator.free(thief)
    compute(allocator, b := sequence_of(12, "b"))
    assert _hit(allocator, 13) == 12
    allocator.check([b])


def test_who_wants_prompt_logprobs_computes_the_whole_prompt_but_leaves_it_to_others() -> None:
    allocator = allocator_of(16)
    compute(allocator, sequence_of(8, "a", wants_prompt_logprobs=True))
    assert _hit(allocator, 9, wants_prompt_logprobs=True) == 0
    assert _hit(allocator, 9) == 8


def test_without_prefix_caching_nothing_is_indexed() -> None:
    allocator = allocator_of(8, enable_prefix_caching=False)
    a = sequence_of(8)
    compute(allocator, a)
    assert _hit(allocator, 9) == 0
    allocator.free(a)
    assert allocator.pools[0].num_free == 8
    allocator.check([])


def test_the_reserved_fraction_of_each_pool_is_left_to_cached_prefixes() -> None:
    allocator = allocator_of(8, prefix_cache_fraction=0.5)
    compute(allocator, a := sequence_of(24))
    allocator.free(a)
    b = sequence_of([1] * 20, "b")
    assert not allocator.admit(b, allocator.find_prefix(b))  # 2 unused and 2 of the 6 cached
    c = sequence_of([1] * 16, "c")
    compute(allocator, c)
    assert tables(c) == [[6, 7, 5, 4]]
    assert _hit(allocator, 24) == 16
    allocator.check([c])


def test_growing_keeps_tables_and_prefixes_and_raises_the_reserve() -> None:
    allocator = allocator_of(4, windows=(None, 6), max_sequences=2, prefix_cache_fraction=0.25)
    a = sequence_of(9)
    compute(allocator, a, 8)
    compute(allocator, a)
    before = tables(a)
    allocator.grow(20)
    assert [pool.num_blocks for pool in allocator.pools] == [20, 10]
    assert [pool.num_reserved for pool in allocator.pools] == [5, 2]
    assert tables(a) == before
    assert _hit(allocator, 12) == 8
    allocator.grow(4)
    assert [pool.num_blocks for pool in allocator.pools] == [20, 10]
    allocator.check([a])


def test_a_pool_that_starts_empty_serves_after_it_has_grown() -> None:
    allocator = allocator_of(0)
    a = sequence_of(5)
    assert not allocator.admit(a, allocator.find_prefix(a))
    allocator.grow(2)
    compute(allocator, a)
    assert tables(a) == [[0, 1]]


# -- reset -------------------------------------------------------------------------------------------------------------


def test_a_reset_forgets_prefixes_and_leaves_running_sequences_their_blocks() -> None:
    allocator = allocator_of(8)
    a, b = sequence_of(9, "a"), sequence_of([1] * 8, "b")
    compute(allocator, a)
    compute(allocator, b)
    allocator.free(b)
    allocator.reset_prefix_cache()
    assert _hit(allocator, 9) == _hit(allocator, [1] * 9) == 0
    assert tables(a) == [[0, 1, 2]]
    assert allocator.pools[0].num_free == 5
    allocator.check([a])


@pytest.mark.parametrize("computed", [3, 4, 6])
def test_what_was_begun_before_a_reset_is_never_found_after_it(computed: int) -> None:
    allocator = allocator_of(8)
    a = sequence_of(12)
    compute(allocator, a, computed)  # partly with the old weights
    allocator.reset_prefix_cache()
    compute(allocator, a)
    assert _hit(allocator, 13) == 0
    allocator.free(a)
    assert _hit(allocator, 13) == 0
    compute(allocator, b := sequence_of(12, "b"))
    assert _hit(allocator, 13) == 12
    allocator.check([b])


def test_what_was_begun_under_another_weights_version_is_not_found_under_the_new_one() -> None:
    allocator = allocator_of(8)
    a = sequence_of(12)
    compute(allocator, a, 3)
    allocator.weights_version = 1
    compute(allocator, a)
    assert _hit(allocator, 13) == 0


def test_nothing_is_kept_of_salts_whose_blocks_are_gone() -> None:
    allocator = allocator_of(4)
    for salt in range(50):
        a = sequence_of(9, cache_salt=str(salt))
        compute(allocator, a)
        allocator.free(a)
        allocator.check([])
    assert len(allocator._index._top.children) <= 4


def test_the_index_does_not_keep_sequences_alive() -> None:
    allocator = allocator_of(8)
    a = sequence_of(12)
    compute(allocator, a)
    allocator.free(a)
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None
