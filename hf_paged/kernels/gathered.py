"""Keys and values that a model changes between the cache and attention: repeated, mixed, scaled.

What is in the pool is then not what attention reads. So `update` hands out the past as well, whole blocks of every
sequence one after the other; the model changes all of it; and attention takes the result for a small pool of its own.

    pool blocks of a, b       a: 7 3      b: 5
    handed out                [1, H, 3 * block_size, D]     blocks 7, 3, 5
    attention's pool          [3, block_size, H', D']       tables   a: 0 1     b: 2

This copies the whole context in every layer and step. Slots after a sequence's last token hold anything, as in the
pool, and no query sees them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hf_paged.errors import PackedStepError
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.quantise import dequantise, raw_bytes


@dataclass(frozen=True, eq=False)
class GatheredStep:
    """A step as attention over handed-out blocks sees it. N blocks in all."""

    block_ids: torch.Tensor  # [N] int64, in the pool
    metadata: AttentionMetadata  # tables of handed-out blocks

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> GatheredStep:
        """The same step, on blocks that are handed out."""
        counts = -(-np.array(metadata.kv_lens) // metadata.block_size)
        starts = np.cumsum(counts) - counts
        sequence = np.repeat(np.arange(len(counts)), counts)
        logical = np.arange(counts.sum()) - starts[sequence]
        table = np.zeros((len(counts), counts.max()), dtype=np.int32)
        table[sequence, logical] = np.arange(counts.sum())
        device = metadata.block_table.device
        index = torch.from_numpy(np.stack([sequence, logical])).to(device, non_blocking=True)
        local = torch.from_numpy(table).to(device, non_blocking=True)
        return cls(metadata.block_table[index[0], index[1]].long(), replace(metadata, block_table=local, plans={}))

    def hand_out(self, blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K `[1, H, N * block_size, D]` and V `[1, H, N * block_size, Dv]`, typed as the new `key` and `value`."""
        return (
            self._take(blocks.keys, blocks.key_scales, key.dtype),
            self._take(blocks.values, blocks.value_scales, value.dtype),
        )

    def _take(self, stored: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        taken = raw_bytes(stored).index_select(0, self.block_ids).view(stored.dtype)
        scales = None if scales is None else scales.index_select(0, self.block_ids)
        return dequantise(taken, scales, dtype).flatten(0, 1).transpose(0, 1).unsqueeze(0)

    def take_back(self, key: torch.Tensor, value: torch.Tensor) -> KVBlocks:
        """What the model made of them, `[1, H', N * block_size, D']` each, as blocks.

        Raises:
            PackedStepError: it isn't as long as what was handed out.
        """
        size = self.metadata.block_size
        length = len(self.block_ids) * size
        if any(states.shape[0] != 1 or states.shape[2] != length for states in (key, value)):
            raise PackedStepError(
                f"An attention call in a packed step reads keys {tuple(key.shape)} and values {tuple(value.shape)}, "
                f"where the cache handed out {length} slots; run this model without cache_implementation='paged'."
            )
        keys, values = (
            states[0].transpose(0, 1).reshape(-1, size, states.shape[1], states.shape[3]).contiguous()
            for states in (key, value)
        )
        return KVBlocks(keys, values)
