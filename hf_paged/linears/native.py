"""linear.c and gemm.c behind tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from hf_paged.linears.library import load_libraries


class Part(ctypes.Structure):
    """`part` of product.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int64),
    )


class Product(ctypes.Structure):
    """`product` of product.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("m", "k", "stride", "num_parts", "is_bf16", "num_threads")),
    )


# Rows of so many values share their places in a cache: they are better taken apart, if there are more than a few.
_BAD_STRIDE = 1024
_FEW_ROWS = 8
_PADDING = 16

# Up to here linear.c is the faster one, which doesn't turn the weights first.
MOST_FEW_ROWS = 80


def row_stride(num_rows: int, k: int) -> int:
    """How far apart rows of `k` values should lie for a product."""
    return k + _PADDING if k % _BAD_STRIDE == 0 and num_rows > _FEW_ROWS else k


Weights = Sequence[tuple[torch.Tensor, torch.Tensor | None]]


class NativeProduct:
    """Multiplies rows with the weights of one or more linear layers in one call.

    Not for several threads at once: the C arguments are kept from call to call, which is most of what a call costs.

    Args:
        most_few_rows: from how many rows on gemm.c is used instead of linear.c, less one. The two add in another order:
            None uses linear.c for all, and a row's result depends on no other row.

    Raises:
        ConfigError: linear.c or gemm.c can't be built or loaded here; the message is why.
    """

    def __init__(self, most_few_rows: int | None = MOST_FEW_ROWS) -> None:
        self._most_few_rows = most_few_rows
        few, many = load_libraries()
        self._few, self._many = few.hf_paged_linear, many.hf_paged_gemm
        for function in (self._few, self._many):
            function.restype, function.argtypes = None, [ctypes.c_void_p]
        self._product = Product()
        self._address = ctypes.addressof(self._product)
        self._parts: dict[int, tuple[list[Part], int]] = {}  # for each number of them: they, and their address

    def __call__(self, x: torch.Tensor, weights: Weights, num_threads: int) -> list[torch.Tensor]:
        """`x W^T + b` of each weight.

        Args:
            x: `[..., k]`, contiguous, float32 or bfloat16.
            weights: `(W [n, k], b [n] or None)`, contiguous, of x's type.
            num_threads: how many threads share the work.

        Returns:
            `[..., n]` of x's type for each weight. Sums are float32; a row's depend on how many rows there are at most.
        """
        *lead, k = x.shape
        rounds = x.dtype is torch.bfloat16
        num_rows = x.numel() // k
        stride = row_stride(num_rows, k)
        if stride != k:
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
        self.function(num_rows)(self._address)
        return [out.bfloat16() for out in results] if rounds else results

    def function(self, num_rows: int) -> Any:
        """The C function for so many rows; it takes the address of a `Product`."""
        return self._few if self._most_few_rows is None or num_rows <= self._most_few_rows else self._many

    def _make_parts(self, num_parts: int) -> tuple[list[Part], int]:
        parts = (Part * num_parts)()
        self._parts[num_parts] = list(parts), ctypes.addressof(parts)
        return self._parts[num_parts]
