"""write.c behind tensors."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from hf_paged.kernels.cpu.build import load_library
from hf_paged.kernels.kv_blocks import KVBlocks

SOURCE = Path(__file__).with_name("write.c")


class WriteCall(ctypes.Structure):
    """`Write` of write.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys_from", "keys_to", "values_from", "values_to", "slots")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("tokens", "heads"),
                *("key_bytes", "key_token_stride", "key_head_stride"),
                *("value_bytes", "value_token_stride", "value_head_stride"),
                "num_threads",
            )
        ),
    )


class Writer:
    """Copies new tokens into their slots. Not for several threads at once: the C arguments are kept.

    Raises:
        ConfigError: write.c can't be built or loaded here; the message is why.
    """

    def __init__(self) -> None:
        self.function = load_library(SOURCE).hf_paged_write  # takes the address of a WriteCall
        self.function.argtypes, self.function.restype = [ctypes.c_void_p], None
        self._call = WriteCall()
        self._address = ctypes.addressof(self._call)

    @staticmethod
    def takes(blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether nothing has to be converted: the pool holds the types that the new tokens have."""
        return (
            not blocks.is_quantised
            and key.dtype is blocks.keys.dtype
            and value.dtype is blocks.values.dtype
            and key.shape[1] == value.shape[1]
            and key.stride(2) == value.stride(2) == 1
            and blocks.keys.is_contiguous()
            and blocks.values.is_contiguous()
        )

    def __call__(self, blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores key `[T, H, D]` and value `[T, H, Dv]` at slot_mapping `[T]` int64, contiguous and in range."""
        self.describe(self._call, blocks, key, value, slot_mapping)
        self.function(self._address)

    @staticmethod
    def describe(
        call: WriteCall, blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Fills the arguments of `function` for what `takes` takes. They are addresses: the tensors have to live on."""
        size, value_size = key.element_size(), value.element_size()
        call.keys_from, call.keys_to = key.data_ptr(), blocks.keys.data_ptr()
        call.values_from, call.values_to = value.data_ptr(), blocks.values.data_ptr()
        call.slots = slot_mapping.data_ptr()
        call.tokens, call.heads, call.key_bytes = key.shape[0], key.shape[1], key.shape[2] * size
        call.value_bytes = value.shape[2] * value_size
        call.key_token_stride, call.key_head_stride = key.stride(0) * size, key.stride(1) * size
        call.value_token_stride, call.value_head_stride = value.stride(0) * value_size, value.stride(1) * value_size
        call.num_threads = torch.get_num_threads()
