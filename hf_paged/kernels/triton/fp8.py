"""float8_e4m3fn in registers: bytes to float16, and float32 to bytes.

e4m3fn   s eeee mmm             bias 7
float16  s eeeee mmmmmmmmmm     bias 15: the same bits, shifted into place, are worth 2^8 times less

Where the hardware converts by itself the kernels are told CONVERTS_E4M3; elsewhere integers do it, with the same
results.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(raw, CONVERTS_E4M3: tl.constexpr):
    """The float16 values, exact, of a tile of e4m3fn bytes (uint8).

    The NaN byte is worth 480 where CONVERTS_E4M3 is False: it is never stored, a token's NaN is in its scale.
    """
    if CONVERTS_E4M3:
        return raw.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = raw.to(tl.uint16)
    shifted = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return shifted.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def encode_e4m3(x, CONVERTS_E4M3: tl.constexpr):
    """The e4m3fn bytes (uint8) nearest to a tile of finite float32 values, ties to even, and 448 beyond."""
    if CONVERTS_E4M3:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Drops 20 bits of mantissa. A carry into the exponent is right as it is; 960 is the difference of the biases.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2^-6 a step is 2^-9, and so it is between 2^14 and 2^15: the sum is rounded to a count of steps.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
