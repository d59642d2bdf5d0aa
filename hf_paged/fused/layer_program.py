"""A decoder layer in one call: its operations, in the order in which fused.c runs them one after another.

```
x ─┬─ norm ─ q, k, v ─ (norms of heads) ─ rotary ─ write ─ attend ─ o ─┐
   └───────────────────────────────────────────────────────────── add ─┴─┬─ norm ─ gate, up ─ act ─ down ─┐
                                                                         └──────────────────────────── add ─┴─ y
```

What lies between two operations is memory that all layers of a step share. The weights' addresses are read at each
call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from hf_paged.fused.kernels import (
    GATES,
    AddCall,
    FusedKernels,
    GateCall,
    NormCall,
    Operation,
    Program,
    RotaryCall,
    SpreadCall,
)
from hf_paged.fused.norms import Norm
from hf_paged.kernels.cpu.backend import AttendCall, NativeBackend
from hf_paged.kernels.cpu.writer import WriteCall
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.linears.native import NativeProduct, Part, Product, row_stride

_MOST_OPERATIONS = 18


Linear = tuple[torch.Tensor, torch.Tensor | None]  # [n, k], [n]


class LayerWeights(NamedTuple):
    """What a layer's operations read, float32 and contiguous. Norms of heads: for q and for k, or None."""

    norm: Norm
    qkv: tuple[Linear, Linear, Linear]
    head_norms: tuple[Norm, Norm] | None
    o: Linear
    second_norm: Norm
    gate_up: tuple[Linear, Linear]
    down: Linear
    act: str  # one of GATES


class Attention(NamedTuple):
    """Where a layer's K and V lie, how they are turned, and who sees what."""

    backend: NativeBackend
    blocks: KVBlocks  # float32
    metadata: AttentionMetadata
    params: AttentionParams
    cosines: torch.Tensor  # [1, T, head_dim] float32, contiguous
    sines: torch.Tensor  # the same


class _Shape(NamedTuple):
    rows: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    inner: int
    has_head_norms: bool
    num_threads: int


class LayerProgram:
    """Runs whole layers. Not for several threads at once.

    Args:
        kernels: norms, gates, rotary embeddings.
        product: the linear layers.

    `clock`, if it is set, is told the name of each operation and the seconds it took.
    """

    clock: ClassVar[Callable[[str, float], None] | None] = None

    def __init__(self, kernels: FusedKernels, product: NativeProduct) -> None:
        self._kernels = kernels
        self._product = product
        self._plan: _Plan | None = None  # of the last step's shape

    def __call__(self, weights: LayerWeights, attention: Attention, x: torch.Tensor, num_threads: int) -> torch.Tensor:
        """One layer: writes its K and V, and returns what it makes of x.

        Args:
            weights: of the layer.
            attention: of the layer.
            x: `[1, T, hidden]` float32, contiguous.
            num_threads: that share the work.

        Returns:
            `[1, T, hidden]`, new.
        """
        _, kv_heads, head_dim = attention.blocks.keys.shape[1:]
        shape = _Shape(
            rows=x.shape[1],
            hidden=x.shape[2],
            heads=weights.qkv[0][0].shape[0] // head_dim,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=attention.blocks.values.shape[3],
            inner=weights.down[0].shape[1],
            has_head_norms=weights.head_norms is not None,
            num_threads=num_threads,
        )
        plan = self._plan
        if plan is None or plan.shape != shape or plan.backend is not attention.backend:
            self._plan = None  # its memory may be what the new one takes
            plan = self._plan = _Plan(shape, self._kernels, self._product, attention.backend)
        return plan.run(weights, attention, x, type(self).clock)


