"""Who runs next: exact schedules."""

from __future__ import annotations

import pytest

from hf_paged.request import Sequence, SequenceState
from hf_paged.scheduler.scheduler import Scheduler
from tests.scheduler.drive import names, scheduler_of, sequence_of, shape, step, tables


def _add(scheduler: Scheduler, name: str, num_tokens: int, **options: object) -> Sequence:
    """Adds a request whose tokens are unlike every other's."""
    start = 1000 * (ord(name[0]) - ord("a") + 1)
    sequence = sequence_of(range(start, start + num_tokens), name, **options)
    scheduler.add(sequence)
    return sequence


# -- the token budget --------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_an_empty_step() -> None:
    output = scheduler_of(4).schedule()
    assert (output.scheduled, output.copies, output.num_tokens) == ((), ((),), 0)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_and_then_decodes() -> None:
    scheduler = scheduler_of(16, budget=8)
    _add(scheduler, "a", 20)
    assert [step(scheduler) for _ in range(5)] == [[("a", 8)], [("a", 8)], [("a", 4)], [("a", 1)], [("a", 1)]]


def test_decodes_and_a_chunk_share_one_step() -> None:
    scheduler = scheduler_of(16, budget=8)
    _add(scheduler, "a", 3)
    assert step(scheduler) == [("a", 3)]
    _add(scheduler, "b", 20)
    _add(scheduler, "c", 5)
    assert step(scheduler) == [("a", 1), ("b", 7)]
    assert step(scheduler) == [("a", 1), ("b", 7)]
    assert step(scheduler) == [("a", 1), ("b", 6), ("c", 1)]
    assert step(scheduler) == [("a", 1), ("b", 1), ("c", 4)]
    assert step(scheduler) == [("a", 1), ("b", 1), ("c", 1)]


def test_a_budget_of_one_serves_the_oldest_until_it_is_done() -> None:
    scheduler = scheduler_of(16, budget=1)
    a = _add(scheduler, "a", 2)
    _add(scheduler, "b", 1)
    assert [step(scheduler) for _ in range(4)] == [[("a", 1)]] * 4
    scheduler.finish(a)
    assert step(scheduler) == [("b", 1)]


def test_only_the_last_chunk_says_so() -> None:
    scheduler = scheduler_of(16, budget=8)
    _add(scheduler, "a", 9)
    [first] = scheduler.schedule().scheduled
    assert not first.is_last_chunk
    first.sequence.num_computed_tokens += 8
    [last] = scheduler.schedule().scheduled
    assert last.is_last_chunk


# -- admission ---------------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    scheduler = scheduler_of(16)
    for name in "abc":
        _add(scheduler, name, 2)
    assert step(scheduler) == [("a", 2), ("b", 2), ("c", 2)]


def test_lower_priority_values_go_first_then_arrival() -> None:
    scheduler = scheduler_of(16, budget=7)
    _add(scheduler, "a", 2)
    _add(scheduler, "b", 2, priority=1)
    _add(scheduler, "c", 2, priority=-1)
    _add(scheduler, "d", 2, priority=-1)
    assert step(scheduler) == [("c", 2), ("d", 2), ("a", 2), ("b", 1)]


def test_a_request_made_first_goes_first_even_if_it_is_added_later() -> None:
    scheduler = scheduler_of(16)
    a, b = sequence_of([1, 2], "a"), sequence_of([3, 4], "b")
    scheduler.add(b)
    scheduler.add(a)
    assert step(scheduler) == [("a", 2), ("b", 2)]


def test_a_late_urgent_request_takes_its_place_in_front_of_those_that_run() -> None:
    scheduler = scheduler_of(16, budget=8)
    _add(scheduler, "a", 2)
    step(scheduler)
    _add(scheduler, "b", 20, priority=-1)
    assert step(scheduler) == [("a", 1), ("b", 7)]
    assert names(scheduler.running) == ["b", "a"]
    assert step(scheduler) == [("b", 8)]


def test_at_most_max_sequences_are_in_one_step_and_none_is_admitted_beyond_them() -> None:
    scheduler = scheduler_of(16, max_sequences=2)
    sequences = [_add(scheduler, name, 1) for name in "abc"]
    assert step(scheduler) == [("a", 1), ("b", 1)]
    assert (names(scheduler.running), scheduler.num_waiting) == (["a", "b"], 1)
    scheduler.finish(sequences[0])
    assert step(scheduler) == [("b", 1), ("c", 1)]


