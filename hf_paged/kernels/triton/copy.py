"""Copies whole blocks in all layers of a device: copy-on-write and defragmentation in one launch.

    program (copy, tensor, chunk)

      table    one row a tensor, K, V and scales of every layer: its address, and the bytes of one of its blocks
      copies   (source, destination)
      chunk    some words of that block; programs beyond the end of a short one leave at once

Blocks are moved as words of 8 bytes, whatever they hold. A block of any type has whole words: at least 8 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl

from hf_paged.kernels.kv_blocks import KVBlocks

_WORD_BYTES = 8
_CHUNK = 1024  # words of one program
_NUM_WARPS = 4


@triton.jit
def _copy_kernel(table, copies, CHUNK: tl.constexpr):
    copy = tl.program_id(0)
    tensor = tl.program_id(1)
    num_words = tl.load(table + 2 * tensor + 1)
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(2) * CHUNK < num_words:
        base = tl.load(table + 2 * tensor).to(tl.pointer_type(tl.int64))
        source = base + tl.load(copies + 2 * copy) * num_words + word
        destination = base + tl.load(copies + 2 * copy + 1) * num_words + word
        tl.store(destination, tl.load(source, mask=word < num_words), mask=word < num_words)


def copy_blocks(layers: Sequence[KVBlocks], copies: Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks in every layer, `(source, destination)` each; no destination is another copy's source."""
    if not copies:
        return
    tensors: dict[torch.device, list[torch.Tensor]] = {}
    for blocks in layers:
        tensors.setdefault(blocks.keys.device, []).extend(blocks.tensors)
    for device, members in tensors.items():
        key = tuple((tensor.data_ptr(), tensor.stride(0) * tensor.element_size() // _WORD_BYTES) for tensor in members)
        longest = max(num_words for _, num_words in key)
        grid = (len(copies), len(key), triton.cdiv(longest, _CHUNK))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            _copy_kernel[grid](
                _table(key, device),
                _on_device(copies, device),
                CHUNK=_CHUNK,
                num_warps=_NUM_WARPS,
                enable_fp_fusion=False,
            )


@lru_cache(maxsize=64)  # one entry a layer group and pool size; a storage that has grown has another address
def _table(rows: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    return _on_device(rows, device)


def _on_device(pairs: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """`[n, 2]` int64, sent without waiting for the device."""
    on_host = torch.tensor(pairs, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)
