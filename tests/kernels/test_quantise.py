"""Quantised storage: how far rounding may go, the edges of the types, and writing and copying it."""

from __future__ import annotations

import pytest
import torch

from hf_paged.kernels.kv_blocks import QUANTISED_DTYPES, KVBlocks
from hf_paged.kernels.quantise import (
    E4M3_HALF_FACTOR,
    LARGEST,
    SMALLEST_SCALE,
    dequantise,
    e4m3_as_half,
    quantise,
    raw_bytes,
)
from hf_paged.kernels.torch_backend import TorchBackend
from hf_paged.kernels.torch_cache import copy_blocks, write_slots
from tests.kernels.packed import decodes, pack

FP8, INT8 = QUANTISED_DTYPES
both = pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)


def error_bound(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a step, elementwise. float8 has 3 bits of mantissa, so 2^-4 of the value, and fixed steps below 2^-6."""
    unit = x.abs().amax(dim=-1, keepdim=True).double() / LARGEST[dtype]
    half_step = 0.5 * unit if dtype == INT8 else torch.maximum(x.abs().double() * 2**-4, 2**-10 * unit)
    return half_step.expand(x.shape) * (1 + 1e-5)


@both
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e4])
def test_rounding_stays_within_half_a_step(dtype: torch.dtype, source: torch.dtype, magnitude: float) -> None:
    x = (torch.randn(7, 3, 80) * magnitude).to(source)
    stored, scales = quantise(x, dtype)
    assert (stored.dtype, stored.shape) == (dtype, x.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, x.shape[:-1])
    assert ((dequantise(stored, scales, torch.float64) - x.double()).abs() <= error_bound(x, dtype)).all()


@both
def test_the_largest_of_a_head_takes_the_largest_code(dtype: torch.dtype) -> None:
    stored, _ = quantise(torch.randn(50, 2, 64), dtype)
    assert (stored.float().abs().amax(dim=-1) == LARGEST[dtype]).all()


def test_halves_go_to_the_even_neighbour() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])  # a scale of 1
    assert quantise(x, INT8)[0].tolist() == [[127, 0, 2, 2, 0, -2, -2]]
    x = torch.tensor([[448.0, 17.0, 19.0, 2**-10, 3 * 2**-10, -(2**-10), -3 * 2**-10]])
    assert quantise(x, FP8)[0].tolist() == [[448.0, 16.0, 20.0, 0.0, 2**-8, -0.0, -(2**-8)]]


@both
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    stored, scales = quantise(torch.zeros(2, 3, 16), dtype)
    assert (scales == SMALLEST_SCALE).all()
    assert not stored.float().any()
    assert not dequantise(stored, scales, torch.float32).any()


@both
@pytest.mark.parametrize("lost", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_reads_as_nan_in_its_token_and_head_alone(dtype: torch.dtype, lost: float) -> None:
    x = torch.randn(3, 2, 16)
    x[1, 1, 5] = lost
    result = dequantise(*quantise(x, dtype), torch.float32)
    assert result[1, 1].isnan().all()
    assert result.isfinite().all(dim=-1).logical_not().sum() == 1


@both
@pytest.mark.parametrize("largest", [1e-45, 1e-42, 1e-38, 3e38])
def test_the_ends_of_float32_neither_overflow_nor_become_nan(dtype: torch.dtype, largest: float) -> None:
    x = torch.tensor([[largest, -largest, largest / 2, 0.0]])
    result = dequantise(*quantise(x, dtype), torch.float32)
    assert ((result - x).abs() <= max(largest * 2**-4, SMALLEST_SCALE)).all()


@both
def test_a_token_is_stored_alike_whatever_stands_beside_it(dtype: torch.dtype) -> None:
    x = torch.randn(9, 2, 80)
    together, scales = quantise(x, dtype)
    alone, scale = quantise(x[4:5], dtype)
    assert torch.equal(raw_bytes(together)[4], raw_bytes(alone)[0])
    assert torch.equal(scales[4], scale[0])


def test_every_byte_but_nan_is_a_shifted_half() -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    halves = e4m3_as_half(raw, torch.empty(256, dtype=torch.int16)).float() * E4M3_HALF_FACTOR
    expected = raw.view(torch.float8_e4m3fn).float()
    is_nan = expected.isnan()
    assert torch.equal(halves.view(torch.int32)[~is_nan], expected.view(torch.int32)[~is_nan])  # -0.0 is not 0.0


@both
def test_attention_moves_by_no_more_than_the_rounding_of_keys_and_values_explains(dtype: torch.dtype) -> None:
    options = {"num_kv_heads": 1, "group_size": 3, "dtype": torch.float64}
    exact = pack(decodes([200]), **options)
    query, keys, values = exact.query[0], exact.keys[0][:, 0], exact.values[0][:, 0]
    weights = (query @ keys.T * exact.params.scale).softmax(dim=-1)
    expected = exact.attend(TorchBackend())[0]

    error = (pack(decodes([200]), value_dtype=dtype, **options).attend(TorchBackend())[0] - expected).abs()
    assert (error <= weights @ error_bound(values, dtype)).all()
    assert error.any()

    error = (pack(decodes([200]), key_dtype=dtype, **options).attend(TorchBackend())[0] - expected).abs()
    score_error = (query.abs() @ error_bound(keys, dtype).T * exact.params.scale).amax(dim=-1, keepdim=True)
    assert (error <= torch.expm1(2 * score_error) * (weights @ values.abs())).all()
    assert error.any()


def poisoned(key_dtype: torch.dtype, value_dtype: torch.dtype, num_blocks: int = 4) -> KVBlocks:
    def tensor(dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        stored = torch.empty(num_blocks, 8, 2, dim, dtype=dtype)
        raw_bytes(stored).fill_(0x7F)
        return stored, torch.full(stored.shape[:3], float("nan")) if dtype in QUANTISED_DTYPES else None

    (keys, key_scales), (values, value_scales) = tensor(16, key_dtype), tensor(24, value_dtype)
    return KVBlocks(keys, values, key_scales, value_scales)


@pytest.mark.parametrize(("key_dtype", "value_dtype"), [(FP8, torch.bfloat16), (torch.float32, INT8), (INT8, FP8)])
def test_writing_touches_its_slots_and_nothing_else(key_dtype: torch.dtype, value_dtype: torch.dtype) -> None:
    blocks, before = poisoned(key_dtype, value_dtype), poisoned(key_dtype, value_dtype)
    slots = torch.tensor([25, 0, 9])
    key, value = torch.randn(2, 3, 16).transpose(0, 1), torch.randn(2, 3, 24).transpose(0, 1)
    write_slots(blocks, key, value, slots)
    for new, stored, scales in (
        (key, blocks.key_slots, blocks.key_scale_slots),
        (value, blocks.value_slots, blocks.value_scale_slots),
    ):
        expected, expected_scales = quantise(new, stored.dtype) if scales is not None else (new.to(stored.dtype), None)
        assert torch.equal(raw_bytes(stored)[slots], raw_bytes(expected))
        if scales is not None and expected_scales is not None:
            assert torch.equal(scales[slots], expected_scales)
    others = [slot for slot in range(32) if slot not in slots.tolist()]
    for tensor, old in zip(blocks.tensors, before.tensors, strict=True):
        untouched = raw_bytes(tensor.flatten(0, 1))[others], raw_bytes(old.flatten(0, 1))[others]
        torch.testing.assert_close(*untouched, rtol=0, atol=0, equal_nan=True)


def test_copied_blocks_bring_their_scales() -> None:
    layers = [poisoned(FP8, INT8), poisoned(torch.float32, FP8)]
    for blocks in layers:
        write_slots(blocks, torch.randn(32, 2, 16), torch.randn(32, 2, 24), torch.arange(32))
    before = [[tensor.clone() for tensor in blocks.tensors] for blocks in layers]
    copy_blocks(layers, [(0, 2), (3, 1)])
    for blocks, old in zip(layers, before, strict=True):
        for tensor, old_tensor in zip(blocks.tensors, old, strict=True):
            assert torch.equal(raw_bytes(tensor), raw_bytes(old_tensor)[[0, 3, 0, 3]])
