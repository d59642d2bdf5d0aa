"""Conversions of float8_e4m3fn by integers, against torch's: every byte, every midpoint and its neighbours."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_paged.kernels.triton.fp8 import decode_e4m3, encode_e4m3

NAN_BYTE = 0x7F
SIZE = tl.constexpr(256)  # of a program


@triton.jit
def _decode(raw, out):
    offsets = tl.arange(0, SIZE)
    tl.store(out + offsets, decode_e4m3(tl.load(raw + offsets), False))


@triton.jit
def _encode(x, out):
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + offsets, encode_e4m3(tl.load(x + offsets), False))


def encode(x: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.numel() % 256))
    out = torch.empty(padded.numel(), dtype=torch.uint8)
    _encode[(padded.numel() // 256,)](padded, out)
    return out[: x.numel()]


def test_every_byte_but_nan_decodes_to_its_value_and_sign() -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, dtype=torch.float16)
    _decode[(1,)](raw, out)
    expected = raw.view(torch.float8_e4m3fn).to(torch.float16)
    is_nan = (raw & NAN_BYTE) == NAN_BYTE
    assert torch.equal(out.view(torch.int16)[~is_nan], expected.view(torch.int16)[~is_nan])  # -0.0 is not 0.0
    assert out[is_nan].tolist() == [480.0, -480.0]  # as documented: a token's NaN is in its scale


def test_every_value_midpoint_and_neighbour_encodes_as_torch_does() -> None:
    values = torch.arange(NAN_BYTE, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (values[1:] + values[:-1]) / 2
    up, down = torch.tensor(1e9), torch.tensor(-1e9)
    x = torch.cat([values, midpoints, torch.nextafter(midpoints, up), torch.nextafter(midpoints, down)])
    x = torch.cat([x, torch.tensor([1e-45, 1e-38, 2**-10, 2**-9, 448.0])])
    x = torch.cat([x, -x])
    assert torch.equal(encode(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_values_of_all_magnitudes_encode_as_torch_does() -> None:
    x = torch.cat([torch.randn(4000) * 100, torch.randn(4000), torch.randn(4000) * 2**-8]).clamp(-448, 448)
    assert torch.equal(encode(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_beyond_the_largest_value_it_stays_there() -> None:
    assert encode(torch.tensor([449.0, 464.0, 470.0, 1e30, -500.0])).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE]
