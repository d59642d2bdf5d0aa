"""What makes two blocks the same: a tree of block contents that compares tokens, never hashes alone.

    top
      └─ (salt, adapter, weights version)     a root
           └─ (5, 9, 2, 2)                    node: the tokens of one full block, after everything above it
                ├─ (7, 1, 1, 4)               blocks[g]: the physical block of layer group g that holds it, or None
                └─ (7, 1, 3, 0)

A node's children are keyed by their token tuples in a dict, so a hit has compared every token of the chain, and equal
tokens under another parent, salt, adapter or version are another node. A node lives while some group holds its block
or a descendant lives; a window group may have given back the blocks of inner nodes. Roots come and go like any node.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hf_paged.errors import PagedError

Tokens = tuple[int, ...]
NodeKey = tuple[Hashable, ...]  # the tokens of a block; of a root, what keeps its prefixes apart from others


class PrefixNode:
    """One full block's content in its context."""

    __slots__ = ("attached", "blocks", "children", "key", "parent")

    def __init__(self, parent: PrefixNode | None, key: NodeKey, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[NodeKey, PrefixNode] = {}
        self.blocks: list[int | None] = [None] * num_groups
        self.attached = True


class PrefixIndex:
    """The tree, and for every group the way back from a block to its node."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._top = PrefixNode(None, (), num_groups)
        self._nodes: list[dict[int, PrefixNode]] = [{} for _ in range(num_groups)]

    def root(self, key: NodeKey) -> PrefixNode:
        """The node above the first block of every sequence with this key; it joins the tree with its first child."""
        node = self._top.children.get(key)
        if node is None:
            node = PrefixNode(self._top, key, self._num_groups)
            node.attached = False
        return node

    def extend(self, parent: PrefixNode, tokens: Tokens) -> PrefixNode:
        """The child of `parent` with these tokens, made if there is none."""
        parent = self._reattach(parent)
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = PrefixNode(parent, tokens, self._num_groups)
        return node

    def set_block(self, node: PrefixNode, group: int, block_id: int) -> None:
        """A written block of a group holds the node's content."""
        node.blocks[group] = block_id
        self._nodes[group][block_id] = node

    def drop_block(self, group: int, block_id: int) -> None:
        """A group's block no longer holds what it held; nodes that nothing keeps alive go too."""
        node = self._nodes[group].pop(block_id, None)
        if node is None:
            return
        node.blocks[group] = None
        while node.parent is not None and not node.children and all(block is None for block in node.blocks):
            if not node.attached:
                return
            node.attached = False
            del node.parent.children[node.key]
            node = node.parent

    def clear(self) -> None:
        """Forgets everything. What running sequences add below nodes that they still hold is out of reach."""
        self._top = PrefixNode(None, (), self._num_groups)

    def _reattach(self, node: PrefixNode) -> PrefixNode:
        # A sequence may hold a node whose block, another sequence's, was evicted meanwhile: put the chain back.
        missing = []
        while not node.attached and node.parent is not None:
            missing.append(node.key)
            node = node.parent
        for key in reversed(missing):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = PrefixNode(node, key, self._num_groups)
            node = child
        return node

    def check(self, cached: Sequence[set[int]]) -> None:
        """Proves that `cached[g]` are the indexed blocks of group g, and that no node is kept for nothing.

        Raises:
            PagedError: naming the first thing that is wrong.
        """
        for group, (nodes, expected) in enumerate(zip(self._nodes, cached, strict=True)):
            if nodes.keys() != expected:
                raise PagedError(f"Group {group} caches blocks {sorted(expected)}, but {sorted(nodes)} are indexed.")
            for block_id, node in nodes.items():
                if node.blocks[group] != block_id or not node.attached:
                    raise PagedError(f"Block {block_id} of group {group} is not where the index has it.")
        below = list(self._top.children.values())
        while below:
            node = below.pop()
            if not node.children and all(block is None for block in node.blocks):
                raise PagedError(f"The index keeps a node that holds nothing, {node.key}.")
            below += node.children.values()

    def __len__(self) -> int:
        """How many blocks are indexed, over all groups."""
        return sum(map(len, self._nodes))
