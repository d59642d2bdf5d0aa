"""The oracle: paged attention in float64, one sequence at a time, in the most obvious way."""

from __future__ import annotations

import torch

from hf_paged.kernels.backend import AttentionBackend
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.quantise import dequantise, raw_bytes
from hf_paged.kernels.reference_latent import reference_latent_attention


class ReferenceBackend(AttentionBackend):
    """What the other backends are tested against. Slow, and never chosen by "auto"."""

    name = "reference"

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """None wherever there is float64."""
        return "it computes in float64, which mps doesn't have" if device.type == "mps" else None

    def attend(
        self,
        query: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        out = query.new_empty(query.shape[0], query.shape[1], blocks.values.shape[-1])
        start = 0
        for row, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
            end = start + query_len
            if query_len:
                query_positions = torch.arange(kv_len - query_len, kv_len, device=query.device)
                table = metadata.block_table[row]
                out[start:end] = self._attend_one(query[start:end], query_positions, blocks, table, params)
            start = end
        return out

    def _attend_one(
        self,
        query: torch.Tensor,
        query_positions: torch.Tensor,
        blocks: KVBlocks,
        block_table: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """One sequence: query `[n, Hq, D]` at query_positions `[n]`, block_table `[max_blocks]` -> `[n, Hq, Dv]`."""
        self.num_calls += 1
        block_size, num_kv_heads = blocks.keys.shape[1:3]
        group_size = query.shape[1] // num_kv_heads

        key_positions = torch.arange(int(query_positions[-1]) + 1, device=query.device)
        visible = see(query_positions[:, None], key_positions[None, :], params)
        key_positions = key_positions[visible.any(dim=0)]  # what no query sees is not even read
        visible = see(query_positions[:, None], key_positions[None, :], params)

        slots = block_table[key_positions // block_size].long() * block_size + key_positions % block_size
        key = _gather(blocks.key_slots, blocks.key_scale_slots, slots).repeat_interleave(group_size, dim=1)
        value = _gather(blocks.value_slots, blocks.value_scale_slots, slots).repeat_interleave(group_size, dim=1)

        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if params.sinks is not None:
            sinks = params.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            probabilities = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            probabilities = scores.softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", probabilities, value).to(query.dtype)

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
        return reference_latent_attention(query_latent, query_rope, blocks, metadata, params)


def _gather(rows: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    """rows `[num_slots, H, D]` of any storage type at slots `[L]` -> `[L, H, D]` float64."""
    gathered = raw_bytes(rows)[slots].view(rows.dtype)
    return dequantise(gathered, None if scales is None else scales[slots], torch.float64)


def see(query_positions: torch.Tensor, key_positions: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Whether a query at one position sees a key at another, elementwise with broadcasting."""
    visible = key_positions <= query_positions
    if params.window is not None:
        visible &= key_positions > query_positions - params.window
    if params.chunk is not None:
        visible &= key_positions // params.chunk == query_positions // params.chunk
    return visible
