"""Logical to physical blocks of one sequence."""

from __future__ import annotations

import numpy as np

from hf_paged.cache.block_table import RELEASED, BlockTable


def _table(*blocks: int) -> BlockTable:
    table = BlockTable()
    table.blocks.extend(blocks)
    return table


def test_a_new_table_holds_nothing() -> None:
    table = BlockTable()
    assert len(table) == 0
    assert list(table.held()) == []


def test_released_blocks_keep_their_place_but_are_no_longer_held() -> None:
    table = _table(4, 7, 3)
    assert list(table.release_until(2)) == [4, 7]
    assert list(table.blocks) == [RELEASED, RELEASED, 3]
    assert list(table.held()) == [3]
    assert len(table) == 3


def test_a_block_is_released_once() -> None:
    table = _table(4, 7, 3)
    table.release_until(2)
    assert list(table.release_until(2)) == []
    assert list(table.release_until(1)) == []
    assert list(table.release_until(3)) == [3]
    assert table.num_released == 3


def test_a_fork_points_at_the_same_blocks_and_goes_its_own_way() -> None:
    parent = _table(4, 7, 3)
    parent.release_until(1)
    child = parent.fork()
    child.blocks[2] = 9
    child.blocks.append(5)
    child.release_until(2)
    assert list(parent.blocks) == [RELEASED, 7, 3]
    assert list(parent.held()) == [7, 3]
    assert list(child.blocks) == [RELEASED, RELEASED, 9, 5]


def test_the_blocks_are_an_int32_buffer_that_numpy_reads_without_a_copy() -> None:
    table = _table(4, 7)
    view = np.frombuffer(table.blocks, dtype=np.int32)
    table.blocks[1] = 8
    assert view.tolist() == [4, 8]
