"""fused.c behind tensors."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from hf_paged.kernels.cpu.build import load_library

SOURCE = Path(__file__).with_name("fused.c")
GATES = ("silu", "gelu_tanh")  # in the order of fused.c
FUNCTIONS = ("rms_norm", "gate", "rotary", "add", "spread", "run")


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class NormCall(ctypes.Structure):
    """`Norm` of fused.c."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "x", "weight", "out"),
        *_fields(ctypes.c_int64, "rows", "n", "adds_one", "num_threads"),
        ("eps", ctypes.c_double),
    )


class GateCall(ctypes.Structure):
    """`Gate` of fused.c."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "gate", "up", "out"),
        *_fields(ctypes.c_int64, "count", "kind", "num_threads"),
    )


class Turned(ctypes.Structure):
    """`Turned` of fused.c."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "x", "out"),
        *_fields(ctypes.c_int64, "heads", "token_stride", "head_stride"),
    )


class RotaryCall(ctypes.Structure):
    """`Rotary` of fused.c."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "cosines", "sines"),
        ("parts", Turned * 2),
        *_fields(ctypes.c_int64, "tokens", "dim", "num_threads"),
    )


class AddCall(ctypes.Structure):
    """`Add` of fused.c."""

    _fields_ = (*_fields(ctypes.c_void_p, "a", "b", "out"), *_fields(ctypes.c_int64, "count", "num_threads"))


class SpreadCall(ctypes.Structure):
    """`Spread` of fused.c."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "from_", "to"),
        *_fields(ctypes.c_int64, "rows", "n", "stride", "num_threads"),
    )


class Operation(ctypes.Structure):
    """`Operation` of fused.c: the addresses of a function and of its arguments."""

    _fields_ = _fields(ctypes.c_void_p, "function", "call")


class Program(ctypes.Structure):
    """`Program` of fused.c."""

    _fields_ = (("operations", ctypes.c_void_p), ("count", ctypes.c_int64), ("seconds", ctypes.c_void_p))


class FusedKernels:
    """One call for each small operation. All tensors are float32 on the CPU.

    Not for several threads at once: the C arguments are kept from call to call.

    Raises:
        ConfigError: fused.c can't be built or loaded here; the message is why.
    """

    def __init__(self) -> None:
        library = load_library(SOURCE)
        self._norm, self._gate, self._rotary = NormCall(), GateCall(), RotaryCall()
        # each takes the address of its arguments
        self.functions = {name: getattr(library, f"hf_paged_{name}") for name in FUNCTIONS}
        for function in self.functions.values():
            function.argtypes, function.restype = [ctypes.c_void_p], None
        self._rms_norm_of, self._gate_of, self._rotary_of = (
            self.functions[name] for name in ("rms_norm", "gate", "rotary")
        )
        self._norm_at, self._gate_at, self._rotary_at = map(ctypes.addressof, (self._norm, self._gate, self._rotary))
        self._turned = tuple(self._rotary.parts)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, adds_one: bool, num_threads: int
    ) -> torch.Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight`, or times `1 + weight`.

        Args:
            x: `[..., n]`, contiguous.
            weight: `[n]`, contiguous.
        """
        out = torch.empty_like(x)
        n = x.shape[-1]
        call = self._norm
        call.x, call.weight, call.out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        call.rows, call.n, call.adds_one, call.num_threads, call.eps = x.numel() // n, n, adds_one, num_threads, eps
        self._rms_norm_of(self._norm_at)
        return out

    def gate(self, gate: torch.Tensor, up: torch.Tensor, kind: str, num_threads: int) -> torch.Tensor:
        """`act(gate) * up`, both contiguous and of one shape; `kind` is one of `GATES`."""
        out = torch.empty_like(gate)
        call = self._gate
        call.gate, call.up, call.out = gate.data_ptr(), up.data_ptr(), out.data_ptr()
        call.count, call.kind, call.num_threads = gate.numel(), GATES.index(kind), num_threads
        self._gate_of(self._gate_at)
        return out

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, num_threads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, as `x * cos + rotate_half(x) * sin`.

        Args:
            q: `[1, H, T, D]`, D contiguous. The result lies in memory as `[1, T, H, D]`.
            k: `[1, Hkv, T, D]`, likewise.
            cosines: `[1, T, D]`, contiguous.
            sines: `[1, T, D]`, contiguous.
        """
        call = self._rotary
        results = []
        for part, x in zip(self._turned, (q, k), strict=True):
            _, heads, tokens, dim = x.shape
            out = torch.empty((1, tokens, heads, dim), dtype=torch.float32, device="cpu")
            part.x, part.out, part.heads = x.data_ptr(), out.data_ptr(), heads
            _, part.head_stride, part.token_stride, _ = x.stride()
            results.append(out.transpose(1, 2))
        call.cosines, call.sines, call.tokens, call.dim = cosines.data_ptr(), sines.data_ptr(), tokens, dim
        call.num_threads = num_threads
        self._rotary_of(self._rotary_at)
        return results[0], results[1]
