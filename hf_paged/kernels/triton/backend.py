"""TritonBackend: the kernels of this folder behind the interface of all backends."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hf_paged.errors import PagedError
from hf_paged.kernels.backend import AttentionBackend
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.triton.step_shape import step_shape

_OLDEST_TRITON = (3, 6)


class TritonBackend(AttentionBackend):
    """Kernels for CUDA and ROCm; on a CPU under Triton's interpreter (TRITON_INTERPRET=1), to test them."""

    name = "triton"
    auto_priority = 20
    auto_device_types = ("cuda",)

    def __init__(self) -> None:
        super().__init__()
        # Only now: they import triton.
        from hf_paged.kernels.triton import copy, decode, latent, prefill, write

        self._decode, self._prefill, self._latent = decode, prefill, latent
        self._write, self._copy = write, copy

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """None on a GPU with triton installed, and on a CPU under the interpreter."""
        if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
            return "Triton's kernels need a CUDA or ROCm device"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        import triton  # only where it can run: this takes a second

        if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _OLDEST_TRITON:
            return f"triton {triton.__version__} is too old for its kernels, which need 3.6"
        return None

    def attend(
        self, query: torch.Tensor, blocks: KVBlocks, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`; for float32, float16 and bfloat16 queries."""
        if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise PagedError(
                f"The triton backend computes float32, float16 and bfloat16, not {query.dtype}; "
                "choose PagedConfig(attention_backend='torch')."
            )
        if query.stride(2) != 1:
            query = query.contiguous()
        shape = step_shape(metadata)
        out = query.new_empty(query.shape[0], query.shape[1], blocks.values.shape[3])
        self.num_calls += (shape.max_decode_queries > 0) + shape.has_prefill
        with _current(query.device):
            if shape.max_decode_queries:
                self._decode.attend_decode(
                    out, query, blocks, metadata, params, shape.max_decode_queries, shape.max_decode_keys
                )
            if shape.has_prefill:
                self._prefill.attend_prefill(out, query, blocks, metadata, params)
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
        self.num_calls += 1
        with _current(query_latent.device):
            return self._latent.attend_latent(query_latent, query_rope, blocks, metadata, params)

    def write(self, blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """See `AttentionBackend.write`."""
        with _current(key.device):
            self._write.write_slots(blocks, key, value, slot_mapping)

    def copy_blocks(self, layers: Sequence[KVBlocks], copies: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend.copy_blocks`."""
        self._copy.copy_blocks(layers, copies)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be a layer's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
