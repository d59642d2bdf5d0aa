"""NativeBackend: the C kernels of this folder behind the interface of all backends."""

from __future__ import annotations

import ctypes

import torch

from hf_paged.kernels.backend import AttentionBackend
from hf_paged.kernels.cpu.build import load_library, unavailable_reason
from hf_paged.kernels.cpu.plan import HeadsAtOnce, Limits, plan_of
from hf_paged.kernels.cpu.writer import Writer
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.torch_backend import TorchBackend

_QUERY_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STORED_TYPES = {**_QUERY_TYPES, torch.int8: 3}


_KEY_TILE = 64  # of attention.c
_TILE_BYTES = (
    1 << 17
)  # of K and V that are used at a time: as much again is being fetched, and both fit the second cache
_MOST_HEADS = 8  # of an item: so many times few_rows fit max_rows


class AttendCall(ctypes.Structure):
    """`Step` of attention.c."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("query", "out", "keys", "values", "key_scales", "value_scales", "sinks", "block_table"),
                *("items", "bundles", "joins", "partials", "scratch"),
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_bundles", "num_joins", "num_threads", "scratch_size"),
                *("table_stride", "token_stride", "head_stride"),
                *("num_kv_heads", "group_size", "head_dim", "value_dim", "block_size"),
                *("window", "chunk", "query_type", "key_type", "value_type"),
            )
        ),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    )


class NativeBackend(AttentionBackend):
    """Paged attention in C, compiled for this machine when the first one is made. `attention.c` has the picture.

    float64 queries and float8 caches are the torch backend's, and so is latent attention.

    Raises:
        ConfigError: the kernels can't be built or loaded here; the message is the reason.
    """

    name = "native"
    auto_priority = 10
    auto_device_types = ("cpu",)

    def __init__(self) -> None:
        super().__init__()
        library = load_library()
        self.attend_function = library.hf_paged_attend  # takes the address of an AttendCall
        self.attend_function.argtypes, self.attend_function.restype = [ctypes.c_void_p], None
        self._size_of_scratch = library.hf_paged_scratch_size
        self._size_of_scratch.argtypes, self._size_of_scratch.restype = [ctypes.c_int64] * 2, ctypes.c_int64
        self._limits = Limits(library.hf_paged_max_rows(), library.hf_paged_few_rows(), library.hf_paged_key_tile())
        self._scratch = _Memory()
        self._partials = _Memory()
        self._scratch_sizes: dict[tuple[int, int], int] = {}
        self._call = AttendCall()
        self._address = ctypes.addressof(self._call)
        self.writer = Writer()
        self._torch = TorchBackend()

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """None for a CPU under Linux with a C compiler. Nothing is built for it."""
        return "its kernels run on a CPU" if device.type != "cpu" else unavailable_reason()

    def write(self, blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """See `AttentionBackend.write`. What has to be converted or quantised goes through torch."""
        if self.writer.takes(blocks, key, value):
            self.writer(blocks, key, value, slot_mapping)
        else:
            super().write(blocks, key, value, slot_mapping)

    def attend(
        self, query: torch.Tensor, blocks: KVBlocks, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        keys, values = blocks.keys, blocks.values
        types = _QUERY_TYPES.get(query.dtype), _STORED_TYPES.get(keys.dtype), _STORED_TYPES.get(values.dtype)
        if None in types or keys.shape[2] != values.shape[2]:
            return self._attend_by_torch(query, blocks, metadata, params)
        if query.stride(2) != 1:
            query = query.contiguous()
        out = torch.empty(*query.shape[:2], values.shape[3], dtype=query.dtype)
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        self.describe(self._call, query, out, blocks, metadata, params, sinks)
        self.attend_function(self._address)
        self.num_calls += 1
        return out

    def describe(
        self,
        call: AttendCall,
        query: torch.Tensor,
        out: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        params: AttentionParams,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Fills the arguments of `attend_function`; they hold until this backend is asked for anything else.

        Args:
            call: what is filled. It holds addresses only: the tensors have to live until the call.
            query: `[T, Hq, D]`, D contiguous.
            out: `[T, Hq, Dv]`, contiguous, of the query's type.
            blocks: in types that the C code has.
            metadata: of the step.
            params: of the layer.
            sinks: `[Hq]` float32, contiguous, or None.
        """
        keys, values = blocks.keys, blocks.values
        num_heads, head_dim = query.shape[1:]
        num_kv_heads, value_dim = keys.shape[2], values.shape[3]
        group_size = num_heads // num_kv_heads
        num_threads = torch.get_num_threads()
        head_bytes = head_dim * keys.element_size() + value_dim * values.element_size()
        at_once = HeadsAtOnce(
            max(1, min(_MOST_HEADS, _TILE_BYTES // (self._limits.key_tile * head_bytes))), num_threads
        )
        plan = plan_of(metadata, params.window, params.chunk, num_kv_heads, group_size, self._limits, at_once)
        scratch_size = self._scratch_sizes.get((head_dim, value_dim))
        if scratch_size is None:
            scratch_size = self._size_of_scratch(head_dim, value_dim)
            self._scratch_sizes[head_dim, value_dim] = scratch_size
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.keys, call.values = keys.data_ptr(), values.data_ptr()
        call.key_scales = None if blocks.key_scales is None else blocks.key_scales.data_ptr()
        call.value_scales = None if blocks.value_scales is None else blocks.value_scales.data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.block_table = plan.block_table.data_ptr()
        call.items, call.bundles, call.joins = plan.addresses
        call.partials = self._partials.at_least(plan.num_partial_rows * (value_dim + 2))
        call.scratch = self._scratch.at_least(num_threads * scratch_size)
        call.num_bundles, call.num_joins = len(plan.bundles) - 1, plan.joins.shape[0] * plan.joins.shape[1]
        call.num_threads, call.scratch_size = num_threads, scratch_size
        call.table_stride = plan.block_table.stride(0)
        call.token_stride, call.head_stride = query.stride(0), query.stride(1)
        call.num_kv_heads, call.group_size = num_kv_heads, group_size
        call.head_dim, call.value_dim, call.block_size = head_dim, value_dim, keys.shape[1]
        call.window, call.chunk = params.window or 0, params.chunk or 0
        call.query_type, call.key_type = _QUERY_TYPES[query.dtype], _STORED_TYPES[keys.dtype]
        call.value_type = _STORED_TYPES[values.dtype]
        call.scale, call.softcap = params.scale, params.softcap or 0.0

    def _attend_by_torch(
        self, query: torch.Tensor, blocks: KVBlocks, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        before = self._torch.num_calls
        out = self._torch.attend(query, blocks, metadata, params)
        self.num_calls += self._torch.num_calls - before
        return out

    def attend_latent(
        self,
        query_latent: torch.Tensor,
        query_rope: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend_latent`."""
        before = self._torch.num_calls
        out = self._torch.attend_latent(query_latent, query_rope, blocks, metadata, params)
        self.num_calls += self._torch.num_calls - before
        return out


class _Memory:
    """float32 memory that grows, kept between calls."""

    def __init__(self) -> None:
        self._held = torch.empty(0)

    def at_least(self, size: int) -> int:
        """The address of `size` numbers, valid until the next call."""
        if self._held.numel() < size:
            self._held = torch.empty(size, dtype=torch.float32)
        return self._held.data_ptr()