class _Plan:
    """The operations for one number of rows: everything in their arguments that is the same for all layers."""

    def __init__(self, shape: _Shape, kernels: FusedKernels, product: NativeProduct, backend: NativeBackend) -> None:
        self.shape, self.backend = shape, backend
        self._kernels = kernels
        self._product_function = product.function(shape.rows)
        self._run = kernels.functions["run"]
        self._held: list[Any] = []  # what addresses point at
        self._operations = (Operation * _MOST_OPERATIONS)()
        self._names: list[str] = []
        self._seconds = (ctypes.c_double * _MOST_OPERATIONS)()
        self._program = Program(ctypes.addressof(self._operations), 0, None)
        self._address = ctypes.addressof(self._program)
        rows, hidden = shape.rows, shape.hidden
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        attended = heads * shape.value_dim

        normed = self._memory(rows, hidden)
        q, k, v = (
            self._memory(rows, heads, dim),
            self._memory(rows, kv_heads, dim),
            self._memory(rows, kv_heads, shape.value_dim),
        )
        self._norm = self._add_norm(rows, hidden, None, normed)
        self._qkv = self._add_product(normed, hidden, (q, k, v))
        self._head_norms: tuple[NormCall, ...] = ()
        if shape.has_head_norms:
            q_normed, k_normed = torch.empty_like(q), torch.empty_like(k)
            self._head_norms = (
                self._add_norm(rows * heads, dim, q, q_normed),
                self._add_norm(rows * kv_heads, dim, k, k_normed),
            )
            q, k = q_normed, k_normed
        self._query, self._key, self._value = self._memory(rows, heads, dim), self._memory(rows, kv_heads, dim), v
        self._held += (q, k)
        self._rotary = self._add_rotary((q, k), (self._query, self._key))
        self._write, self._attend = WriteCall(), AttendCall()
        self._metadata: AttentionMetadata | None = None
        self._described: tuple[int, AttentionParams, int] | None = None
        self._add("write", backend.writer.function, self._write)
        self._add("attend", backend.attend_function, self._attend)
        self._attended = self._memory(rows, heads, shape.value_dim)
        projected, between = self._memory(rows, hidden), self._memory(rows, hidden)
        self._o = self._add_product(self._attended, attended, (projected,))
        self._residual = self._add_sum(rows * hidden, projected, between)
        self._second_norm = self._add_norm(rows, hidden, between, normed)
        gate, up, gated = (self._memory(rows, shape.inner) for _ in range(3))
        self._gate_up = self._add_product(normed, hidden, (gate, up))
        self._gate = GateCall(
            gate.data_ptr(), up.data_ptr(), gated.data_ptr(), rows * shape.inner, 0, shape.num_threads
        )
        self._add_fused("gate", self._gate)
        self._down = self._add_product(gated, shape.inner, (projected,))
        self._last = self._add_sum(rows * hidden, projected, None)
        self._last.a = between.data_ptr()

    def run(
        self, weights: LayerWeights, attention: Attention, x: torch.Tensor, clock: Callable[[str, float], None] | None
    ) -> torch.Tensor:
        """See `LayerProgram`."""
        out = torch.empty_like(x)
        at = x.data_ptr()
        self._norm.x = self._residual.a = at
        self._last.out = out.data_ptr()
        _set_norm(self._norm, weights.norm)
        _set_weights(self._qkv, weights.qkv)
        for call, norm in zip(self._head_norms, weights.head_norms or (), strict=True):
            _set_norm(call, norm)
        self._rotary.cosines, self._rotary.sines = attention.cosines.data_ptr(), attention.sines.data_ptr()
        self._describe(attention)
        _set_weights(self._o, (weights.o,))
        _set_norm(self._second_norm, weights.second_norm)
        _set_weights(self._gate_up, weights.gate_up)
        self._gate.kind = GATES.index(weights.act)
        _set_weights(self._down, (weights.down,))
        self._program.seconds = None if clock is None else ctypes.addressof(self._seconds)
        self._run(self._address)
        if clock is not None:
            for name, seconds in zip(self._names, self._seconds, strict=False):
                clock(name, seconds)
        self.backend.num_calls += 1
        return out

    def _describe(self, attention: Attention) -> None:
        """Where K and V go, and what attention reads: all of it for the first layer of a kind, else only where."""
        blocks, metadata, params = attention.blocks, attention.metadata, attention.params
        # a call that was not of this plan may have moved the memory that the backend lends
        if self._described == (id(metadata), params, self.backend.num_calls):
            keys, values = blocks.keys.data_ptr(), blocks.values.data_ptr()
            self._write.keys_to = self._attend.keys = keys
            self._write.values_to = self._attend.values = values
        else:
            self.backend.writer.describe(self._write, blocks, self._key, self._value, metadata.slot_mapping)
            self.backend.describe(self._attend, self._query, self._attended, blocks, metadata, params)
        # the metadata is held, so that no other one gets its id
        self._metadata, self._described = metadata, (id(metadata), params, self.backend.num_calls + 1)

    def _memory(self, *shape: int) -> torch.Tensor:
        memory = torch.empty(*shape, dtype=torch.float32, device="cpu")
        self._held.append(memory)
        return memory

    def _add(self, name: str, function: Any, call: ctypes.Structure) -> None:
        operation = self._operations[self._program.count]
        operation.function, operation.call = ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(call)
        self._program.count += 1
        self._names.append(name)
        self._held.append(call)

    def _add_fused(self, name: str, call: ctypes.Structure) -> None:
        self._add(name, self._kernels.functions[name], call)

    def _add_norm(self, rows: int, n: int, x: torch.Tensor | None, out: torch.Tensor) -> NormCall:
        call = NormCall(out=out.data_ptr(), rows=rows, n=n, num_threads=self.shape.num_threads)
        if x is not None:
            call.x = x.data_ptr()
        self._add_fused("rms_norm", call)
        return call

    def _add_sum(self, count: int, b: torch.Tensor, out: torch.Tensor | None) -> AddCall:
        call = AddCall(b=b.data_ptr(), count=count, num_threads=self.shape.num_threads)
        if out is not None:
            call.out = out.data_ptr()
        self._add_fused("add", call)
        return call

    def _add_product(self, x: torch.Tensor, k: int, outs: Sequence[torch.Tensor]) -> list[Part]:
        """The parts, whose weights are still to be set."""
        rows, num_threads = self.shape.rows, self.shape.num_threads
        stride = row_stride(rows, k)
        if stride != k:
            spread = self._memory(rows, stride)
            call = SpreadCall(x.data_ptr(), spread.data_ptr(), rows, k, stride, num_threads)
            self._add_fused("spread", call)
            x = spread
        parts = (Part * len(outs))()
        for part, out in zip(parts, outs, strict=True):
            part.out, part.n = out.data_ptr(), out.numel() // rows
        self._held.append(parts)
        product = Product(x.data_ptr(), ctypes.addressof(parts), rows, k, stride, len(outs), 0, num_threads)
        self._add("product", self._product_function, product)
        return list(parts)

    def _add_rotary(self, from_: tuple[torch.Tensor, ...], to: tuple[torch.Tensor, ...]) -> RotaryCall:
        shape = self.shape
        call = RotaryCall(tokens=shape.rows, dim=shape.head_dim, num_threads=shape.num_threads)
        for part, x, out in zip(call.parts, from_, to, strict=True):
            part.x, part.out, part.heads = x.data_ptr(), out.data_ptr(), x.shape[1]
            part.token_stride, part.head_stride, _ = x.stride()
        self._add_fused("rotary", call)
        return call


def _set_norm(call: NormCall, norm: Norm) -> None:
    call.weight, call.eps, call.adds_one = norm.weight.data_ptr(), norm.eps, norm.adds_one


def _set_weights(parts: Sequence[Part], weights: Sequence[Linear]) -> None:
    for part, (weight, bias) in zip(parts, weights, strict=True):
        part.weight, part.bias = weight.data_ptr(), None if bias is None else bias.data_ptr()
