"""Quantised K and V: one byte a value, one float32 scale a token and head.

x      [T, H, D]   0.02  -0.9  ...  1.7     largest |x| of the D values: 1.7
scale  [T, H]      1.7 / 448 (float8_e4m3fn), 1.7 / 127 (int8)
stored [T, H, D]   x / scale, rounded to the nearest, ties to even; x is about stored * scale

The scale is a token's own, so that what is stored never depends on other tokens, and writing never reads. A token and
head with a value that is not finite gets the scale NaN: all of it reads as NaN, and the request that owns it ends.
"""

from __future__ import annotations

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}

E4M3_HALF_FACTOR = 2.0**8  # the exponents' biases are 7 and 15

# A zero row must not divide by zero, and a subnormal scale has too few bits to divide by.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises x `[..., H, D]`, of any floating dtype, to float8_e4m3fn or int8.

    Returns:
        Stored values `[..., H, D]` in `dtype`, contiguous, and their scales `[..., H]` float32.
    """
    values = x.float()
    largest = values.abs().amax(dim=-1)
    scales = (largest / LARGEST[dtype]).clamp_min(SMALLEST_SCALE)
    lost = ~largest.isfinite()
    scaled = (values / scales.unsqueeze(-1)).masked_fill(lost.unsqueeze(-1), 0)
    stored = scaled.round() if dtype == torch.int8 else scaled
    return stored.to(dtype).contiguous(), scales.masked_fill(lost, float("nan"))


def dequantise(stored: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """stored `[..., H, D]` in `dtype`, times its scales `[..., H]` where it has any. Rounded once."""
    if scales is None:
        return stored.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (stored.to(wide) * scales.unsqueeze(-1)).to(dtype)


def e4m3_as_half(raw: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn bytes, uint8, as float16 in the memory of `out`, int16: exact, times E4M3_HALF_FACTOR.

    float16 has the same fields with more bits, so that shifting is enough. On a CPU this takes a tenth of the time of
    torch's own conversion. NaN becomes a number: it is never stored.
    """
    sign_extended = out.copy_(raw.view(torch.int8))
    return sign_extended.mul_(2**7).bitwise_and_(~0x4000).view(torch.float16)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Types of one byte seen as uint8, others as they are: torch indexes few tensors of float8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
