"""KVBlocks: one layer's K and V in the pool, as every kernel is handed them.

keys          [num_blocks, block_size, num_kv_heads, head_dim]          contiguous; slot s is block s // block_size,
values        [num_blocks, block_size, num_kv_heads, value_head_dim]    offset s % block_size
key_scales    [num_blocks, block_size, num_kv_heads]                    of a quantised tensor: K = keys * key_scales
value_scales  [num_blocks, block_size, num_kv_heads]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.int8)  # stored with one float32 scale a token and head


@dataclass(frozen=True, eq=False)
class KVBlocks:
    """The block tensors of one layer. K and V may differ in heads, head dim and dtype."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    # The same memory by slot, [num_slots, H, D]: kept, since a view a layer and step adds up.

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """`[num_slots, num_kv_heads, head_dim]`."""
        return self.keys.flatten(0, 1)

    @cached_property
    def value_slots(self) -> torch.Tensor:
        """`[num_slots, num_kv_heads, value_head_dim]`."""
        return self.values.flatten(0, 1)

    @cached_property
    def key_scale_slots(self) -> torch.Tensor | None:
        """`[num_slots, num_kv_heads]`, None where keys are not quantised."""
        return None if self.key_scales is None else self.key_scales.flatten(0, 1)

    @cached_property
    def value_scale_slots(self) -> torch.Tensor | None:
        """`[num_slots, num_kv_heads]`, None where values are not quantised."""
        return None if self.value_scales is None else self.value_scales.flatten(0, 1)

    @property
    def is_quantised(self) -> bool:
        """Whether K or V has scales."""
        return self.key_scales is not None or self.value_scales is not None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that there are; their first dimension is the block."""
        every = (self.keys, self.values, self.key_scales, self.value_scales)
        return tuple(tensor for tensor in every if tensor is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)