def test_siblings_beyond_max_sequences_wait_for_their_turn() -> None:
    scheduler = scheduler_of(16, max_sequences=2)
    parent = _add(scheduler, "a", 3)
    step(scheduler, next_token=None)
    children = []
    for index in (1, 2):
        child = Sequence(parent.request, index, list(parent.token_ids))
        scheduler.fork(parent, child)
        children.append(child)
    for sequence in (parent, *children):
        sequence.token_ids.append(5)
    output = scheduler.schedule()
    assert [item.sequence.index for item in output.scheduled] == [0, 1]
    scheduler.finish(parent)
    assert [item.sequence.index for item in scheduler.schedule().scheduled] == [1, 2]


def test_a_sequence_waits_until_it_fits_beside_what_those_that_run_need_next() -> None:
    scheduler = scheduler_of(4)
    a = _add(scheduler, "a", 7)
    step(scheduler)
    _add(scheduler, "b", 5)  # 2 blocks, and 2 are left, but the first one's next token but one takes a third
    assert step(scheduler) == [("a", 1)]
    assert scheduler.num_waiting == 1
    scheduler.finish(a)
    assert step(scheduler) == [("b", 5)]
    assert scheduler.num_preemptions == 0


def test_nobody_overtakes_the_one_that_waits_longest() -> None:
    scheduler = scheduler_of(4)
    a = _add(scheduler, "a", 5)
    step(scheduler)
    _add(scheduler, "b", 12)
    _add(scheduler, "c", 1)
    assert step(scheduler) == [("a", 1)]
    scheduler.finish(a)
    assert step(scheduler) == [("b", 8)]


def test_a_prefix_hit_is_computed_from_where_it_ends_and_counted_once() -> None:
    scheduler = scheduler_of(16)
    a = _add(scheduler, "a", 9)
    step(scheduler)
    step(scheduler)
    b = sequence_of(a.token_ids[:9], "b")
    scheduler.add(b)
    assert step(scheduler) == [("a", 1), ("b", 1)]
    assert tables(b)[0][:2] == tables(a)[0][:2]
    assert b.request.num_cached_tokens == 8
    assert (scheduler.prefix_query_tokens, scheduler.prefix_hit_tokens) == (18, 8)
    assert b.request.first_scheduled_time is not None


# -- preemption --------------------------------------------------------------------------------------------------------


def test_when_blocks_run_out_the_newest_gives_way_and_resumes_later() -> None:
    scheduler = scheduler_of(4, enable_prefix_caching=False)
    a, b = _add(scheduler, "a", 3), _add(scheduler, "b", 3)
    assert step(scheduler) == [("a", 3), ("b", 3)]
    for _ in range(5):
        assert step(scheduler) == [("a", 1), ("b", 1)]
    # both hold 2 blocks with 8 tokens; the 9th of "a" takes both of "b"
    assert (tables(a), tables(b)) == ([[0, 2]], [[1, 3]])
    assert step(scheduler) == [("a", 1)]
    assert (b.state, b.num_computed_tokens, b.block_tables) == (SequenceState.WAITING, 0, [])
    assert (names(scheduler.running), scheduler.num_waiting, scheduler.num_preemptions) == (["a"], 1, 1)
    assert b.num_tokens == 9  # its tokens stay
    assert step(scheduler) == [("a", 1)]
    scheduler.finish(a)
    assert step(scheduler) == [("b", 8)]
    assert step(scheduler) == [("b", 1)]
    assert step(scheduler) == [("b", 1)]


def test_a_resume_finds_its_own_blocks_and_is_no_prefix_hit() -> None:
    scheduler = scheduler_of(8)
    a = _add(scheduler, "a", 9)
    step(scheduler)
    step(scheduler)
    scheduler.preempt(a)
    assert step(scheduler) == [("a", 2)]  # 8 of its 10 tokens were still there
    assert a.request.num_cached_tokens == 0
    assert scheduler.prefix_hit_tokens == 0


def test_the_newest_goes_first_also_when_a_middle_one_needs_the_block() -> None:
    scheduler = scheduler_of(6, enable_prefix_caching=False)
    _add(scheduler, "a", 1)
    b = _add(scheduler, "b", 4)
    c = _add(scheduler, "c", 2)
    step(scheduler)
    pool = scheduler.allocator.pools[0]
    while pool.num_allocatable:
        pool.allocate()
    assert shape(scheduler.schedule()) == [("a", 1), ("b", 1)]
    assert (b.state, c.state) == (SequenceState.RUNNING, SequenceState.WAITING)


def test_the_newest_that_needs_a_block_itself_gives_way_itself() -> None:
    scheduler = scheduler_of(2, enable_prefix_caching=False)
    parent = _add(scheduler, "a", 4)
    step(scheduler, next_token=None)
    child = Sequence(parent.request, 1, list(parent.token_ids))
    scheduler.fork(parent, child)
    parent.token_ids.append(1)
    child.token_ids.append(2)
    output = scheduler.schedule()
    assert [item.sequence.index for item in output.scheduled] == [0]
    assert (child.state, child.block_tables, scheduler.num_preemptions) == (SequenceState.WAITING, [], 1)


