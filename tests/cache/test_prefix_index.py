"""What makes two blocks the same."""

from __future__ import annotations

import pytest

from hf_paged.cache.prefix import PrefixIndex, PrefixNode
from hf_paged.errors import PagedError

ROOT = (None, None, 0)


def _chain(index: PrefixIndex, *blocks: tuple[int, ...], group: int = 0, first_block: int = 0) -> list[PrefixNode]:
    """Indexes blocks one below the other, with ids from `first_block` on."""
    node, nodes = index.root(ROOT), []
    for block_id, tokens in enumerate(blocks, start=first_block):
        node = index.extend(node, tokens)
        index.set_block(node, group, block_id)
        nodes.append(node)
    return nodes


def test_equal_tokens_below_one_parent_are_one_node() -> None:
    index = PrefixIndex(1)
    first = index.extend(index.root(ROOT), (1, 2))
    assert index.extend(index.root(ROOT), (1, 2)) is first
    assert index.extend(index.root(ROOT), (1, 3)) is not first


def test_equal_tokens_below_another_parent_or_root_are_another_node() -> None:
    index = PrefixIndex(1)
    [first] = _chain(index, (1, 2))
    below = index.extend(first, (1, 2))
    salted = index.extend(index.root(("salt", None, 0)), (1, 2))
    assert len({id(node) for node in (first, below, salted)}) == 3


def test_tokens_with_equal_hashes_are_told_apart() -> None:
    low, high = (0, 5), (2**61 - 1, 5)
    assert hash(low) == hash(high)
    index = PrefixIndex(1)
    root = index.root(ROOT)
    assert index.extend(root, low) is not index.extend(root, high)


def test_a_leaf_goes_with_its_last_block_and_takes_empty_ancestors_along() -> None:
    index = PrefixIndex(1)
    _chain(index, (1, 1), (2, 2), (3, 3))
    index.drop_block(0, 0)  # the head: its descendants keep the node
    index.check([{1, 2}])
    index.drop_block(0, 2)
    index.check([{1}])
    index.drop_block(0, 1)  # nothing below it, nothing above it
    assert len(index) == 0
    assert not index.root(ROOT).children
    index.check([set()])


def test_a_node_lives_as_long_as_one_group_holds_its_block() -> None:
    index = PrefixIndex(2)
    [node] = _chain(index, (1, 1), group=0, first_block=4)
    index.set_block(node, 1, 9)
    index.drop_block(0, 4)
    assert node.blocks == [None, 9]
    assert index.extend(index.root(ROOT), (1, 1)) is node
    index.drop_block(1, 9)
    assert index.extend(index.root(ROOT), (1, 1)) is not node


def test_dropping_a_block_that_is_not_indexed_does_nothing() -> None:
    index = PrefixIndex(1)
    _chain(index, (1, 1))
    index.drop_block(0, 99)
    index.check([{0}])


def test_a_chain_whose_blocks_went_is_put_back_by_who_still_holds_its_end() -> None:
    index = PrefixIndex(1)
    first, second = _chain(index, (1, 1), (2, 2))
    index.drop_block(0, 1)
    index.drop_block(0, 0)
    index.check([set()])
    third = index.extend(second, (3, 3))
    index.set_block(third, 0, 7)
    index.check([{7}])
    found = index.root(ROOT).children[(1, 1)].children[(2, 2)].children[(3, 3)]
    assert found is third
    assert found.parent is not second
    assert first.blocks == second.blocks == [None]


def test_two_holders_of_a_chain_that_went_put_it_back_once() -> None:
    index = PrefixIndex(1)
    [node] = _chain(index, (1, 1))
    index.drop_block(0, 0)
    one, other = index.extend(node, (2, 2)), index.extend(node, (2, 2))
    assert one is other


def test_a_root_without_content_is_not_kept() -> None:
    index = PrefixIndex(1)
    for salt in range(100):
        index.root((salt, None, 0))
    node = index.extend(index.root(("salt", None, 0)), (1, 1))
    index.set_block(node, 0, 3)
    assert index.root(("salt", None, 0)).children
    index.drop_block(0, 3)
    index.check([set()])
    assert not index._top.children


def test_two_sequences_that_start_before_a_root_has_content_meet_in_it() -> None:
    index = PrefixIndex(1)
    one, other = index.root(ROOT), index.root(ROOT)
    assert index.extend(one, (1, 1)) is index.extend(other, (1, 1))


def test_after_a_reset_nothing_from_before_is_found_even_where_it_goes_on_growing() -> None:
    index = PrefixIndex(1)
    [node] = _chain(index, (1, 1))
    index.drop_block(0, 0)
    index.clear()
    late = index.extend(node, (2, 2))
    index.set_block(late, 0, 5)
    assert not index.root(ROOT).children
    index.check([{5}])
    index.drop_block(0, 5)
    index.check([set()])


def test_check_finds_blocks_that_are_missing_surplus_or_misplaced_and_empty_nodes() -> None:
    index = PrefixIndex(1)
    [node] = _chain(index, (1, 1))
    with pytest.raises(PagedError, match="Group 0 caches blocks"):
        index.check([set()])
    with pytest.raises(PagedError, match="Group 0 caches blocks"):
        index.check([{0, 1}])
    node.blocks[0] = 8
    with pytest.raises(PagedError, match="not where the index has it"):
        index.check([{0}])
    node.blocks[0] = 0
    index.extend(node, (2, 2))
    with pytest.raises(PagedError, match="holds nothing"):
        index.check([{0}])
