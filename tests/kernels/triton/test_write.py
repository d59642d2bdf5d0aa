"""The write kernel against `kernels/torch_cache.py`, bit by bit, into poisoned blocks."""

from __future__ import annotations

from math import isnan

import pytest
import torch

from hf_paged.kernels.kv_blocks import QUANTISED_DTYPES, KVBlocks
from hf_paged.kernels.quantise import quantise
from hf_paged.kernels.torch_cache import write_slots as expected_write
from hf_paged.kernels.triton.write import write_slots

FP8, INT8 = QUANTISED_DTYPES
BLOCK_SIZE = 8
DTYPES = [torch.float32, torch.float16, torch.bfloat16, FP8, INT8]


def poisoned(heads: int, dim: int, dtype: torch.dtype, num_blocks: int = 5) -> tuple[torch.Tensor, torch.Tensor | None]:
    stored = torch.empty(num_blocks, BLOCK_SIZE, heads, dim, dtype=dtype)
    stored.view(torch.uint8).fill_(0x7F)
    return stored, torch.full(stored.shape[:3], 7.25) if dtype in QUANTISED_DTYPES else None


def check(
    key: torch.Tensor,
    value: torch.Tensor,
    key_dtype: torch.dtype,
    value_dtype: torch.dtype,
    slots: torch.Tensor | None = None,
) -> KVBlocks:
    """Writes both ways into equal blocks, and asserts that every byte is the same, written or not."""
    if slots is None:
        slots = torch.randperm(5 * BLOCK_SIZE)[: len(key)]

    def blocks() -> KVBlocks:
        keys, key_scales = poisoned(*key.shape[1:], key_dtype)
        values, value_scales = poisoned(*value.shape[1:], value_dtype)
        return KVBlocks(keys, values, key_scales, value_scales)

    actual, expected = blocks(), blocks()
    write_slots(actual, key, value, slots)
    expected_write(expected, _as_read(key, key_dtype), _as_read(value, value_dtype), slots)
    for tensor, other in zip(actual.tensors, expected.tensors, strict=True):
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))
    return actual


def _as_read(x: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    # The interpreter cuts off what doesn't fit into bfloat16, where hardware rounds.
    if stored != torch.bfloat16 or x.dtype == stored:
        return x
    return (x.float().view(torch.int32) & ~0xFFFF).view(torch.float32)


def new(tokens: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[T, H, D]` as a model hands it over: heads first in memory."""
    return torch.randn(heads, tokens, dim).to(dtype).transpose(0, 1)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_every_type_is_stored_as_torch_stores_it(stored: torch.dtype, source: torch.dtype) -> None:
    check(new(9, 2, 80, source), new(9, 2, 80, source), stored, stored)


@pytest.mark.parametrize(
    ("key_dtype", "value_dtype"), [(FP8, torch.bfloat16), (torch.float32, INT8), (INT8, FP8)], ids=str
)
@pytest.mark.parametrize("shapes", [((3, 24), (3, 16)), ((1, 192), (5, 128)), ((8, 64), (2, 96)), ((17, 256), (1, 1))])
def test_keys_and_values_of_different_shapes_and_types(
    shapes: tuple[tuple[int, int], tuple[int, int]], key_dtype: torch.dtype, value_dtype: torch.dtype
) -> None:
    check(new(3, *shapes[0]), new(3, *shapes[1]), key_dtype, value_dtype)


@pytest.mark.parametrize("tokens", [1, 12])
def test_one_token_and_several(tokens: int) -> None:
    check(new(tokens, 2, 16), new(tokens, 2, 16), FP8, torch.float32)


def test_no_token_writes_nothing() -> None:
    check(new(0, 2, 16), new(0, 2, 16), FP8, torch.float32, torch.empty(0, dtype=torch.int64))


def test_any_strides_are_read() -> None:
    wide = torch.randn(6, 2, 2, 32)
    check(wide[:, 0, :, ::2], wide[:, 1].transpose(1, 2)[:, ::4].transpose(1, 2), INT8, FP8)
    check(wide[:, 0], wide[:1, 1].expand(6, -1, -1), torch.float16, INT8)
    projected = torch.randn(6, 3 * 2 * 16)  # q, k and v of a joined projection
    check(projected[:, 32:64].view(6, 2, 16), projected[:, 64:].view(6, 2, 16), torch.bfloat16, FP8)


@pytest.mark.parametrize("stored", QUANTISED_DTYPES, ids=str)
@pytest.mark.parametrize(
    "special", [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-45, 1e-38, 3e38, 1e-30], ids=str
)
def test_zeros_nan_and_the_ends_of_float32_are_stored_as_torch_stores_them(stored: torch.dtype, special: float) -> None:
    key, value = new(4, 2, 16), new(4, 2, 16)
    key[1, 1], key[2, 0, 5] = special, special
    value[0] = special
    blocks = check(key, value, stored, stored, torch.tensor([30, 2, 17, 9]))
    if isnan(special):
        assert blocks.key_scale_slots is not None
        assert blocks.key_scale_slots[[2, 17]].isnan().tolist() == [[False, True], [True, False]]


def test_halves_go_to_the_even_neighbour() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0]).expand(1, 1, 8)  # a scale of 1
    blocks = check(x, x * (448 / 127), INT8, FP8)
    assert [0, 2, 2, 0, -2, -2] in [row[1:7] for row in blocks.key_slots[:, 0].tolist()]


def test_random_values_are_stored_as_torch_stores_them() -> None:
    magnitudes = torch.logspace(-6, 4, 64).view(4, 16, 1)
    check(new(4, 16, 64) * magnitudes, new(4, 16, 64) * magnitudes, FP8, INT8)


def test_slots_past_two_to_the_31_elements_are_reached() -> None:
    heads, dim = 2, 256
    num_blocks = 2**31 // (BLOCK_SIZE * heads * dim) + 2
    stored = torch.empty(num_blocks, BLOCK_SIZE, heads, dim, dtype=INT8)  # the system maps only what is touched
    blocks = KVBlocks(stored, stored, torch.empty(stored.shape[:3]), torch.empty(stored.shape[:3]))
    slot = num_blocks * BLOCK_SIZE - 2
    assert slot * heads * dim > 2**31
    key = new(1, heads, dim)
    write_slots(blocks, key, key, torch.tensor([slot]))
    expected, scales = quantise(key, INT8)
    assert torch.equal(blocks.key_slots[slot], expected[0])
    assert blocks.key_scale_slots is not None
    assert torch.equal(blocks.key_scale_slots[slot], scales[0])
