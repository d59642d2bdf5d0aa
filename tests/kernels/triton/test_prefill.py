"""The prefill kernel against the float64 reference: ragged queries, cached context, poison around every key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.kernels.reference import ReferenceBackend
from hf_paged.kernels.triton.backend import TritonBackend
from hf_paged.kernels.triton.launch_table import MAX_DECODE_QUERIES
from hf_paged.kernels.triton.prefill import attend_prefill
from tests.kernels.packed import Packed, pack
from tests.kernels.tolerances import assert_close
from tests.kernels.triton.grid import GRID_NAMES, grid

FP8, INT8 = torch.float8_e4m3fn, torch.int8
# A fresh prompt, a chunk of a long one, a speculative check, a first token, decodes; in no order
MIXED = [(1, 130), (37, 37), (20, 330), (1, 1), (4, 90), (16, 33), (9, 260)]
FEATURES: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 16},
    {"window": 200},
    {"chunk": 32},
    {"chunk": 300},
    {"softcap": 1.5},
    {"with_sinks": True},
    {"window": 100, "softcap": 2.0, "with_sinks": True},
    {"chunk": 64, "window": 40},
]


def check(packed: Packed) -> None:
    assert_close(packed.attend(TritonBackend()), packed.attend(ReferenceBackend()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group_size", [1, 3, 5, 8])
def test_any_number_of_query_heads_a_kv_head(group_size: int, dtype: torch.dtype) -> None:
    check(pack([(17, 17), (9, 60)], group_size=group_size, dtype=dtype))


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (24, 40)]
)
def test_any_head_dims(head_dim: int, value_dim: int) -> None:
    check(pack([(33, 40)], num_kv_heads=1, head_dim=head_dim, value_dim=value_dim))


@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
def test_lengths_that_end_on_and_beside_a_block(block_size: int) -> None:
    lengths = [max(MAX_DECODE_QUERIES + 1, n) for n in (15, 16, 17, block_size + 1)]
    check(pack([(n, n) for n in lengths], num_kv_heads=1, block_size=block_size))


@pytest.mark.parametrize("options", [{}, *FEATURES], ids=str)
def test_a_mixed_step(options: dict[str, Any]) -> None:
    check(pack(MIXED, num_kv_heads=1, **options))


@pytest.mark.parametrize("options", [{}, {"window": 50}], ids=str)
def test_a_chunk_behind_a_long_context(options: dict[str, Any]) -> None:
    check(pack([(40, 4097)], num_kv_heads=1, group_size=1, **options))


@pytest.mark.parametrize(
    "dtypes",
    [
        {"key_dtype": FP8, "value_dtype": torch.bfloat16, "dtype": torch.bfloat16},
        {"key_dtype": INT8, "value_dtype": INT8},
        {"key_dtype": INT8, "value_dtype": INT8, "dtype": torch.bfloat16},
        {"key_dtype": torch.bfloat16, "value_dtype": torch.float16},
    ],
    ids=str,
)
def test_storage_of_another_type_is_read_directly(dtypes: dict[str, Any]) -> None:
    check(pack([(20, 130), (17, 17)], **dtypes))


def test_only_rows_of_long_sequences_are_written() -> None:
    packed = pack([(1, 30), (MAX_DECODE_QUERIES + 1, 40), (2, 20)], num_kv_heads=1)
    out = torch.full((packed.query.shape[0], packed.query.shape[1], 16), float("nan"))
    attend_prefill(out, packed.query, packed.blocks, packed.metadata, packed.params)
    assert_close(out[packed.tokens_of(1)], packed.attend(ReferenceBackend())[packed.tokens_of(1)])
    for row in (0, 2):
        assert out[packed.tokens_of(row)].isnan().all()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy, in the interpreter
def test_a_prompt_does_not_depend_on_its_neighbours() -> None:
    packed = pack([(17, 17), (33, 60), (9, 30)], num_kv_heads=1)
    whole = packed.attend(TritonBackend())
    blocks = packed.metadata.block_table[1, :4].long()
    packed.blocks.keys[blocks] = float("nan")
    packed.blocks.values[blocks] = float("nan")
    spoilt = packed.attend(TritonBackend())
    for row in (0, 2):
        assert torch.equal(spoilt[packed.tokens_of(row)], whole[packed.tokens_of(row)])
    assert spoilt[packed.tokens_of(1)].isnan().all()


@pytest.mark.grid
@pytest.mark.parametrize(GRID_NAMES, grid(FEATURES), ids=str)
def test_grid(group_size: int, options: dict[str, Any], dtype: torch.dtype, block_size: int) -> None:
    check(pack(MIXED, num_kv_heads=1, group_size=group_size, dtype=dtype, block_size=block_size, **options))
