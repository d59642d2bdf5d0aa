"""Latent attention of the torch backend against the reference, with NaN in every slot that must not be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_paged.kernels import torch_latent
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.reference import ReferenceBackend
from hf_paged.kernels.reference_latent import reference_latent_attention
from hf_paged.kernels.torch_backend import TorchBackend
from tests.kernels.latent_packed import LatentPacked, pack_latent
from tests.kernels.packed import decodes
from tests.kernels.tolerances import assert_close

LENGTHS = [1, 15, 16, 17, 255, 600, 1100]
MIXED = [(1, 300), (37, 37), (20, 530), (1, 1), (4, 90), (1, 1100), (16, 33), (1, 31)]
FEATURES: list[dict[str, Any]] = [
    {"window": 16},
    {"window": 1},
    {"chunk": 32},
    {"softcap": 1.5},
    {"with_sinks": True},
    {"window": 100, "softcap": 2.0, "with_sinks": True},
]


def reference(packed: LatentPacked) -> torch.Tensor:
    step = packed.step
    return reference_latent_attention(packed.query_latent, packed.query_rope, step.blocks, step.metadata, step.params)


def check(packed: LatentPacked) -> None:
    actual, expected = packed.attend(TorchBackend()), reference(packed)
    assert actual.shape == expected.shape
    assert_close(actual, expected)


@pytest.mark.parametrize("options", [{}, *FEATURES], ids=str)
def test_the_reference_is_attention_to_latents_and_rotary_keys_side_by_side(options: dict[str, Any]) -> None:
    """K is both, one after the other, V is the latents: then it is the attention that the other oracle computes."""
    packed = pack_latent([(1, 17), (5, 5), (3, 40)], **options)
    step = packed.step
    blocks = KVBlocks(torch.cat([step.blocks.keys, step.blocks.values], dim=-1), step.blocks.keys)
    query = torch.cat([packed.query_latent, packed.query_rope], dim=-1)
    expected = ReferenceBackend().attend(query, blocks, step.metadata, step.params)
    assert_close(reference(packed), expected)


def test_the_reference_backend_computes_in_float64() -> None:
    packed = pack_latent(MIXED)
    assert torch.equal(packed.attend(ReferenceBackend()), reference(packed))


@pytest.mark.parametrize("num_heads", [1, 3, 5, 16])
@pytest.mark.parametrize(("rank", "rope_dim"), [(16, 8), (24, 16), (80, 4)])
def test_any_heads_and_sizes(num_heads: int, rank: int, rope_dim: int) -> None:
    check(pack_latent([(9, 9), (1, 40), (7, 50)], num_heads=num_heads, rank=rank, rope_dim=rope_dim))


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("length", LENGTHS)
def test_one_sequence_of_any_length(length: int, block_size: int) -> None:
    check(pack_latent(decodes([length]), block_size=block_size))
    check(pack_latent([(min(5, length), length)], block_size=block_size))


@pytest.mark.parametrize("options", [{}, *FEATURES], ids=str)
def test_mixed_steps_with_windows_chunks_softcap_and_sinks(options: dict[str, Any]) -> None:
    check(pack_latent(MIXED, **options))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    check(pack_latent(MIXED, dtype=dtype))


@pytest.mark.parametrize("dtypes", [{"key_dtype": torch.bfloat16}, {"value_dtype": torch.float16}], ids=str)
def test_storage_of_another_dtype_is_cast_when_read(dtypes: dict[str, torch.dtype]) -> None:
    check(pack_latent([(1, 40), (1, 600), (9, 9)], **dtypes))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_latents(dtype: torch.dtype) -> None:
    check(pack_latent(MIXED, key_dtype=dtype, value_dtype=dtype))
    check(pack_latent(MIXED, key_dtype=dtype))


def test_many_heads_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_latent(MIXED, num_heads=6, softcap=2.0, with_sinks=True)
    whole = packed.attend(TorchBackend())
    most = 0
    product = torch.bmm

    def watched(*args: torch.Tensor) -> torch.Tensor:
        nonlocal most
        out = product(*args)
        most = max(most, out.numel())
        return out

    bound = 50_000  # the largest group has 37 queries of 40 keys and one head, or 8 queries of 512
    monkeypatch.setattr(torch_latent, "MAX_SCORES", bound)
    monkeypatch.setattr(torch, "bmm", watched)
    assert_close(packed.attend(TorchBackend()), whole)
    assert 0 < most <= bound


def test_a_sequence_with_nan_spoils_only_itself() -> None:
    packed = pack_latent(decodes([40, 44, 48]))
    clean = packed.attend(TorchBackend())
    blocks = packed.step.metadata.block_table[1, :2].long()
    packed.step.blocks.keys[blocks] = float("nan")
    spoilt = packed.attend(TorchBackend())
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])


def test_calls_are_counted_and_do_not_grow_with_the_number_of_sequences() -> None:
    calls = {}
    for count in (1, 16, 128):
        backend = TorchBackend()
        pack_latent(decodes([300 + index % 7 for index in range(count)])).attend(backend)
        calls[count] = backend.num_calls
    assert calls == {1: 1, 16: 1, 128: 1}


def test_autocast_does_not_lower_the_precision() -> None:
    packed = pack_latent(MIXED)
    expected = packed.attend(TorchBackend())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(packed.attend(TorchBackend()), expected)


def test_attending_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_latent(MIXED, window=50)

    def refuse(*_: object) -> None:
        raise AssertionError("this reads a device's value on the host")

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    packed.attend(TorchBackend())


def test_other_layers_of_a_step_share_the_plan() -> None:
    packed = pack_latent(decodes([40, 44]))
    packed.attend(TorchBackend())
    (plan,) = packed.step.metadata.plans.values()
    step = packed.step
    params = replace(step.params, scale=1.0)
    TorchBackend().attend_latent(packed.query_latent, packed.query_rope, step.blocks, step.metadata, params)
    assert list(step.metadata.plans.values()) == [plan]
