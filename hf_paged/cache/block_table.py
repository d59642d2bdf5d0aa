"""Logical to physical blocks of one sequence in one layer group.

    block_size 4, 10 tokens, window group that gave back its first block

      logical     0    1    2
      blocks    [-1,   7,   3]        slot of token 9 = 3 * 4 + 9 % 4
                 ▲
                 num_released = 1

Fork and copy-on-write: a fork points at the same blocks; whoever writes into a block that several tables point at
gets a copy first.

      parent [7, 3]      child [7, 3]        counts 7:2 3:2
      child writes token 6:  copy 3 -> 5     child [7, 5]    counts 7:2 3:1 5:1
"""

from __future__ import annotations

from array import array

RELEASED = -1


class BlockTable:
    """The physical block of each logical block; int32 values in a buffer that numpy reads without a copy."""

    __slots__ = ("blocks", "num_released")

    def __init__(self) -> None:
        self.blocks = array("i")
        self.num_released = 0

    def __len__(self) -> int:
        """Logical blocks, those given back included."""
        return len(self.blocks)

    def held(self) -> array[int]:
        """The physical blocks that this table points at, first to last."""
        return self.blocks[self.num_released :]

    def release_until(self, num_blocks: int) -> array[int]:
        """Forgets the first `num_blocks` logical blocks; returns the physical ones to give back."""
        released = self.blocks[self.num_released : num_blocks]
        for index in range(self.num_released, num_blocks):
            self.blocks[index] = RELEASED
        self.num_released = max(self.num_released, num_blocks)
        return released

    def fork(self) -> BlockTable:
        """A table that points at the same blocks. The caller counts the new references."""
        child = BlockTable()
        child.blocks = self.blocks[:]
        child.num_released = self.num_released
        return child
