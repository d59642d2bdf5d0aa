"""The fused operations against torch's in float64, and that a row's result depends on that row alone."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hf_paged.fused.kernels import FusedKernels
from tests.fused.built import needs_fused

pytestmark = needs_fused

SHAPES = [(1, 1, 8), (1, 5, 7), (1, 3, 576), (2, 4, 33), (1, 70, 640)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adds_one", [False, True])
def test_rms_norm(shape: tuple[int, ...], adds_one: bool) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    wide = x.double()
    factor = 1 + weight.double() if adds_one else weight.double()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * factor
    for threads in (1, 2):
        found = FusedKernels().rms_norm(x, weight, 1e-5, adds_one, threads)
        torch.testing.assert_close(found.double(), expected, rtol=5e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("count", [1, 15, 4096, 4097, 50_000])
def test_gate(kind: str, count: int) -> None:
    gate, up = torch.linspace(-30, 30, count), torch.randn(count)
    wide = gate.double()
    act = F.silu(wide) if kind == "silu" else F.gelu(wide, approximate="tanh")
    found = FusedKernels().gate(gate, up, kind, 2)
    torch.testing.assert_close(found.double(), act * up.double(), rtol=1e-6, atol=2e-7)


def test_a_gate_keeps_what_is_no_number_and_takes_the_extremes() -> None:
    gate = torch.tensor([math.nan, 1e30, -1e30, 0.0, 100.0, -100.0])
    found = FusedKernels().gate(gate, torch.ones(6), "silu", 1)
    assert found[0].isnan()
    torch.testing.assert_close(found[1:], F.silu(gate[1:]), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_rotary_of_strided_heads(tokens: int) -> None:
    q = torch.randn(1, tokens, 4, 16).transpose(1, 2)
    k = torch.randn(1, tokens, 6, 16)[:, :, ::3].transpose(1, 2)  # heads that lie apart
    cosines, sines = torch.randn(1, tokens, 16), torch.randn(1, tokens, 16)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * cosines[:, None] + torch.cat((-x[..., 8:], x[..., :8]), dim=-1) * sines[:, None]

    for found, x in zip(FusedKernels().rotary(q, k, cosines, sines, 2), (q, k), strict=True):
        assert found.shape == x.shape
        torch.testing.assert_close(found, turned(x))


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    kernels, x, weight = FusedKernels(), torch.randn(90, 576), torch.randn(576)
    whole = kernels.rms_norm(x, weight, 1e-6, False, 2)
    gated = kernels.gate(x, x.flip(1), "silu", 2)
    for row in (0, 41, 89):
        one = x[row : row + 1]
        assert torch.equal(kernels.rms_norm(one, weight, 1e-6, False, 1)[0], whole[row])
        assert torch.equal(kernels.gate(one, one.flip(1), "silu", 1)[0], gated[row])
