"""The torch backend against the reference, on odd shapes, with NaN in every slot that must not be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.kernels import torch_plan
from hf_paged.kernels.reference import ReferenceBackend
from hf_paged.kernels.torch_backend import TorchBackend
from tests.kernels.packed import Packed, decodes, pack, with_params
from tests.kernels.tolerances import assert_close

LENGTHS = [1, 15, 16, 17, 255, 600, 1100]
# A fresh prompt, a chunk of a long one, a speculative check, a first token, decodes; in no order
MIXED = [(1, 300), (37, 37), (20, 530), (1, 1), (4, 90), (1, 1100), (16, 33), (1, 31)]
FEATURES: list[dict[str, Any]] = [
    {},
    {"window": 16},
    {"window": 1},
    {"window": 700},
    {"chunk": 32},
    {"chunk": 600},
    {"softcap": 1.5},
    {"with_sinks": True},
    {"window": 20, "softcap": 2.0},
    {"window": 16, "with_sinks": True},
    {"chunk": 64, "with_sinks": True},
    {"chunk": 64, "window": 40},
    {"window": 100, "softcap": 2.0, "with_sinks": True},
]


def check(packed: Packed) -> None:
    actual, expected = packed.attend(TorchBackend()), packed.attend(ReferenceBackend())
    assert actual.shape == expected.shape
    assert_close(actual, expected)


@pytest.mark.parametrize("group_size", [1, 3, 5, 8])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (64, 64), (80, 80), (24, 16), (16, 40)])
def test_decode_of_any_heads_and_head_dims(group_size: int, head_dim: int, value_dim: int) -> None:
    check(pack(decodes([17, 255, 600]), group_size=group_size, head_dim=head_dim, value_dim=value_dim))


@pytest.mark.parametrize("group_size", [1, 3, 5, 8])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (80, 80), (24, 16)])
def test_mixed_step_of_any_heads_and_head_dims(group_size: int, head_dim: int, value_dim: int) -> None:
    check(pack([(9, 9), (1, 40), (7, 50)], group_size=group_size, head_dim=head_dim, value_dim=value_dim))


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("length", LENGTHS)
def test_one_sequence_of_any_length(length: int, block_size: int) -> None:
    check(pack(decodes([length]), block_size=block_size))
    check(pack([(length, length)], block_size=block_size))
    check(pack([(min(5, length), length)], block_size=block_size))


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_decode_of_all_lengths_together(block_size: int) -> None:
    check(pack(decodes(LENGTHS * 2), block_size=block_size))


@pytest.mark.parametrize("options", FEATURES, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [decodes([1, 17, 33, 600]), MIXED, [(40, 40), (33, 33), (48, 48)], [(600, 700)]],
    ids=["decode", "mixed", "fresh prompts", "long chunk"],
)
def test_windows_chunks_softcap_and_sinks(lengths: list[tuple[int, int]], options: dict[str, Any]) -> None:
    check(pack(lengths, **options))


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 2.0, "with_sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype, options: dict[str, Any]) -> None:
    check(pack(MIXED, dtype=dtype, **options))


@pytest.mark.parametrize(
    "dtypes",
    [
        {"key_dtype": torch.bfloat16},
        {"value_dtype": torch.float16},
        {"dtype": torch.bfloat16, "key_dtype": torch.float32},
    ],
    ids=str,
)
def test_storage_of_another_dtype_is_cast_when_read(dtypes: dict[str, torch.dtype]) -> None:
    check(pack([(1, 40), (1, 600), (9, 9)], **dtypes))


@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 2.0}, {"with_sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "storage",
    [
        {"key_dtype": torch.float8_e4m3fn},
        {"value_dtype": torch.int8},
        {"key_dtype": torch.int8, "value_dtype": torch.float8_e4m3fn, "value_dim": 24},
    ],
    ids=str,
)
def test_quantised_blocks_are_read_with_their_scales(
    storage: dict[str, Any], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    check(pack([(1, 40), (1, 600), (9, 9), (20, 530)], dtype=dtype, **storage, **options))


def test_a_nan_scale_spoils_only_its_sequence() -> None:
    packed = pack(decodes([40, 44, 48]), key_dtype=torch.float8_e4m3fn, value_dtype=torch.int8)
    assert packed.blocks.value_scales is not None
    clean = packed.attend(TorchBackend())
    packed.blocks.value_scales[packed.metadata.block_table[1, 0].long(), 3] = float("nan")
    spoilt = packed.attend(TorchBackend())
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])


def test_prompts_of_different_length_share_a_group_without_mixing() -> None:
    packed = pack([(20, 20), (31, 31), (25, 25), (17, 17)])
    backend = TorchBackend()
    assert_close(packed.attend(backend), packed.attend(ReferenceBackend()))
    assert backend.num_calls == 1


def test_a_sequence_with_nan_spoils_only_itself() -> None:
    packed = pack(decodes([40, 44, 48]))
    clean = packed.attend(TorchBackend())
    blocks = packed.metadata.block_table[1, :2].long()
    packed.blocks.values[blocks] = float("nan")
    packed.blocks.keys[blocks] = float("nan")
    spoilt = packed.attend(TorchBackend())
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])


def test_layers_of_a_step_share_one_plan_per_window() -> None:
    packed = pack(decodes([40, 44]))
    backend = TorchBackend()
    cache = packed.blocks, packed.metadata
    backend.attend(packed.query, *cache, packed.params)
    (plan,) = packed.metadata.plans.values()
    backend.attend(packed.query, *cache, with_params(packed, scale=1.0, softcap=3.0).params)
    assert list(packed.metadata.plans.values()) == [plan]
    backend.attend(packed.query, *cache, with_params(packed, window=8).params)
    assert len(packed.metadata.plans) == 2


def test_reused_gather_memory_does_not_reach_an_earlier_result() -> None:
    backend = TorchBackend()
    first, second = pack(decodes([600, 40]), seed=1), pack(decodes([700, 50]), seed=2)
    result = first.attend(backend)
    kept = result.clone()
    second.attend(backend)
    assert torch.equal(result, kept)


def test_gather_memory_made_in_inference_mode_serves_outside_of_it() -> None:
    backend, packed = TorchBackend(), pack(decodes([40]))
    with torch.inference_mode():
        inside = packed.attend(backend)
    with torch.no_grad():
        assert torch.equal(packed.attend(backend), inside)


def test_autocast_does_not_lower_the_precision() -> None:
    packed = pack(MIXED, softcap=2.0)
    expected = packed.attend(TorchBackend())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = packed.attend(TorchBackend())
    assert torch.equal(actual, expected)


def test_attend_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(MIXED, window=50, softcap=2.0)

    def refuse(*_: object) -> None:
        raise AssertionError("this reads a device's value on the host")

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    packed.attend(TorchBackend())


def calls_of(lengths: list[tuple[int, int]], **options: Any) -> int:
    backend = TorchBackend()
    pack(lengths, num_kv_heads=1, group_size=1, head_dim=8, **options).attend(backend)
    return backend.num_calls


def mixed_decodes(num_sequences: int) -> list[tuple[int, int]]:
    return decodes([20 + (i * 211) % 581 for i in range(num_sequences)])  # 20 to 600, spread out


def test_calls_do_not_grow_with_the_number_of_sequences() -> None:
    calls = {count: calls_of(mixed_decodes(count)) for count in (1, 16, 128, 1024)}
    assert calls[1] == 1
    assert max(calls.values()) <= 8, calls
    assert calls[1024] <= calls[128] + 1


def test_calls_of_a_mixed_step_are_bounded_by_its_lengths() -> None:
    prompts = [(64 + (i * 37) % 128, 64 + (i * 37) % 128) for i in range(4)]
    few = calls_of([*mixed_decodes(16), *prompts])
    many = calls_of([*mixed_decodes(128), *prompts])
    assert few <= 12
    assert many <= 12


def test_sequences_of_one_length_are_one_call() -> None:
    assert calls_of(decodes([300] * 128)) == 1
    assert calls_of([(16, 16)] * 64) == 1


def test_a_window_bounds_the_calls_whatever_the_context() -> None:
    assert calls_of(decodes([100, 900, 5000]), window=64) == 1


def test_one_long_sequence_takes_a_call_per_tile() -> None:
    assert calls_of(decodes([3 * torch_plan.KV_TILE])) == 3


def test_tiles_and_calls_stay_within_their_bounds() -> None:
    packed = pack([(700, 1900), (1, 1900), *[(60, 60)] * 50], num_kv_heads=1, group_size=1, head_dim=8)
    plan = torch_plan.plan_of(packed.metadata, None, None)
    for group in plan.groups:
        assert group.num_queries <= torch_plan.QUERY_TILE
        assert group.num_segments * group.num_queries <= torch_plan.MAX_GROUP_QUERIES
        for tile in group.tiles:
            assert tile.slots.shape[0] <= group.num_segments * torch_plan.KV_TILE


def test_padding_stays_within_its_share() -> None:
    lengths = mixed_decodes(128)
    plan = torch_plan.plan_of(pack(lengths, num_kv_heads=1, group_size=1, head_dim=8).metadata, None, None)
    gathered = sum(tile.slots.shape[0] for group in plan.groups for tile in group.tiles)
    real = sum(keys for _, keys in lengths)
    slack = torch_plan.FREE_PADDING * len(plan.groups)
    slack += (torch_plan.SEGMENT_PADDING + torch_plan.WIDTH_MULTIPLE) * len(lengths)
    assert gathered <= (1 + torch_plan.MAX_PADDING) * real + slack
    assert len(plan.groups) > 1


def test_one_sequence_and_even_decodes_need_no_index_of_tokens() -> None:
    for lengths in ([(40, 40)], [(5, 600)], decodes([300] * 8), decodes([100, 110, 105])):
        plan = torch_plan.plan_of(pack(lengths).metadata, None, None)
        assert plan.gather is None
        assert plan.restore is None
