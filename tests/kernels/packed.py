"""Packed batches over a scattered, poisoned cache.

Every slot that no query may read is NaN: block 0 (which freed table entries point at), the tails of last blocks, blocks
that nobody owns, and, with a window or a chunk, the keys that lie before the first one seen. Where K or V are
quantised, so are their scales, which is what poisons int8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_paged.kernels.backend import AttentionBackend
from hf_paged.kernels.kv_blocks import QUANTISED_DTYPES, KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.quantise import dequantise, quantise, raw_bytes


@dataclass
class Packed:
    """A step, and the dense K and V that its cache was filled from."""

    query: torch.Tensor  # [T, Hq, D]
    blocks: KVBlocks
    metadata: AttentionMetadata
    params: AttentionParams
    keys: list[torch.Tensor]  # [L, Hkv, D] of each sequence; what its blocks hold, dequantised
    values: list[torch.Tensor]  # [L, Hkv, Dv]

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        """What a backend makes of it, with the plans of other backends forgotten."""
        self.metadata.plans.clear()
        return backend.attend(self.query, self.blocks, self.metadata, self.params)

    def tokens_of(self, sequence: int) -> slice:
        """Where a sequence's queries are in the batch."""
        start = sum(self.metadata.query_lens[:sequence])
        return slice(start, start + self.metadata.query_lens[sequence])


def pack(
    lengths: list[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    group_size: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    key_dtype: torch.dtype | None = None,
    value_dtype: torch.dtype | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
    seed: int = 0,
) -> Packed:
    """A batch of sequences with (queries, keys) as many as `lengths` says."""
    random = torch.Generator().manual_seed(seed)
    value_dim = value_dim or head_dim
    num_heads = num_kv_heads * group_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    block_counts = [-(-keys // block_size) for _, keys in lengths]
    num_blocks = 1 + sum(block_counts) + 5
    key_cache = PoisonedCache((num_blocks, block_size, num_kv_heads, head_dim), key_dtype or dtype)
    value_cache = PoisonedCache((num_blocks, block_size, num_kv_heads, value_dim), value_dtype or dtype)
    ids = (1 + torch.randperm(num_blocks - 1, generator=random)).tolist()
    block_table = torch.zeros(len(lengths), max(block_counts) + 2, dtype=torch.int32)
    all_keys, all_values = [], []
    for row, (num_queries, num_keys) in enumerate(lengths):
        keys = normal(num_keys, num_kv_heads, head_dim)
        values = normal(num_keys, num_kv_heads, value_dim)
        first_query = num_keys - num_queries
        first_seen = max(
            0 if window is None else first_query - window + 1, 0 if chunk is None else first_query // chunk * chunk, 0
        )
        for logical in range(first_seen // block_size, block_counts[row]):
            block_table[row, logical] = ids.pop()
        positions = torch.arange(first_seen, num_keys)
        slots = block_table[row, positions // block_size].long() * block_size + positions % block_size
        all_keys.append(key_cache.fill(slots, keys))
        all_values.append(value_cache.fill(slots, values))

    query_lens, kv_lens = (tuple(column) for column in zip(*lengths, strict=True))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),  # for writing, which has happened
        block_size=block_size,
        query_lens=query_lens,
        kv_lens=kv_lens,
    )
    # As it comes from a model: heads first in memory.
    query = normal(num_heads, sum(query_lens), head_dim).to(dtype).transpose(0, 1)
    sinks = normal(num_heads).to(dtype) if with_sinks else None
    params = AttentionParams(head_dim**-0.5, window=window, chunk=chunk, softcap=softcap, sinks=sinks)
    blocks = KVBlocks(key_cache.stored, value_cache.stored, key_cache.scales, value_cache.scales)
    return Packed(query, blocks, metadata, params, all_keys, all_values)


class PoisonedCache:
    """K or V of one layer `[num_blocks, block_size, H, D]`, NaN where nothing was filled in."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.stored = torch.empty(shape, dtype=dtype)
        self.scales: torch.Tensor | None = None
        if dtype in QUANTISED_DTYPES:
            raw_bytes(self.stored).fill_(0x7F)  # NaN in float8_e4m3fn
            self.scales = torch.full(shape[:3], float("nan"))
        else:
            self.stored.fill_(float("nan"))

    def fill(self, slots: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Puts the last tokens of new `[L, H, D]` into as many slots; returns all of it as it is stored."""
        stored, scales = new.to(self.stored.dtype), None
        if self.scales is not None:
            stored, scales = quantise(new, self.stored.dtype)
            self.scales.flatten(0, 1)[slots] = scales[len(new) - len(slots) :]
        raw_bytes(self.stored).flatten(0, 1)[slots] = raw_bytes(stored)[len(new) - len(slots) :]
        return stored if scales is None else dequantise(stored, scales, torch.float64)


def dense_attention(packed: Packed) -> torch.Tensor:
    """The same step from dense tensors padded to the longest sequence, in float64: independent of any block table."""
    metadata, params = packed.metadata, packed.params
    num_heads, num_kv_heads = packed.query.shape[1], packed.blocks.keys.shape[2]
    sequences = range(len(metadata.kv_lens))
    query = torch.zeros(len(sequences), num_heads, max(metadata.query_lens), packed.query.shape[2]).double()
    for s in sequences:
        query[s, :, : metadata.query_lens[s]] = packed.query[packed.tokens_of(s)].double().transpose(0, 1)
    keys = torch.nn.utils.rnn.pad_sequence([k.double() for k in packed.keys], batch_first=True).transpose(1, 2)
    values = torch.nn.utils.rnn.pad_sequence([v.double() for v in packed.values], batch_first=True).transpose(1, 2)
    head_of = [head * num_kv_heads // num_heads for head in range(num_heads)]
    scores = query @ keys[:, head_of].transpose(2, 3) * params.scale
    if params.softcap:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    weights = scores.exp()
    seen = torch.zeros(len(sequences), *scores.shape[2:])
    for s in sequences:
        for i in range(metadata.query_lens[s]):
            position = metadata.kv_lens[s] - metadata.query_lens[s] + i
            first = 0
            if params.window:
                first = max(first, position + 1 - params.window)
            if params.chunk:
                first = max(first, position - position % params.chunk)
            seen[s, i, first : position + 1] = 1
    weights = weights * seen[:, None]
    total = weights.sum(-1, keepdim=True)
    if params.sinks is not None:
        total = total + params.sinks.double().exp().view(1, -1, 1, 1)
    out = weights @ values[:, head_of] / total
    flat = [out[s, :, : metadata.query_lens[s]].transpose(0, 1) for s in sequences]
    return torch.cat(flat).to(packed.query.dtype)


def decodes(kv_lens: list[int]) -> list[tuple[int, int]]:
    """Lengths of a batch that decodes one token a sequence."""
    return [(1, kv_len) for kv_len in kv_lens]


def with_params(packed: Packed, **changes: object) -> Packed:
    """The same step with other attention parameters."""
    return replace(packed, params=replace(packed.params, **changes))  # type: ignore[arg-type]