def test_the_least_urgent_is_preempted_even_if_it_came_first() -> None:
    scheduler = scheduler_of(4, enable_prefix_caching=False)
    a = _add(scheduler, "a", 3, priority=5)
    b = _add(scheduler, "b", 3)
    for _ in range(7):
        step(scheduler)
    assert (a.state, b.state) == (SequenceState.WAITING, SequenceState.RUNNING)


def test_the_oldest_progresses_in_every_step_however_small_the_pool() -> None:
    scheduler = scheduler_of(5, budget=3, enable_prefix_caching=False)
    sequences = [_add(scheduler, name, 3) for name in "abcd"]
    while sequences:
        oldest = sequences[0]
        before = oldest.num_computed_tokens
        assert step(scheduler)[0][0] == oldest.request.request_id
        assert oldest.num_computed_tokens > before
        if oldest.num_tokens >= 20:
            scheduler.finish(sequences.pop(0))
    assert scheduler.allocator.pools[0].num_referenced == 0


def test_the_last_two_of_a_request_with_siblings_do_not_need_a_copy_that_has_no_block() -> None:
    scheduler = scheduler_of(2, enable_prefix_caching=False)
    parent = _add(scheduler, "a", 6)
    step(scheduler, next_token=None)
    child = Sequence(parent.request, 1, list(parent.token_ids))
    scheduler.fork(parent, child)
    parent.token_ids.append(1)
    child.token_ids.append(2)
    output = scheduler.schedule()  # no block for a copy: the sibling gives way, and then none is needed
    assert [item.sequence.index for item in output.scheduled] == [0]
    assert output.copies == ((),)
    assert child.state is SequenceState.WAITING


def test_copies_of_a_step_are_listed_group_by_group() -> None:
    scheduler = scheduler_of(16, windows=(None, 6))
    parent = _add(scheduler, "a", 6)
    step(scheduler, next_token=None)
    children = [Sequence(parent.request, index, list(parent.token_ids)) for index in (1, 2)]
    for child in children:
        scheduler.fork(parent, child)
    for sequence in (parent, *children):
        sequence.token_ids.append(1)
    assert scheduler.schedule().copies == (((1, 2), (1, 3)), ((1, 2), (1, 3)))


# -- rows that wait for a token from outside ---------------------------------------------------------------------------


def test_a_sequence_whose_tokens_are_all_computed_is_left_out_until_it_gets_one() -> None:
    scheduler = scheduler_of(8)
    a = _add(scheduler, "a", 3)
    assert step(scheduler, next_token=None) == [("a", 3)]
    assert step(scheduler, next_token=None) == []
    assert names(scheduler.running) == ["a"]
    a.token_ids.append(1)
    assert step(scheduler, next_token=None) == [("a", 1)]


def test_idle_rows_give_their_blocks_to_who_waits_when_nothing_else_can_run() -> None:
    scheduler = scheduler_of(3, enable_prefix_caching=False)
    a = _add(scheduler, "a", 5)
    step(scheduler, next_token=None)
    b = _add(scheduler, "b", 5)
    assert step(scheduler, next_token=None) == [("b", 5)]
    assert a.state is SequenceState.IDLE
    assert (a.num_computed_tokens, scheduler.num_waiting) == (0, 0)
    scheduler.finish(b)
    a.token_ids.append(1)
    scheduler.add(a)
    assert step(scheduler, next_token=None) == [("a", 6)]


def test_idle_rows_keep_their_blocks_while_others_can_run() -> None:
    scheduler = scheduler_of(4, enable_prefix_caching=False)
    idle = _add(scheduler, "a", 5)
    step(scheduler, next_token=None)
    _add(scheduler, "b", 3)
    assert step(scheduler) == [("b", 3)]
    _add(scheduler, "c", 5)
    assert step(scheduler) == [("b", 1)]
    assert idle.state is SequenceState.RUNNING


def test_a_row_that_was_preempted_while_idle_can_be_ended() -> None:
    scheduler = scheduler_of(3)
    a = _add(scheduler, "a", 5)
    step(scheduler, next_token=None)
    scheduler.preempt(a)
    assert a.state is SequenceState.IDLE
    scheduler.finish(a)
    assert (a.state, scheduler.num_waiting, scheduler.running) == (SequenceState.FINISHED, 0, [])
    assert step(scheduler) == []


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_sequence_can_be_ended_at_any_moment_and_leaves_nothing_behind(steps: int) -> None:
    scheduler = scheduler_of(8, budget=4)
    a, b = _add(scheduler, "a", 9), _add(scheduler, "b", 3)
    for _ in range(steps):
        step(scheduler)
    for sequence in (a, b):
        scheduler.finish(sequence)
        assert sequence.is_finished
        scheduler.allocator.check(scheduler.running)
    assert (scheduler.running, scheduler.num_waiting) == ([], 0)
    assert scheduler.allocator.pools[0].num_referenced == 0
    assert step(scheduler) == []


