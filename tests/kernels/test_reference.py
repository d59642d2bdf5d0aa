"""The oracle itself, against a dense computation that knows no blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.kernels.metadata import AttentionParams
from hf_paged.kernels.reference import ReferenceBackend
from tests.kernels.packed import decodes, dense_attention, pack
from tests.kernels.tolerances import assert_close

MIXED = [(1, 17), (5, 5), (1, 1), (3, 40), (1, 64)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 7},
        {"chunk": 8},
        {"softcap": 1.5},
        {"with_sinks": True},
        {"window": 5, "softcap": 2.0, "with_sinks": True},
        {"chunk": 16, "with_sinks": True},
        {"group_size": 1, "num_kv_heads": 3},
        {"group_size": 5, "head_dim": 8, "value_dim": 12, "block_size": 8},
        {"dtype": torch.float64},
        {"key_dtype": torch.float8_e4m3fn, "value_dtype": torch.int8},
        {"key_dtype": torch.int8, "value_dtype": torch.float8_e4m3fn, "window": 7, "with_sinks": True},
    ],
    ids=str,
)
def test_reference_equals_dense_attention(options: dict[str, Any]) -> None:
    packed = pack(MIXED, **options)
    assert_close(packed.attend(ReferenceBackend()), dense_attention(packed))


def test_a_single_key_returns_its_value() -> None:
    packed = pack(decodes([1]), group_size=3)
    assert_close(packed.attend(ReferenceBackend())[0], packed.values[0][0].repeat_interleave(3, dim=0))


def test_sinks_take_weight_without_giving_a_value() -> None:
    packed = pack(decodes([1]), group_size=1)
    packed.params = AttentionParams(scale=0.0, sinks=torch.zeros(2))  # the key's score is 0, as the sink's
    assert_close(packed.attend(ReferenceBackend())[0], packed.values[0][0] / 2)
