"""The copy kernel against `kernels/torch_cache.py`: every byte of every tensor, those that must not change too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.kernels.kv_blocks import QUANTISED_DTYPES, KVBlocks
from hf_paged.kernels.torch_cache import copy_blocks as expected_copy
from hf_paged.kernels.triton import copy
from hf_paged.kernels.triton.copy import copy_blocks

FP8, INT8 = QUANTISED_DTYPES


def layer(
    key: tuple[int, int, torch.dtype],
    value: tuple[int, int, torch.dtype],
    num_blocks: int = 6,
    block_size: int = 8,
) -> KVBlocks:
    """Blocks of random bytes, NaN of all kinds among them, for (heads, head dim, dtype) of K and V."""

    def tensor(heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = num_blocks * block_size * heads * dim * dtype.itemsize
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).view(dtype).view(-1, block_size, heads, dim)

    def scales(heads: int, dtype: torch.dtype) -> torch.Tensor | None:
        return tensor(heads, 1, torch.float32)[..., 0] if dtype in QUANTISED_DTYPES else None

    return KVBlocks(tensor(*key), tensor(*value), scales(key[0], key[2]), scales(value[0], value[2]))


def clone(blocks: KVBlocks) -> KVBlocks:
    tensors: list[Any] = [blocks.keys, blocks.values, blocks.key_scales, blocks.value_scales]
    return KVBlocks(*(None if tensor is None else tensor.clone() for tensor in tensors))


def check(layers: list[KVBlocks], copies: list[tuple[int, int]]) -> None:
    expected = [clone(blocks) for blocks in layers]
    expected_copy(expected, copies)
    copy_blocks(layers, copies)
    for blocks, others in zip(layers, expected, strict=True):
        for tensor, other in zip(blocks.tensors, others.tensors, strict=True):
            assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8, INT8], ids=str)
def test_blocks_of_every_type_are_copied_with_their_scales(dtype: torch.dtype) -> None:
    check([layer((2, 16, dtype), (2, 16, dtype))], [(4, 1), (0, 5)])


def test_layers_of_different_shapes_and_types_are_copied_together() -> None:
    layers = [
        layer((1, 1, INT8), (1, 1, INT8)),  # one word a block
        layer((3, 80, torch.float32), (2, 24, FP8)),  # more than a program's words, beside fewer
        layer((5, 96, torch.bfloat16), (1, 192, torch.float16), num_blocks=9),
    ]
    check(layers, [(3, 0), (3, 5), (1, 2)])


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_blocks_of_any_size(block_size: int) -> None:
    check([layer((2, 24, torch.float16), (2, 24, FP8), block_size=block_size)], [(5, 0)])


def test_no_copies_change_nothing() -> None:
    blocks = layer((2, 16, torch.float32), (2, 16, INT8))
    before = clone(blocks)
    copy_blocks([blocks], [])
    for tensor, other in zip(blocks.tensors, before.tensors, strict=True):
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


def test_all_layers_are_one_launch_and_their_addresses_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer((2, 16, torch.float32), (2, 16, FP8)) for _ in range(5)]
    grids: list[tuple[int, ...]] = []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return original[grid]

    original = copy._copy_kernel
    monkeypatch.setattr(copy, "_copy_kernel", Counted())
    copy._table.cache_clear()
    check(layers, [(0, 1), (2, 3)])
    check(layers, [(4, 0)])
    assert grids == [(2, 15, 1), (1, 15, 1)]
    assert copy._table.cache_info().misses == 1


def test_storage_that_has_grown_is_copied_at_its_new_place() -> None:
    blocks = layer((2, 16, torch.float32), (2, 16, FP8))
    check([blocks], [(0, 1)])
    grown = layer((2, 16, torch.float32), (2, 16, FP8), num_blocks=12)
    check([grown], [(2, 11)])


def test_blocks_past_two_to_the_31_bytes_are_reached() -> None:
    num_blocks = 2**31 // (8 * 2 * 256) + 2
    stored = torch.empty(num_blocks, 8, 2, 256, dtype=INT8)  # the system maps only what is touched
    last = num_blocks - 1
    stored[0], stored[last] = 3, 0
    copy_blocks([KVBlocks(stored, torch.zeros(num_blocks, 8, 1, 1, dtype=INT8))], [(0, last)])
    assert (stored[last] == 3).all()
