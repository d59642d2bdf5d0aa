"""The tensors that hold K and V, one pair a layer.

    keys    [num_blocks, block_size, num_kv_heads, head_dim]          a block is contiguous, and so is a token in it
    values  [num_blocks, block_size, num_kv_heads, value_head_dim]    slot s is row s of the [num_slots, ...] view

Quantised ones have scales beside them, [num_blocks, block_size, num_kv_heads] float32.

Shapes, types and device come from what a forward hands to `update`, never from the config: autocast, tensor
parallelism, offload and quantised weights all make the config lie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_paged.errors import PoolMemoryError
from hf_paged.kernels.kv_blocks import QUANTISED_DTYPES, KVBlocks

_SCALE_DTYPE = torch.float32


@dataclass(frozen=True)
class KVSpec:
    """Shape, storage type and device of one layer's K and V."""

    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> KVSpec:
        """The spec of what `update` was given: key `[B, H, T, D]`, value `[B, H, T, Dv]`."""
        return cls(key.shape[1], key.shape[-1], value.shape[1], value.shape[-1], key.dtype, value.dtype, key.device)

    def stored_as(self, k_dtype: str, v_dtype: str) -> KVSpec:
        """The same layer with the storage types of a PagedConfig; "auto" keeps what the model computes."""
        return replace(
            self,
            key_dtype=self.key_dtype if k_dtype == "auto" else getattr(torch, k_dtype),
            value_dtype=self.value_dtype if v_dtype == "auto" else getattr(torch, v_dtype),
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer, K and V and their scales together."""
        key_bytes = self.num_key_heads * _head_bytes(self.key_head_dim, self.key_dtype)
        return key_bytes + self.num_value_heads * _head_bytes(self.value_head_dim, self.value_dtype)


def _head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    scale_bytes = _SCALE_DTYPE.itemsize if dtype in QUANTISED_DTYPES else 0
    return head_dim * dtype.itemsize + scale_bytes


class LayerStorage:
    """The block tensors of one layer."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        self.spec = spec
        self.block_size = block_size
        self.blocks = self._allocate(num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks that this layer has room for."""
        return self.blocks.keys.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.blocks.num_bytes

    def _allocate(self, num_blocks: int) -> KVBlocks:
        spec = self.spec
        try:
            # A tensor born in inference mode may not be written to later under no_grad, so it is born outside.
            with torch.inference_mode(False):
                keys, key_scales = self._empty(num_blocks, spec.num_key_heads, spec.key_head_dim, spec.key_dtype)
                values, value_scales = self._empty(
                    num_blocks, spec.num_value_heads, spec.value_head_dim, spec.value_dtype
                )
        except (RuntimeError, MemoryError) as error:  # torch's CPU allocator raises a plain RuntimeError
            needed = num_blocks * self.block_size * spec.bytes_per_token
            raise PoolMemoryError(
                f"A layer of the block pool needs {needed / 2**20:.0f} MiB for {num_blocks} blocks of "
                f"{self.block_size} tokens on {spec.device}, which can't be allocated; "
                "lower PagedConfig.num_blocks or memory_fraction."
            ) from error
        return KVBlocks(keys, values, key_scales, value_scales)

    def _empty(
        self, num_blocks: int, num_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape, device = (num_blocks, self.block_size, num_heads), self.spec.device
        tensor = torch.empty((*shape, head_dim), dtype=dtype, device=device)
        if dtype not in QUANTISED_DTYPES:
            return tensor, None
        return tensor, torch.empty(shape, dtype=_SCALE_DTYPE, device=device)

    def grow(self, num_blocks: int) -> None:
        """Makes room for `num_blocks` in all, keeping the content of those there are."""
        old, new = self.blocks, self._allocate(num_blocks)
        with torch.no_grad():
            for before, after in zip(old.tensors, new.tensors, strict=True):
                after[: before.shape[0]].copy_(before)
        self.blocks = new