def test_those_that_end_while_they_wait_are_passed_over() -> None:
    scheduler = scheduler_of(16)
    a, _, c = (_add(scheduler, name, 2) for name in "abc")
    scheduler.finish(a)
    scheduler.finish(c)
    assert scheduler.num_waiting == 1
    assert step(scheduler) == [("b", 2)]
    assert scheduler.num_waiting == 0


def test_ending_twice_does_nothing() -> None:
    scheduler = scheduler_of(16)
    a = _add(scheduler, "a", 2)
    step(scheduler)
    scheduler.finish(a)
    scheduler.finish(a)
    assert scheduler.allocator.pools[0].num_referenced == 0


def test_a_sequence_that_no_pool_can_hold_gets_nothing_and_harms_nobody() -> None:
    """The engine refuses it; the scheduler alone must not compute it over and over without end."""
    scheduler = scheduler_of(4)
    huge = _add(scheduler, "a", 17)
    assert shape(scheduler.schedule()) == []
    assert scheduler.num_preemptions == 0
    scheduler.finish(huge)
    _add(scheduler, "b", 16)
    assert step(scheduler) == [("b", 8)]


# -- draft tokens ------------------------------------------------------------------------------------------------------


def test_drafts_get_what_budget_is_left_after_everybodys_own_tokens() -> None:
    scheduler = scheduler_of(16, budget=8)
    a, b = _add(scheduler, "a", 2), _add(scheduler, "b", 3)
    assert step(scheduler) == [("a", 2), ("b", 3)]
    a.draft_token_ids = b.draft_token_ids = [1, 2, 3, 4]
    output = scheduler.schedule()
    assert shape(output) == [("a", 5), ("b", 3)]
    assert [item.num_draft_tokens for item in output.scheduled] == [4, 2]
    assert all(item.is_last_chunk for item in output.scheduled)


def test_drafts_come_before_new_requests_and_wait_for_the_chunks_of_running_ones() -> None:
    scheduler = scheduler_of(16, budget=8)
    a = _add(scheduler, "a", 2)
    step(scheduler)
    _add(scheduler, "b", 20)
    a.draft_token_ids = [1, 2, 3]
    output = scheduler.schedule()
    assert shape(output) == [("a", 4), ("b", 4)]
    for item in output.scheduled:
        item.sequence.num_computed_tokens += item.num_new_tokens - item.num_draft_tokens
    a.token_ids.append(9)
    assert shape(scheduler.schedule()) == [("a", 1), ("b", 7)]


def test_drafts_take_no_blocks_from_anybody() -> None:
    scheduler = scheduler_of(2, budget=16)
    a, b = _add(scheduler, "a", 3, max_new_tokens=2), _add(scheduler, "b", 3, max_new_tokens=2)
    step(scheduler)
    assert tables(a) == [[0]]
    assert tables(b) == [[1]]
    a.draft_token_ids = [1, 2, 3]  # three more than the block holds
    assert shape(scheduler.schedule()) == [("a", 1), ("b", 1)]
    assert scheduler.num_preemptions == 0


def test_blocks_of_drafts_that_were_wrong_go_back() -> None:
    scheduler = scheduler_of(8, budget=16)
    a = _add(scheduler, "a", 4)
    step(scheduler)
    a.draft_token_ids = list(range(6))
    assert shape(scheduler.schedule()) == [("a", 7)]
    assert tables(a) == [[0, 1, 2]]
    a.num_computed_tokens += 1
    scheduler.allocator.trim(a)
    assert tables(a) == [[0, 1]]
    scheduler.allocator.check(scheduler.running)


def test_a_cached_block_is_never_one_whose_tokens_may_be_taken_back() -> None:
    scheduler = scheduler_of(8, budget=16)
    a = _add(scheduler, "a", 8)
    a.num_revocable_tokens = 2
    step(scheduler)
    assert a.num_indexed_blocks == 1
    scheduler.finish(a)
    b = _add(scheduler, "a", 8)
    b.num_revocable_tokens = 5
    assert scheduler.allocator.find_prefix(b).num_tokens == 0
    b.num_revocable_tokens = 0
    assert scheduler.allocator.find_prefix(b).num_tokens == 4
