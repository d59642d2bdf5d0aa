"""Writing and copying blocks in plain torch: what a backend does that has no kernel of its own for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.quantise import quantise, raw_bytes


def write_slots(blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Stores new tokens: key `[T, H, D]`, value `[T, H, Dv]`, slot_mapping `[T]` int64."""
    _write(blocks.key_slots, blocks.key_scale_slots, key, slot_mapping)
    _write(blocks.value_slots, blocks.value_scale_slots, value, slot_mapping)


def _write(
    slots: torch.Tensor, scale_slots: torch.Tensor | None, new: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    if scale_slots is None:
        slots.index_copy_(0, slot_mapping, new.to(slots.dtype))
        return
    stored, scales = quantise(new, slots.dtype)
    raw_bytes(slots).index_copy_(0, slot_mapping, raw_bytes(stored))
    scale_slots.index_copy_(0, slot_mapping, scales)


def copy_blocks(layers: Sequence[KVBlocks], copies: Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks in every layer, `(source, destination)` each; no destination is another copy's source."""
    pairs: dict[torch.device, tuple[torch.Tensor, ...]] = {}
    for blocks in layers:
        device = blocks.keys.device
        if device not in pairs:
            pairs[device] = torch.tensor(copies, dtype=torch.int64, device=device).unbind(1)
        source, destination = pairs[device]
        for tensor in map(raw_bytes, blocks.tensors):
            tensor.index_copy_(0, destination, tensor.index_select(0, source))
