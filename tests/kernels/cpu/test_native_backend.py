"""The native kernels against the reference, on odd shapes, with NaN in every slot that must not be read."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hf_paged.kernels.cpu import backend
from hf_paged.kernels.cpu.backend import NativeBackend
from hf_paged.kernels.cpu.build import unavailable_reason
from hf_paged.kernels.cpu.plan import SPLIT_KEYS
from hf_paged.kernels.reference import ReferenceBackend
from tests.kernels.packed import Packed, decodes, pack, with_params
from tests.kernels.test_torch_backend import FEATURES, LENGTHS, MIXED
from tests.kernels.tolerances import assert_close

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=f"not buildable here: {unavailable_reason()}")


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    return NativeBackend()


def check(packed: Packed, native: NativeBackend) -> None:
    actual, expected = packed.attend(native), packed.attend(ReferenceBackend())
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    assert_close(actual, expected)


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 8, 13, 71, 128])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(16, 16), (64, 64), (80, 80), (24, 16), (16, 40), (5, 3), (20, 28), (100, 96)]
)
def test_decode_of_any_heads_and_head_dims(
    native: NativeBackend, group_size: int, head_dim: int, value_dim: int
) -> None:
    check(pack(decodes([1, 17, 255, 600]), group_size=group_size, head_dim=head_dim, value_dim=value_dim), native)


@pytest.mark.parametrize("group_size", [1, 3, 5, 8, 71])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (80, 80), (24, 16), (5, 3), (33, 70), (256, 256)])
def test_mixed_step_of_any_heads_and_head_dims(
    native: NativeBackend, group_size: int, head_dim: int, value_dim: int
) -> None:
    lengths = [(9, 9), (1, 40), (7, 50), (35, 111)]
    check(pack(lengths, group_size=group_size, head_dim=head_dim, value_dim=value_dim), native)


@pytest.mark.parametrize("block_size", [1, 5, 16, 100])
@pytest.mark.parametrize("length", [*LENGTHS, 63, 64, 65, SPLIT_KEYS, SPLIT_KEYS + 1])
def test_one_sequence_of_any_length(native: NativeBackend, length: int, block_size: int) -> None:
    check(pack(decodes([length]), block_size=block_size), native)
    check(pack([(length, length)], block_size=block_size), native)
    check(pack([(min(5, length), length)], block_size=block_size), native)


@pytest.mark.parametrize("options", FEATURES, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [decodes([1, 17, 33, 600]), MIXED, [(40, 40), (33, 33), (48, 48)], [(600, 700)]],
    ids=["decode", "mixed", "fresh prompts", "long chunk"],
)
def test_windows_chunks_softcap_and_sinks(
    native: NativeBackend, lengths: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    check(pack(lengths, **options), native)
    check(pack(lengths, group_size=3, **options), native)


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 2.0, "with_sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(native: NativeBackend, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check(pack(MIXED, dtype=dtype, **options), native)


@pytest.mark.parametrize("softcap", [0.01, 1.0, 30.0, 50.0])
def test_a_softcap_of_any_size(native: NativeBackend, softcap: float) -> None:
    packed = pack(MIXED, softcap=softcap)
    check(with_params(packed, scale=8.0), native)


@pytest.mark.parametrize(
    "dtypes",
    [
        {"key_dtype": torch.bfloat16},
        {"value_dtype": torch.float16},
        {"key_dtype": torch.float16, "value_dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "key_dtype": torch.float32},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [16, 20])
def test_storage_of_another_dtype_is_read_as_it_is(
    native: NativeBackend, dtypes: dict[str, torch.dtype], head_dim: int
) -> None:
    check(pack([(1, 40), (1, 600), (9, 9)], head_dim=head_dim, **dtypes), native)


@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 2.0}, {"with_sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "storage",
    [
        {"key_dtype": torch.float8_e4m3fn},
        {"value_dtype": torch.int8},
        {"key_dtype": torch.int8},
        {"key_dtype": torch.int8, "value_dtype": torch.int8, "value_dim": 24},
        {"key_dtype": torch.int8, "value_dtype": torch.float8_e4m3fn, "value_dim": 24},
    ],
    ids=str,
)
def test_quantised_blocks_are_read_with_their_scales(
    native: NativeBackend, storage: dict[str, Any], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    check(pack([(1, 40), (1, 600), (9, 9), (20, 530)], dtype=dtype, **storage, **options), native)


# Every bit pattern of a half type goes in as V of a key that one query alone sees, and comes out again.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_read_and_written_exactly(native: NativeBackend, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1024, 64)
    packed = pack(decodes([1] * 1024), num_kv_heads=1, group_size=1, head_dim=8, value_dim=64, dtype=dtype)
    slots = packed.metadata.block_table[:, 0].long() * packed.metadata.block_size
    packed.blocks.value_slots[slots, 0] = every
    out = packed.attend(native)[:, 0]
    rounded = every.double().to(dtype)
    assert torch.equal(out.isnan(), rounded.isnan())
    assert torch.equal(out.nan_to_num(0, 1, -1), rounded.nan_to_num(0, 1, -1))


@pytest.mark.parametrize("storage", [{}, {"key_dtype": torch.int8, "value_dtype": torch.int8}], ids=str)
def test_a_sequence_with_nan_spoils_only_itself(native: NativeBackend, storage: dict[str, Any]) -> None:
    lengths = [(1, 600), (1, 644), (30, 40), (30, 44), (1, 9)]
    for spoilt_row in (1, 3):
        packed = pack(lengths, **storage)
        clean = packed.attend(native)
        blocks = packed.metadata.block_table[spoilt_row, :2].long()
        for keys, values in (
            (packed.blocks.keys, packed.blocks.values),
            (packed.blocks.key_scales, packed.blocks.value_scales),
        ):
            if keys is not None and values is not None and keys.dtype.is_floating_point:
                keys[blocks] = values[blocks] = float("nan")
        spoilt = packed.attend(native)
        for row in range(len(lengths)):
            tokens = packed.tokens_of(row)
            if row == spoilt_row:
                assert spoilt[tokens].isnan().all()
            else:
                assert torch.equal(spoilt[tokens], clean[tokens])


def test_infinite_scores_are_nan_as_in_a_softmax(native: NativeBackend) -> None:
    packed = pack(decodes([40, 44]))
    packed.blocks.keys[packed.metadata.block_table[0, 0].long()] = float("inf")
    out = packed.attend(native)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_scores_far_below_the_highest_have_no_weight(native: NativeBackend) -> None:
    packed = with_params(pack(MIXED), scale=8.0)
    packed.query.round_()  # scores in the hundreds, and exact
    packed.blocks.keys.round_()
    check(packed, native)


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 2.0, "with_sinks": True}], ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch(native: NativeBackend, options: dict[str, Any]) -> None:
    packed = pack(MIXED, group_size=3, **options)
    together = packed.attend(native)
    for row, lengths in enumerate(MIXED):
        metadata = packed.metadata
        tokens = packed.tokens_of(row)
        alone = Packed(
            packed.query[tokens],
            packed.blocks,
            type(metadata)(
                query_start_loc=torch.tensor([0, lengths[0]], dtype=torch.int32),
                seq_lens=metadata.seq_lens[row : row + 1],
                block_table=metadata.block_table[row : row + 1],
                slot_mapping=metadata.slot_mapping[tokens],
                block_size=metadata.block_size,
                query_lens=(lengths[0],),
                kv_lens=(lengths[1],),
            ),
            packed.params,
            [],
            [],
        )
        assert torch.equal(alone.attend(native), together[tokens])


def test_the_number_of_threads_does_not_change_a_bit(native: NativeBackend) -> None:
    packed = pack(MIXED * 3, group_size=3)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3, 5):
            torch.set_num_threads(num_threads)
            results.append(packed.attend(native))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_splits_are_joined_only_when_all_are_computed(native: NativeBackend) -> None:
    # a thread that runs out of items must wait for those that have not: the longest split is the last to be ready
    packed = pack(decodes([SPLIT_KEYS + 1, 2 * SPLIT_KEYS] * 3), num_kv_heads=3, group_size=3, head_dim=64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = packed.attend(native)
        torch.set_num_threads(max(2, before))
        native.attend(packed.query, packed.blocks, packed.metadata, packed.params)
        for _ in range(300):
            native._partials._held.fill_(float("nan"))
            assert torch.equal(packed.attend(native), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 2.0, "with_sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("lengths", [decodes([40, 300, 64, 1, 129] * 4), MIXED * 4], ids=["decode", "mixed"])
def test_kv_heads_that_are_read_together_change_no_bit(
    native: NativeBackend,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = pack(lengths, num_kv_heads=5, group_size=3, key_dtype=dtype, value_dtype=dtype, **options)
    results, most = [], []
    for heads in (1, 2, 5):
        monkeypatch.setattr(backend, "_MOST_HEADS", heads)
        results.append(packed.attend(native))
        (plan,) = packed.metadata.plans.values()
        most.append(int(plan.items[:, -1].max()))
    assert most == [1, 2, 5]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_engines_of_several_threads_compute_at_once() -> None:
    packed = pack(MIXED)
    expected = packed.attend(NativeBackend())
    wrong = []

    def attend() -> None:
        backend, own = NativeBackend(), pack(MIXED)
        wrong.extend(i for i in range(20) if not torch.equal(own.attend(backend), expected))

    threads = [threading.Thread(target=attend) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("lengths", [decodes([40, 600]), MIXED], ids=["decode", "mixed"])
def test_queries_and_tables_of_any_strides(native: NativeBackend, lengths: list[tuple[int, int]]) -> None:
    packed = pack(lengths)
    expected = packed.attend(native)
    query, table = packed.query, packed.metadata.block_table
    packed.query = query.transpose(1, 2).contiguous().transpose(1, 2)  # D apart
    assert torch.equal(packed.attend(native), expected)
    wide = torch.full((table.shape[0], 2 * table.shape[1]), 2**30, dtype=torch.int32)
    wide[:, ::2] = table
    object.__setattr__(packed.metadata, "block_table", wide[:, ::2])
    assert torch.equal(packed.attend(native), expected)
    longer = torch.cat([table, torch.full_like(table, 2**30)], 1)
    object.__setattr__(packed.metadata, "block_table", longer[:, : table.shape[1]])
    assert torch.equal(packed.attend(native), expected)


def test_blocks_past_two_to_the_31_elements(native: NativeBackend) -> None:
    packed = pack([(1, 40), (20, 20)], num_kv_heads=1, head_dim=8)
    expected = packed.attend(native)
    num_blocks = 2**31 // packed.blocks.keys[0].numel() + packed.blocks.keys.shape[0]
    first = num_blocks - packed.blocks.keys.shape[0]
    far = []
    for tensor in (packed.blocks.keys, packed.blocks.values):
        # memory that is never touched is never given: only the pages of the last blocks are real
        large = torch.empty((num_blocks, *tensor.shape[1:]), dtype=tensor.dtype)
        large[first:] = tensor
        far.append(large)
    packed.blocks = type(packed.blocks)(*far)
    packed.metadata.block_table.add_(first)
    assert torch.equal(packed.attend(native), expected)


def test_layers_of_a_step_share_one_plan_per_window(native: NativeBackend) -> None:
    packed = pack(decodes([40, 44]))
    cache = packed.blocks, packed.metadata
    native.attend(packed.query, *cache, packed.params)
    (plan,) = packed.metadata.plans.values()
    native.attend(packed.query, *cache, with_params(packed, scale=1.0, softcap=3.0).params)
    assert list(packed.metadata.plans.values()) == [plan]
    native.attend(packed.query, *cache, with_params(packed, window=8).params)
    assert len(packed.metadata.plans) == 2


def test_a_call_counts_as_one(native: NativeBackend) -> None:
    for options in ({}, {"dtype": torch.float64}):
        packed = pack(decodes([300] * 8), **options)
        before = native.num_calls
        packed.attend(native)
        assert native.num_calls == before + 1


def test_works_in_and_out_of_inference_mode_and_under_autocast(native: NativeBackend) -> None:
    packed = pack(MIXED)
    expected = packed.attend(native)
    with torch.inference_mode():
        assert torch.equal(packed.attend(NativeBackend()), expected)
        assert torch.equal(packed.attend(native), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(packed.attend(native), expected)
    packed.query.requires_grad_()
    assert torch.equal(packed.attend(native), expected)


def test_an_earlier_result_is_not_written_to_again(native: NativeBackend) -> None:
    first, second = pack(decodes([600, 40]), seed=1), pack(decodes([700, 50]), seed=2)
    result = first.attend(native)
    kept = result.clone()
    second.attend(native)
    assert torch.equal(result, kept)
