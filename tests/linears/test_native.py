"""The native product against float64, on shapes that end within a vector, a group of weights or a block of rows."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from hf_paged.linears.native import NativeProduct
from tests.kernels.tolerances import assert_close
from tests.linears.built import needs_native

pytestmark = needs_native

SHAPES = [(1, 1), (3, 5), (4, 8), (7, 33), (9, 16), (33, 100), (12, 768), (5, 769), (70, 1024), (10, 2500)]


def _weights(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) / k**0.5
    return weight.to(dtype), torch.randn(n, generator=generator).to(dtype)


@pytest.mark.parametrize("most_few_rows", [None, 0], ids=["linear.c", "gemm.c"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_equals_float64(n: int, k: int, dtype: torch.dtype, most_few_rows: int | None) -> None:
    product = NativeProduct(most_few_rows)
    weight, bias = _weights(n, k, dtype)
    for rows, bias_or_none in itertools.product((1, 2, 3, 5, 6, 7, 8, 10, 11, 25, 100, 300), (bias, None)):
        x = torch.randn(rows, k).to(dtype)
        (actual,) = product(x, [(weight, bias_or_none)], 2)
        exact = F.linear(x.double(), weight.double(), None if bias_or_none is None else bias_or_none.double())
        assert actual.dtype == dtype
        assert_close(actual, exact.to(dtype))


@pytest.mark.parametrize("most_few_rows", [None, 0], ids=["linear.c", "gemm.c"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_weights_in_one_call_give_what_each_gives_alone(dtype: torch.dtype, most_few_rows: int | None) -> None:
    product = NativeProduct(most_few_rows)
    q, k, v = (_weights(n, 70, dtype, seed=n) for n in (33, 10, 1))
    parts = [q, (k[0], None), v]
    x = torch.randn(2, 3, 70).to(dtype)
    for num_threads in (1, 2, 3, 50):
        joined = product(x, parts, num_threads)
        for result, part in zip(joined, parts, strict=True):
            assert result.shape == (2, 3, part[0].shape[0])
            assert torch.equal(result, product(x, [part], 1)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [40, 1500])
@pytest.mark.parametrize("most_few_rows", [None, 0], ids=["linear.c", "gemm.c"])
def test_a_row_depends_neither_on_the_rows_beside_it_nor_on_the_threads(
    dtype: torch.dtype, k: int, most_few_rows: int | None
) -> None:
    product = NativeProduct(most_few_rows)
    weight, bias = _weights(37, k, dtype)
    x = torch.randn(150, k).to(dtype)
    (whole,) = product(x, [(weight, bias)], 2)
    for start, stop in ((0, 1), (1, 3), (3, 8), (100, 150)):
        assert torch.equal(product(x[start:stop], [(weight, bias)], 1)[0], whole[start:stop])


@pytest.mark.parametrize("most_few_rows", [None, 0], ids=["linear.c", "gemm.c"])
def test_what_is_not_finite_stays_in_its_row_and_column(most_few_rows: int | None) -> None:
    product = NativeProduct(most_few_rows)
    weight, _ = _weights(9, 20, torch.float32)
    x = torch.randn(5, 20)
    clean = product(x, [(weight, None)], 1)[0]
    x[3, 19], weight[8, 2] = float("nan"), float("inf")
    (result,) = product(x, [(weight, None)], 1)
    assert result[3].isnan().all()
    assert not result[[0, 1, 2, 4], 8].isfinite().any()
    keep = [0, 1, 2, 4]
    assert torch.equal(result[keep, :8], clean[keep, :8])


def test_rows_that_are_not_there() -> None:
    weight, bias = _weights(9, 20, torch.float32)
    assert NativeProduct()(torch.empty(0, 20), [(weight, bias)], 2)[0].shape == (0, 9)
