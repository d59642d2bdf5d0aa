"""linear.c behind tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from hf_paged.linears.library import load_library


class _Part(ctypes.Structure):
    """`part` of linear.c."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int64),
    )


class _Product(ctypes.Structure):
    """`product` of linear.c."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("m", "k", "stride", "num_parts", "is_bf16", "num_threads")),
    )


# Rows of so many values share their places in a cache: linear.c takes them better apart, if there are more than a few.
_BAD_STRIDE = 1024
_FEW_ROWS = 8
_PADDING = 16

Weights = Sequence[tuple[torch.Tensor, torch.Tensor | None]]


class NativeProduct:
    """Multiplies rows with the weights of one or more linear layers in one call.

    Not for several threads at once: the C arguments are kept from call to call, which is most of what a call costs.

    Raises:
        ConfigError: linear.c can't be built or loaded here; the message is why.
    """

    def __init__(self) -> None:
        self._compute = load_library().hf_paged_linear
        self._compute.restype, self._compute.argtypes = None, [ctypes.c_void_p]
        self._product = _Product()
        self._address = ctypes.addressof(self._product)
        self._parts: dict[int, tuple[list[_Part], int]] = {}  # for each number of them: they, and their address

    def __call__(self, x: torch.Tensor, weights: Weights, num_threads: int) -> list[torch.Tensor]:
        """`x W^T + b` of each weight.

        Args:
            x: `[..., k]`, contiguous, float32 or bfloat16.
            weights: `(W [n, k], b [n] or None)`, contiguous, of x's type.
            num_threads: how many threads share the work.

        Returns:
            `[..., n]` of x's type for each weight. Sums are float32, and a row's depend on no other row.
        """
        *lead, k = x.shape
        rounds = x.dtype is torch.bfloat16
        num_rows, stride = x.numel() // k, k
        if k % _BAD_STRIDE == 0 and num_rows > _FEW_ROWS:
            stride = k + _PADDING
            padded = torch.empty((num_rows, stride), dtype=torch.float32, device="cpu")
            padded[:, :k] = x.reshape(num_rows, k)
            x = padded
        elif rounds:
            x = x.float()
        num_parts = len(weights)
        parts, address = self._parts.get(num_parts) or self._make_parts(num_parts)
        results, held = [], []
        for part, (weight, bias) in zip(parts, weights, strict=True):
            n = weight.shape[0]
            out = x.new_empty(*lead, n)
            results.append(out)
            part.weight, part.n, part.out, part.bias = weight.data_ptr(), n, out.data_ptr(), None
            if bias is not None:
                held.append(bias.float())  # a bfloat16 one is copied, and the copy must outlive the call
                part.bias = held[-1].data_ptr()
        product = self._product
        product.x, product.parts, product.m, product.k, product.stride = x.data_ptr(), address, num_rows, k, stride
        product.num_parts, product.is_bf16, product.num_threads = num_parts, rounds, num_threads
        self._compute(self._address)
        return [out.bfloat16() for out in results] if rounds else results

    def _make_parts(self, num_parts: int) -> tuple[list[_Part], int]:
        parts = (_Part * num_parts)()
        self._parts[num_parts] = list(parts), ctypes.addressof(parts)
        return self._parts[num_parts]
