"""Latent attention in plain torch, over the segments and tiles of torch_plan.py.

latents [S, W, R]  and rotary keys [S, W, P]      a tile is gathered once and read by all heads
scores  [S, h * Q, W]  of h heads at a time       bounded by MAX_SCORES, whatever the number of heads
out     [S, H * Q, R]                             a running softmax over tiles and the same latents as values
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.quantise import dequantise, raw_bytes
from hf_paged.kernels.torch_plan import Group, plan_of

# Gathers slots `[M]` of a layer in a dtype: latents `[M, 1, R]` and rotary keys `[M, 1, P]`, valid until the next call.
ReadSlots = Callable[[KVBlocks, torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]

MAX_SCORES = 2**24  # scores of one product: 64 MiB in float32

# Below any score, and finite: a query that sees nothing of a tile must not meet -inf - -inf.
_LOWEST_SCORE = -1e30


def read_slots(blocks: KVBlocks, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents `[M, 1, R]` and rotary keys `[M, 1, P]` at slots `[M]`, dequantised, in memory of their own."""
    return (
        _read(blocks.key_slots, blocks.key_scale_slots, slots, dtype),
        _read(blocks.value_slots, blocks.value_scale_slots, slots, dtype),
    )


def _read(rows: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    gathered = raw_bytes(rows).index_select(0, slots).view(rows.dtype)
    return dequantise(gathered, None if scales is None else scales.index_select(0, slots), dtype)


def latent_attention(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    blocks: KVBlocks,
    metadata: AttentionMetadata,
    params: AttentionParams,
    read: ReadSlots = read_slots,
) -> tuple[torch.Tensor, int]:
    """See `AttentionBackend.attend_latent`.

    Returns:
        `[T, H, R]` in the query's dtype, and the number of passes over tiles.
    """
    plan = plan_of(metadata, params.window, params.chunk)
    queries = [query_latent, query_rope]
    if plan.gather is not None:
        queries = [query.index_select(0, plan.gather) for query in queries]
    outputs = []
    # Autocast would round the scores of the online softmax to a half type.
    with torch.autocast(query_latent.device.type, enabled=False):
        begin = 0
        for group in plan.groups:
            end = begin + group.num_segments * group.num_queries
            outputs.append(_attend_group(queries[0][begin:end], queries[1][begin:end], blocks, group, params, read))
            begin = end
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    num_passes = sum(len(group.tiles) for group in plan.groups)
    return (out if plan.restore is None else out.index_select(0, plan.restore)), num_passes


def _attend_group(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    blocks: KVBlocks,
    group: Group,
    params: AttentionParams,
    read: ReadSlots,
) -> torch.Tensor:
    """query_latent `[S * Q, H, R]` and query_rope `[S * Q, H, P]` -> `[S * Q, H, R]`."""
    num_segments, num_queries, num_heads = group.num_segments, group.num_queries, query_latent.shape[1]
    dtype = torch.promote_types(query_latent.dtype, torch.float32)

    def heads_first(query: torch.Tensor) -> torch.Tensor:  # [S, H * Q, X], scaled
        grouped = query.view(num_segments, num_queries, num_heads, -1).transpose(1, 2)
        return grouped.flatten(1, 2).to(dtype).mul(params.scale)

    latent, rope = heads_first(query_latent), heads_first(query_rope)
    out = torch.zeros_like(latent)
    highest = latent.new_full((*latent.shape[:2], 1), _LOWEST_SCORE)
    total = torch.zeros_like(highest)
    if params.sinks is not None:  # a key seen by all, whose value is zero
        highest = params.sinks.to(dtype).repeat_interleave(num_queries).expand(num_segments, -1)[..., None].clone()
        total = torch.ones_like(highest)

    for tile in group.tiles:
        keys, rotary_keys = (read_.view(num_segments, -1, read_.shape[-1]) for read_ in read(blocks, tile.slots, dtype))
        heads_at_once = max(1, MAX_SCORES // (num_segments * num_queries * keys.shape[1]))
        for head in range(0, num_heads, heads_at_once):
            rows = slice(head * num_queries, min(head + heads_at_once, num_heads) * num_queries)
            scores = torch.bmm(latent[:, rows], keys.transpose(1, 2))
            scores.baddbmm_(rope[:, rows], rotary_keys.transpose(1, 2))
            if params.softcap is not None:
                scores.div_(params.softcap).tanh_().mul_(params.softcap)
            if tile.hidden is not None:
                by_head = scores.view(num_segments, -1, num_queries, scores.shape[-1])
                by_head.masked_fill_(tile.hidden[:, None], float("-inf"))
            new_highest = torch.maximum(highest[:, rows], scores.amax(dim=-1, keepdim=True))
            decay = torch.exp(highest[:, rows] - new_highest)
            weights = scores.sub_(new_highest).exp_()
            total[:, rows] = total[:, rows] * decay + weights.sum(dim=-1, keepdim=True)
            out[:, rows] = torch.baddbmm(out[:, rows].mul_(decay), weights, keys)
            highest[:, rows] = new_highest
    grouped = out.div_(total).to(query_latent.dtype).view(num_segments, num_heads, num_queries, -1)
    return grouped.transpose(1, 2).reshape(query_latent.shape)
