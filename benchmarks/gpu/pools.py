"""Large pools of random K and V on the device, and packed steps over scattered blocks of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.part import Setting
from hf_paged.kernels.kv_blocks import QUANTISED_DTYPES, KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata

CHUNK = 2**18  # tokens filled at a time


@dataclass(frozen=True)
class Heads:
    """The attention shape of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA = Heads("Llama-3-8B", 32, 8, 128)
QWEN = Heads("Qwen3-0.6B", 16, 8, 128)
SMALL = Heads("small", 4, 2, 16)  # for smoke


class Pool:
    """K and V of many tokens, to be seen as blocks of any size.

    Args:
        num_tokens: a multiple of the largest block size.
        num_kv_heads: heads of K and of V.
        head_dim: of both.
        dtype: storage type, floating; a quantised one has a scale a token and head, all 1.
        device: where.
    """

    def __init__(
        self, num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_tokens = num_tokens
        self.dtype = dtype
        shape = (num_tokens, num_kv_heads, head_dim)
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        for tensor in (self.keys, self.values):
            for begin in range(0, num_tokens, CHUNK):
                part = tensor[begin : begin + CHUNK]
                part.copy_(torch.randn(part.shape, device=device))
        self.key_scales = self.value_scales = None
        if dtype in QUANTISED_DTYPES:
            self.key_scales, self.value_scales = (torch.ones(shape[:2], device=device) for _ in range(2))

    @property
    def bytes_per_token(self) -> int:
        """K, V and their scales."""
        tensors = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(tensor.nbytes // self.num_tokens for tensor in tensors if tensor is not None)

    def blocks(self, block_size: int) -> KVBlocks:
        """The same memory as blocks."""

        def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.unflatten(0, (-1, block_size))

        keys, values = self.keys.unflatten(0, (-1, block_size)), self.values.unflatten(0, (-1, block_size))
        return KVBlocks(keys, values, cut(self.key_scales), cut(self.value_scales))


class Pools:
    """One pool a dtype, made when first asked for, as large as asked for or as memory allows."""

    def __init__(self, num_tokens: int, heads: Heads, setting: Setting) -> None:
        self._num_tokens = num_tokens
        self._heads = heads
        self._setting = setting
        self._pools: dict[torch.dtype, Pool] = {}

    def get(self, dtype: torch.dtype) -> Pool:
        """The pool of a dtype."""
        if dtype not in self._pools:
            num_tokens = self._num_tokens
            if self._setting.device.type == "cuda":
                free = torch.cuda.mem_get_info(self._setting.device)[0]
                per_token = 2 * self._heads.num_kv_heads * (self._heads.head_dim * dtype.itemsize + 4)
                num_tokens = min(num_tokens, int(0.75 * free / per_token) // 256 * 256)
            self._pools[dtype] = Pool(
                num_tokens, self._heads.num_kv_heads, self._heads.head_dim, dtype, self._setting.device
            )
        return self._pools[dtype]


def scattered_steps(
    num_steps: int, batch: int, num_queries: int, context: int, block_size: int, pool: Pool
) -> list[AttentionMetadata]:
    """Steps of `batch` sequences over `context` keys each; their blocks are drawn at random from the whole pool.

    Raises:
        ValueError: one step alone has more tokens than the pool.
    """
    device = pool.keys.device
    per_sequence = -(-context // block_size)
    num_blocks = pool.num_tokens // block_size
    if batch * per_sequence > num_blocks:
        raise ValueError(f"{batch} x {context} tokens don't fit into a pool of {pool.num_tokens}")
    ids = torch.randperm(num_blocks, device=device).int()
    num_steps = min(num_steps, num_blocks // (batch * per_sequence))
    tables = ids[: num_steps * batch * per_sequence].view(num_steps, batch, per_sequence)
    return [
        AttentionMetadata(
            query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device) * num_queries,
            seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
            block_table=table.contiguous(),
            slot_mapping=torch.zeros(batch * num_queries, dtype=torch.int64, device=device),
            block_size=block_size,
            query_lens=(num_queries,) * batch,
            kv_lens=(context,) * batch,
        )
        for table in tables
    ]


def random_query(num_tokens: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[T, Hq, D]`, laid out as it comes from a model: heads first in memory."""
    shape = (heads.num_heads, num_tokens, heads.head_dim)
    return torch.randn(shape, device=device).to(dtype).transpose(0, 1)
