"""BlockAllocator: who gets which block. The scheduler asks; the pools, tables and the prefix index answer together.

sequence "a", block_size 4, a full group and a group with a window of 6

  tokens          0 1 2 3 │ 4 5 6 7 │ 8 9 . .        next to compute: 10
  full group      block 0 │ block 1 │ block 2
  window group    given   │ block 1 │ block 2        a query at 10 sees 5 .. 10, so block 0 went back
                  back
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.block_table import RELEASED, BlockTable
from hf_paged.cache.prefix import PrefixIndex, PrefixNode
from hf_paged.errors import PagedError
from hf_paged.request import Sequence

BlockCopy = tuple[int, int]  # source, destination


@dataclass(frozen=True)
class BlockGroup:
    """Layers that share block tables. A window group needs only the last `window` tokens; None needs all.

    In a group of recurrent states a block is a sequence's state, whatever its length: one, from its first token on.
    """

    window: int | None = None
    is_state: bool = False

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Logical blocks of a sequence of `num_tokens` tokens."""
        return min(num_tokens, 1) if self.is_state else -(-num_tokens // block_size)

    def first_needed_token(self, num_computed_tokens: int) -> int:
        """The first position that a query at `num_computed_tokens` or later can see."""
        return 0 if self.window is None else max(0, num_computed_tokens - self.window + 1)


@dataclass(frozen=True)
class CachedPrefix:
    """Cached blocks that a sequence may start from: `blocks[g][i]` is logical block i of group g, or RELEASED."""

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    node: PrefixNode | None


class BlockAllocator:
    """Blocks for sequences, over every layer group at once. Every call does all of what it says, or nothing.

    Args:
        groups: the layer groups of the model.
        block_size: tokens in a block.
        num_blocks: tokens of full context that the pool holds, in blocks. A window group gets what its windows need.
        max_batch_tokens: most tokens computed in a step; a window group holds these besides the window.
        max_sequences: most sequences running at once.
        enable_prefix_caching: index full blocks and start new sequences from them.
        prefix_cache_fraction: share of each pool that is left to cached blocks.
    """

    def __init__(
        self,
        groups: SequenceOf[BlockGroup],
        block_size: int,
        num_blocks: int,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        enable_prefix_caching: bool = True,
        prefix_cache_fraction: float = 0.0,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.weights_version = 0
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._prefix_cache_fraction = prefix_cache_fraction
        # what else than tokens, salt, adapter and weights a sequence's K and V depend on
        self.prefix_key: Callable[[Sequence], Hashable] = lambda _: None
        self._index = PrefixIndex(len(self.groups))
        self.pools = [self._make_pool(index, group) for index, group in enumerate(self.groups)]

    def _make_pool(self, index: int, group: BlockGroup) -> BlockPool:
        num_blocks = self.group_blocks(group, self.num_blocks)
        reserved = int(num_blocks * self._prefix_cache_fraction) if self.enable_prefix_caching else 0
        return BlockPool(num_blocks, reserved, lambda block_id: self._index.drop_block(index, block_id))

    def group_blocks(self, group: BlockGroup, num_blocks: int) -> int:
        """Blocks of a group in a pool of `num_blocks` blocks of full context."""
        return min(num_blocks, self._max_sequences * self._blocks_held(group, num_blocks))

    def _blocks_held(self, group: BlockGroup, num_blocks: int) -> int:
        # most blocks that one sequence of `num_blocks` blocks of full context holds in a group at once
        if group.is_state:
            return min(num_blocks, 1)
        if group.window is None:
            return num_blocks
        return min(num_blocks, -(-(group.window - 1 + self._max_batch_tokens) // self.block_size) + 1)

    # -- capacity ---------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of full context that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def max_tokens_per_sequence(self) -> int | None:
        """Most tokens that one sequence alone can ever hold, None if a window makes that endless."""
        limits = []
        for group, pool in zip(self.groups, self.pools, strict=True):
            usable = pool.num_blocks - pool.num_reserved
            if group.is_state and usable:
                continue
            if group.window is None or usable < self._blocks_held(group, pool.num_blocks + 1):
                limits.append(usable * self.block_size)
        return min(limits) if limits else None

    def grow(self, num_blocks: int) -> None:
        """Adds blocks up to `num_blocks` of full context; what is there stays."""
        self.num_blocks = max(self.num_blocks, num_blocks)
        for group, pool in zip(self.groups, self.pools, strict=True):
            pool.grow(self.group_blocks(group, self.num_blocks))
            if self.enable_prefix_caching:
                pool.num_reserved = int(pool.num_blocks * self._prefix_cache_fraction)

    # -- prefixes ---------------------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> CachedPrefix:
        """The longest cached run of full blocks that the sequence begins with.

        Always leaves a token to compute, and those that may be taken back: a cached block is never written again.
        """
        if sequence.request.given is not None:
            return self._given_prefix(sequence.request.num_given_tokens)
        nothing = CachedPrefix(0, tuple(() for _ in self.groups), None)
        if not self.enable_prefix_caching or sequence.request.wants_prompt_logprobs:
            return nothing
        nodes: list[PrefixNode] = []
        node, tokens, size = self._root(sequence), sequence.token_ids, self.block_size
        known = len(tokens) - max(1, sequence.num_revocable_tokens)
        for start in range(0, known // size * size, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            nodes.append(child)
            node = child
        length = self._usable_length(nodes)
        if length == 0:
            return nothing
        blocks = []
        for index, group in enumerate(self.groups):
            first = group.first_needed_token(length * size) // size
            held = [nodes[i].blocks[index] for i in range(first, length)]
            blocks.append((RELEASED,) * first + tuple(block for block in held if block is not None))
        return CachedPrefix(length * size, tuple(blocks), nodes[length - 1])

    def _given_prefix(self, num_tokens: int) -> CachedPrefix:
        # no blocks yet, and none for what is behind a window: `allocate` brings those from there on
        behind = [group.first_needed_token(num_tokens) // self.block_size for group in self.groups]
        return CachedPrefix(num_tokens, tuple((RELEASED,) * first for first in behind), None)

    def _usable_length(self, nodes: list[PrefixNode]) -> int:
        # the most leading blocks such that every group still holds those that the next token can see
        usable = set(range(1, len(nodes) + 1))
        for index, group in enumerate(self.groups):
            run, fits = 0, set()  # run: how many consecutive blocks up to here the group holds
            for length, node in enumerate(nodes, start=1):
                run = 0 if node.blocks[index] is None else run + 1
                first = group.first_needed_token(length * self.block_size) // self.block_size
                if run >= length - first:
                    fits.add(length)
            usable &= fits
        return max(usable, default=0)

    def _root(self, sequence: Sequence) -> PrefixNode:
        request = sequence.request
        return self._index.root((request.cache_salt, request.adapter, self.weights_version, self.prefix_key(sequence)))

    def commit(self, sequence: Sequence) -> None:
        """Indexes the blocks that the last step filled, and gives back those behind the windows.

        Tokens that may be taken back count as not computed.
        """
        num_tokens = max(0, sequence.num_computed_tokens - sequence.num_revocable_tokens)
        if self.enable_prefix_caching and sequence.request.given is None:
            self._index_full_blocks(sequence, num_tokens)
        for group, pool, table in zip(self.groups, self.pools, sequence.block_tables, strict=True):
            if group.window is not None:
                behind = group.first_needed_token(num_tokens) // self.block_size
                if behind > table.num_released:
                    pool.free(reversed(table.release_until(min(behind, len(table)))))

    def _index_full_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        size = self.block_size
        node = sequence.prefix_node or self._root(sequence)
        for index in range(sequence.num_indexed_blocks, num_tokens // size):
            node = self._index.extend(node, tuple(sequence.token_ids[index * size : (index + 1) * size]))
            for group, (pool, table) in enumerate(zip(self.pools, sequence.block_tables, strict=True)):
                block_id = table.blocks[index]
                # an equal block of another sequence may be indexed already; this one then stays private
                if block_id != RELEASED and node.blocks[group] is None and not pool.is_cached(block_id):
                    self._index.set_block(node, group, block_id)
                    pool.mark_cached(block_id)
            sequence.num_indexed_blocks = index + 1
        sequence.prefix_node = node

    def reset_prefix_cache(self) -> None:
        """Gives up all cached content. Blocks of running sequences stay theirs."""
        for pool in self.pools:
            pool.evict_all()
        self._index.clear()

    # -- blocks of a sequence ---------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, prefix: CachedPrefix, num_spare_blocks: int = 0) -> bool:
        """Gives a sequence its cached prefix, if all of its known tokens and `num_spare_blocks` more would fit."""
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            shared = [block for block in prefix.blocks[index] if block != RELEASED]
            revived = sum(pool.ref_count(block) == 0 for block in shared)
            total = self._blocks_held(group, self.blocks_for(sequence.num_tokens))
            spare = 0 if group.is_state else num_spare_blocks  # one that runs has its state already
            if max(0, total - len(shared)) + revived + spare > pool.num_allocatable:
                return False
        sequence.block_tables = []
        for index, pool in enumerate(self.pools):
            table = BlockTable()
            table.blocks.extend(prefix.blocks[index])
            table.num_released = sum(block == RELEASED for block in prefix.blocks[index])
            for block_id in table.held():
                pool.touch(block_id)
            sequence.block_tables.append(table)
        sequence.num_computed_tokens = prefix.num_tokens
        sequence.prefix_node = prefix.node
        sequence.num_indexed_blocks = prefix.num_tokens // self.block_size
        return True

    def allocate(self, sequence: Sequence, num_new_tokens: int) -> list[list[BlockCopy]] | None:
        """Makes every table reach `num_new_tokens` past the computed ones, and the first block written to private.

        Returns:
            The block copies to do before the step's writes, one list a group; None if there are not enough blocks,
            and then nothing has changed.
        """
        start = sequence.num_computed_tokens
        shared, needed = [], []
        for group, pool, table in zip(self.groups, self.pools, sequence.block_tables, strict=True):
            written = 0 if group.is_state else start // self.block_size
            is_shared = written < len(table) and pool.ref_count(table.blocks[written]) > 1
            shared.append(written if is_shared else None)
            needed.append(group.blocks_for(start + num_new_tokens, self.block_size))
            if needed[-1] - len(table) + is_shared > pool.num_allocatable:
                return None
        copies: list[list[BlockCopy]] = []
        for pool, table, num_blocks, copied in zip(self.pools, sequence.block_tables, needed, shared, strict=True):
            group_copies = []
            if copied is not None:
                source, table.blocks[copied] = table.blocks[copied], pool.allocate()
                group_copies.append((source, table.blocks[copied]))
                pool.free((source,))
            table.blocks.extend(pool.allocate() for _ in range(num_blocks - len(table)))
            copies.append(group_copies)
        return copies

    def trim(self, sequence: Sequence) -> None:
        """Gives back the blocks behind the computed tokens, which only tokens that were taken back had needed."""
        num_blocks = self.blocks_for(sequence.num_computed_tokens)
        for pool, table in zip(self.pools, sequence.block_tables, strict=bool(sequence.block_tables)):
            if len(table) > num_blocks:
                pool.free(reversed(table.blocks[num_blocks:]))
                del table.blocks[num_blocks:]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets a child share all blocks of its parent."""
        child.block_tables = [table.fork() for table in parent.block_tables]
        for pool, table in zip(self.pools, child.block_tables, strict=True):
            for block_id in table.held():
                pool.touch(block_id)
        child.num_computed_tokens = parent.num_computed_tokens
        child.prefix_node = parent.prefix_node
        child.num_indexed_blocks = parent.num_indexed_blocks

    def free(self, sequence: Sequence) -> None:
        """Takes all blocks of a sequence; what is cached of them stays findable until it is evicted."""
        for pool, table in zip(self.pools, sequence.block_tables, strict=bool(sequence.block_tables)):
            pool.free(reversed(table.held()))
        sequence.block_tables = []
        sequence.num_computed_tokens = 0
        sequence.prefix_node = None
        sequence.num_indexed_blocks = 0

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Proves the pools' invariants against the tables of all sequences that hold blocks, and the prefix index's.

        Raises:
            PagedError: naming the first thing that is wrong.
        """
        counts: list[dict[int, int]] = [{} for _ in self.pools]
        for sequence in sequences:
            held = bool(sequence.block_tables)
            for group, layer_group, table in zip(counts, self.groups, sequence.block_tables, strict=held):
                for block_id in table.held():
                    group[block_id] = group.get(block_id, 0) + 1
                if len(table) < layer_group.blocks_for(sequence.num_computed_tokens, self.block_size):
                    raise PagedError(f"Request {sequence.request.request_id!r} has computed tokens without a block.")
        for pool, expected in zip(self.pools, counts, strict=True):
            pool.check(expected)
        self._index.check([pool.cached_blocks() for pool in self.pools])
