"""Rows that go on from one another: exact blocks, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_paged import PagedConfig, PagedEngine
from hf_paged.engine.external import ExternalRows, external_sampling
from hf_paged.errors import PagedError
from hf_paged.request import Request, SequenceState
from tests.oracle import random_prompt
from tests.zoo import fresh

PROMPT = random_prompt(12, seed=1)


@pytest.fixture
def engine() -> Iterator[PagedEngine]:
    config = PagedConfig(block_size=8, num_blocks=16, enable_prefix_caching=False)
    with PagedEngine(fresh("llama", num_hidden_layers=1), config) as engine:
        yield engine


def _request(name: str = "a", num_rows: int = 4) -> Request:
    return Request(name, PROMPT, 20, num_sequences=num_rows, sampling=external_sampling())


def _tables(request: Request) -> list[list[int]]:
    return [list(sequence.block_tables[0].blocks) for sequence in request.sequences]


def test_rows_that_change_places_move_no_block(engine: PagedEngine) -> None:
    request = _request()
    with ExternalRows(engine, [request]) as rows:
        rows.logits(range(4))
        rows.append(range(4), [1, 2, 3, 4])
        rows.logits(range(4))
        # the four wrote into the prompt's second block one after another; the last of them into the block itself
        before = _tables(request)
        assert before == [[0, 2], [0, 3], [0, 4], [0, 1]]
        rows.reorder(range(4), [3, 2, 1, 0])
        assert _tables(request) == before
        rows.append(range(4), [9, 9, 9, 9])
        assert [sequence.token_ids[12:] for sequence in request.sequences] == [[1, 9], [2, 9], [3, 9], [4, 9]]
        rows.reorder(range(4), [0, 1, 2, 3])
        rows.finish([0])
        assert [sequence.is_finished for sequence in request.sequences] == [False, False, False, True]
    engine.check()


def test_rows_that_go_on_from_one_share_its_blocks_until_they_write(engine: PagedEngine) -> None:
    request = _request()
    pool = engine.core.allocator.pools[0]
    with ExternalRows(engine, [request]) as rows:
        rows.logits(range(4))
        rows.append(range(4), [1, 2, 3, 4])
        rows.logits(range(4))
        assert pool.num_referenced == 5
        rows.reorder(range(4), [1, 1, 3, 1])  # rows 0 and 2 are given up
        engine.check()
        assert pool.num_referenced == 3  # the first block, and those of rows 1 and 3
        rows.append(range(4), [6, 7, 8, 9])
        rows.logits(range(4))
        engine.check()
        assert pool.num_referenced == 5
        tokens = sorted(sequence.token_ids[12:] for sequence in request.sequences)
        assert tokens == [[2, 6], [2, 7], [2, 9], [4, 8]]
    engine.check()
    assert pool.num_referenced == 0


def test_a_preempted_row_can_be_gone_on_from(engine: PagedEngine) -> None:
    request = _request(num_rows=3)
    with ExternalRows(engine, [request]) as rows:
        rows.logits(range(3))
        rows.append(range(3), [1, 2, 3])
        expected = [logits.clone() for logits in rows.logits(range(3))]
        engine.core.scheduler.preempt(request.sequences[2])
        assert request.sequences[2].state is SequenceState.IDLE
        rows.reorder(range(3), [2, 2, 0])  # a running row takes over a preempted one
        engine.check()
        rows.append(range(3), [5, 5, 5])
        after = rows.logits(range(3))
        engine.check()
    with ExternalRows(engine, [_request("alone", 1)]) as alone:
        alone.logits([0])
        alone.append([0], [3])
        assert alone.logits([0])[0].allclose(expected[2], atol=1e-4)
        alone.append([0], [5])
        right = alone.logits([0])[0]
    assert after[0].allclose(right, atol=1e-4)
    assert after[1].allclose(right, atol=1e-4)
    assert not after[2].allclose(right, atol=1e-2)


@pytest.mark.parametrize(
    ("rows", "parents"), [([0, 1], [0, 2]), ([0, 1, 2, 3], [0, 1, 0, 3])], ids=["not among them", "another request"]
)
def test_a_row_goes_on_from_siblings_among_those_reordered(
    engine: PagedEngine, rows: list[int], parents: list[int]
) -> None:
    requests = [_request("a", 2), _request("b", 2)]
    with ExternalRows(engine, requests) as external:
        external.logits(range(4))
        with pytest.raises(PagedError, match="A row can only go on from"):
            external.reorder(rows, parents)
        external.append(range(4), [1, 2, 3, 4])
        external.logits(range(4))
        engine.check()
