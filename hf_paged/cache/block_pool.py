"""Physical blocks: who is free, who is referenced, who is only kept because its content may be wanted again.

    every block is in exactly one of three places

      free list ──allocate()──▶ referenced (count > 0) ──free()──▶ free list            (content not indexed)
          ▲                          ▲      │
          │                     touch()     └────free()──▶ cached, unreferenced         (content indexed)
          └──────── evict (least recently used first) ◀──────────┘

Ids only; the tensors are in `storage.py`, the content index in `prefix.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from hf_paged.errors import PagedError


class BlockPool:
    """Reference-counted block ids with an O(1) free list and LRU eviction of cached, unreferenced blocks.

    Args:
        num_blocks: how many ids there are, 0 to `num_blocks - 1`. New ids are handed out in ascending order.
        num_reserved: cached blocks that allocation leaves in place (`PagedConfig.prefix_cache_fraction`).
        on_evict: called with the id of a cached block just before its content is given up.
    """

    def __init__(self, num_blocks: int, num_reserved: int = 0, on_evict: Callable[[int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_reserved = num_reserved
        self.peak_referenced = 0
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._is_cached = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: pop() hands out the lowest unused id first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_free(self) -> int:
        """Blocks on the free list: neither referenced nor cached."""
        return len(self._free)

    @property
    def num_cached_unreferenced(self) -> int:
        """Blocks that nobody references and that are kept for their content."""
        return len(self._evictable)

    @property
    def num_referenced(self) -> int:
        """Blocks that at least one block table points at."""
        return self.num_blocks - len(self._free) - len(self._evictable)

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + max(0, len(self._evictable) - self.num_reserved)

    def ref_count(self, block_id: int) -> int:
        """How many block tables point at a block."""
        return self._ref_counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether the block's content is in the prefix index."""
        return bool(self._is_cached[block_id])

    def cached_blocks(self) -> set[int]:
        """The blocks whose content is in the prefix index."""
        return {block_id for block_id, cached in enumerate(self._is_cached) if cached}

    def allocate(self) -> int:
        """Hands out one block with a count of 1, evicting the least recently used cached one if none is free.

        Raises:
            PagedError: nothing is allocatable. Callers ask `num_allocatable` first.
        """
        if self._free:
            block_id = self._free.pop()
        elif len(self._evictable) > self.num_reserved:
            block_id, _ = self._evictable.popitem(last=False)
            self._drop_content(block_id)
        else:
            raise PagedError("The block pool is empty; ask num_allocatable before allocate().")
        self._ref_counts[block_id] = 1
        self.peak_referenced = max(self.peak_referenced, self.num_referenced)
        return block_id

    def touch(self, block_id: int) -> None:
        """One more table points at a referenced or cached block."""
        if self._ref_counts[block_id] == 0:
            if block_id not in self._evictable:
                raise PagedError(f"Block {block_id} is free and can't be shared.")
            del self._evictable[block_id]
        self._ref_counts[block_id] += 1
        self.peak_referenced = max(self.peak_referenced, self.num_referenced)

    def free(self, block_ids: Iterable[int]) -> None:
        """One table less points at each block. Pass a sequence's blocks last to first: its tail is evicted first."""
        for block_id in block_ids:
            count = self._ref_counts[block_id]
            if count <= 0:
                raise PagedError(f"Block {block_id} was freed more often than it was allocated.")
            self._ref_counts[block_id] = count - 1
            if count == 1:
                if self._is_cached[block_id]:
                    self._evictable[block_id] = None
                else:
                    self._free.append(block_id)

    def mark_cached(self, block_id: int) -> None:
        """The content of a referenced block is now in the prefix index."""
        if self._ref_counts[block_id] == 0:
            raise PagedError(f"Block {block_id} is not referenced; only written blocks may be cached.")
        self._is_cached[block_id] = 1

    def evict_all(self) -> None:
        """Gives up the content of every cached block, referenced ones included (they stay allocated)."""
        for block_id in self._evictable:
            self._drop_content(block_id)
            self._free.append(block_id)
        self._evictable.clear()
        for block_id, cached in enumerate(self._is_cached):
            if cached:
                self._drop_content(block_id)

    def grow(self, num_blocks: int) -> None:
        """Adds ids up to `num_blocks`; existing ones keep their state."""
        new_ids = range(num_blocks - 1, self.num_blocks - 1, -1)
        self._free[:0] = new_ids
        self._ref_counts.extend([0] * len(new_ids))
        self._is_cached.extend(bytes(len(new_ids)))
        self.num_blocks = max(self.num_blocks, num_blocks)

    def _drop_content(self, block_id: int) -> None:
        if self._on_evict is not None:
            self._on_evict(block_id)
        self._is_cached[block_id] = 0

    def check(self, expected_ref_counts: dict[int, int] | None = None) -> None:
        """Proves the invariants, and that the counts equal `expected_ref_counts` (block id -> tables) where given.

        Raises:
            PagedError: naming the first thing that is wrong.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise PagedError("A block is on the free list twice.")
        if free & self._evictable.keys():
            raise PagedError("A block is both free and cached.")
        if sum(count > 0 for count in self._ref_counts) != self.num_referenced:
            raise PagedError("free + cached + referenced differs from the number of blocks.")
        for block_id, count in enumerate(self._ref_counts):
            idle = block_id in free or block_id in self._evictable
            if (count == 0) != idle:
                raise PagedError(f"Block {block_id} has count {count} but is {'idle' if idle else 'not idle'}.")
            if block_id in free and self._is_cached[block_id]:
                raise PagedError(f"Block {block_id} is free but still indexed.")
            if block_id in self._evictable and not self._is_cached[block_id]:
                raise PagedError(f"Block {block_id} is kept for content that is not indexed.")
            expected = count if expected_ref_counts is None else expected_ref_counts.get(block_id, 0)
            if count != expected:
                raise PagedError(f"Block {block_id} has count {count}, but {expected} tables point at it.")
