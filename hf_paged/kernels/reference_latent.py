"""Latent attention in float64, one sequence at a time, in the most obvious way: the oracle of `attend_latent`."""

from __future__ import annotations

import torch

from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.quantise import dequantise, raw_bytes


def reference_latent_attention(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    blocks: KVBlocks,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> torch.Tensor:
    """See `AttentionBackend.attend_latent`."""
    out = torch.empty_like(query_latent)
    start = 0
    for row, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        table = metadata.block_table[row]
        for token in range(query_len):
            position = kv_len - query_len + token
            positions = _seen(position, params).to(query_latent.device)
            slots = table[positions // metadata.block_size].long() * metadata.block_size
            slots += positions % metadata.block_size
            latents = _stored(blocks.key_slots, blocks.key_scale_slots, slots)
            rotary_keys = _stored(blocks.value_slots, blocks.value_scale_slots, slots)
            at = start + token
            scores = query_latent[at].double() @ latents.T + query_rope[at].double() @ rotary_keys.T
            weights = _softmax(scores * params.scale, params)
            out[at] = (weights @ latents).to(out.dtype)
        start += query_len
    return out


def _seen(position: int, params: AttentionParams) -> torch.Tensor:
    first = 0
    if params.window is not None:
        first = max(first, position + 1 - params.window)
    if params.chunk is not None:
        first = max(first, position // params.chunk * params.chunk)
    return torch.arange(first, position + 1)


def _stored(rows: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    stored = raw_bytes(rows)[slots].view(rows.dtype)
    return dequantise(stored, None if scales is None else scales[slots], torch.float64)[:, 0]


def _softmax(scores: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Scores `[H, L]` -> weights `[H, L]`."""
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if params.sinks is None:
        return scores.softmax(dim=-1)
    return torch.cat([scores, params.sinks.double()[:, None]], dim=-1).softmax(dim=-1)[:, :-1]
