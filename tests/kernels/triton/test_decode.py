"""The decode kernel against the float64 reference: odd shapes, poison around every key, few and many splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.reference import ReferenceBackend
from hf_paged.kernels.triton.backend import TritonBackend
from hf_paged.kernels.triton.decode import attend_decode
from hf_paged.kernels.triton.launch_table import MAX_DECODE_QUERIES, MAX_SPLITS, decode_launch
from tests.kernels.packed import Packed, decodes, pack
from tests.kernels.tolerances import assert_close
from tests.kernels.triton.grid import GRID_NAMES, grid

FP8, INT8 = torch.float8_e4m3fn, torch.int8
SPLIT = decode_launch("interpreter", 4, 64).split


def check(packed: Packed) -> torch.Tensor:
    actual = packed.attend(TritonBackend())
    assert_close(actual, packed.attend(ReferenceBackend()))
    return actual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group_size", [1, 3, 5, 8])
def test_any_number_of_query_heads_a_kv_head(group_size: int, dtype: torch.dtype) -> None:
    check(pack(decodes([17, 255]), group_size=group_size, dtype=dtype))


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (24, 40)]
)
def test_any_head_dims(head_dim: int, value_dim: int) -> None:
    check(pack(decodes([40, 3]), num_kv_heads=1, head_dim=head_dim, value_dim=value_dim))


@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
def test_lengths_that_end_on_and_beside_a_block_in_one_batch(block_size: int) -> None:
    lengths = [1, block_size - 1, block_size, block_size + 1, 255]
    check(pack(decodes(lengths), num_kv_heads=1, block_size=block_size))


def test_a_context_of_many_splits() -> None:
    check(pack(decodes([4097]), num_kv_heads=1))


def test_splits_grow_when_a_sequence_would_need_more_than_there_may_be() -> None:
    check(pack(decodes([(MAX_SPLITS + 3) * SPLIT + 5]), num_kv_heads=1, group_size=1, head_dim=16))


FEATURES: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 40},
    {"window": 300},
    {"chunk": 32},
    {"chunk": 300},
    {"softcap": 1.5},
    {"with_sinks": True},
    {"window": 200, "softcap": 2.0, "with_sinks": True},
    {"chunk": 64, "window": 40},
]


@pytest.mark.parametrize("options", FEATURES, ids=str)
def test_windows_chunks_softcap_and_sinks(options: dict[str, Any]) -> None:
    check(pack(decodes([17, 33, 450]), num_kv_heads=1, **options))


@pytest.mark.parametrize("options", [{}, {"window": 40, "with_sinks": True}, {"chunk": 32}], ids=str)
def test_a_few_queries_a_sequence(options: dict[str, Any]) -> None:
    check(pack([(4, 90), (1, 300), (8, 8), (2, 260)], num_kv_heads=1, group_size=3, **options))


@pytest.mark.parametrize(
    "dtypes",
    [
        {"key_dtype": FP8, "value_dtype": torch.bfloat16, "dtype": torch.bfloat16},
        {"key_dtype": FP8, "value_dtype": FP8, "dtype": torch.float16},
        {"key_dtype": INT8, "value_dtype": INT8},
        {"key_dtype": INT8, "value_dtype": INT8, "dtype": torch.bfloat16},
        {"key_dtype": INT8, "value_dtype": INT8, "dtype": torch.float16},
        {"key_dtype": INT8, "value_dtype": FP8, "window": 40},
        {"key_dtype": torch.bfloat16, "value_dtype": torch.float16},
    ],
    ids=str,
)
def test_storage_of_another_type_is_read_directly(dtypes: dict[str, Any]) -> None:
    check(pack(decodes([17, 300]), num_kv_heads=2, **dtypes))


def test_small_scales_do_not_leave_the_range_of_float16() -> None:
    packed = pack(decodes([40]), dtype=torch.float16, key_dtype=FP8, value_dtype=FP8)
    assert packed.blocks.value_scales is not None
    packed.blocks.value_scales.mul_(1e-4)
    actual = packed.attend(TritonBackend())
    expected = packed.attend(ReferenceBackend())
    assert_close(actual * 1e4, expected * 1e4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    lengths = [5, 129, 700, 256]
    together = pack(decodes(lengths), num_kv_heads=1, dtype=dtype)
    results = together.attend(TritonBackend())
    for row, length in enumerate(lengths):
        metadata = together.metadata
        alone = AttentionMetadata(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=metadata.seq_lens[row : row + 1],
            block_table=metadata.block_table[row : row + 1],
            slot_mapping=metadata.slot_mapping[:1],
            block_size=metadata.block_size,
            query_lens=(1,),
            kv_lens=(length,),
        )
        result = TritonBackend().attend(together.query[row : row + 1], together.blocks, alone, together.params)
        assert torch.equal(result[0], results[row])


def test_only_rows_of_short_sequences_are_written() -> None:
    lengths = [(1, 30), (MAX_DECODE_QUERIES + 1, 40), (2, 20)]
    packed = pack(lengths, num_kv_heads=1)
    out = torch.full((packed.query.shape[0], packed.query.shape[1], 16), float("nan"))
    attend_decode(out, packed.query, packed.blocks, packed.metadata, packed.params, max_queries=2, max_keys=30)
    expected = packed.attend(ReferenceBackend())
    for row in (0, 2):
        assert_close(out[packed.tokens_of(row)], expected[packed.tokens_of(row)])
    assert out[packed.tokens_of(1)].isnan().all()


def test_more_programs_than_splits_change_nothing() -> None:
    """A captured launch has room for the longest context there may be."""
    packed = pack(decodes([40, 300]), num_kv_heads=1)
    out = torch.full((2, 2, 16), float("nan"))
    attend_decode(out, packed.query, packed.blocks, packed.metadata, packed.params, max_queries=1, max_keys=5000)
    assert torch.equal(out, packed.attend(TritonBackend()))


def test_blocks_beyond_two_to_the_31_elements() -> None:
    block_size, head_dim, num_keys = 16, 256, 37
    num_blocks = 2**31 // (block_size * head_dim) + 4
    # Never touched but for three blocks, so that little of it takes memory.
    keys = torch.empty(num_blocks, block_size, 1, head_dim, dtype=INT8)
    values = torch.empty(num_blocks, block_size, 1, 16, dtype=INT8)
    key_scales, value_scales = (torch.empty(num_blocks, block_size, 1) for _ in range(2))
    table = torch.tensor([[num_blocks - 1, 1, num_blocks - 2]], dtype=torch.int32)
    for tensor in (keys, values):
        for block in table[0].tolist():
            tensor[block] = torch.randint(-127, 128, tensor.shape[1:], dtype=INT8)
    for scales in (key_scales, value_scales):
        scales[table[0].long()] = 0.01
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([num_keys], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        block_size=block_size,
        query_lens=(1,),
        kv_lens=(num_keys,),
    )
    blocks = KVBlocks(keys, values, key_scales, value_scales)
    query, params = torch.randn(1, 2, head_dim), AttentionParams(head_dim**-0.5)
    actual = TritonBackend().attend(query, blocks, metadata, params)
    assert_close(actual, ReferenceBackend().attend(query, blocks, metadata, params))


@pytest.mark.grid
@pytest.mark.parametrize(GRID_NAMES, grid(FEATURES), ids=str)
def test_grid(group_size: int, options: dict[str, Any], dtype: torch.dtype, block_size: int) -> None:
    lengths = decodes([1, 15, 16, 17, 255, 1500])
    check(pack(lengths, group_size=group_size, dtype=dtype, block_size=block_size, head_dim=80, **options))
