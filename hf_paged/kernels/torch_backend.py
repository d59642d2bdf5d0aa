"""Paged attention in plain torch, for CPU and GPU: groups of alike sequences, bounded tiles, fused attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from hf_paged.kernels.backend import AttentionBackend
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.quantise import E4M3_HALF_FACTOR, e4m3_as_half, raw_bytes
from hf_paged.kernels.torch_latent import latent_attention
from hf_paged.kernels.torch_plan import Group, plan_of

# Below any score, and finite: a query that sees nothing of a tile must not meet -inf - -inf.
LOWEST_SCORE = -1e30

MAX_HELD_BYTES = 256 * 2**20  # larger gather buffers are not kept


class TorchBackend(AttentionBackend):
    """The default where no better kernel can run. `torch_plan.py` has the picture.

    A group whose keys fit into one tile is one `scaled_dot_product_attention`, with the query heads of a kv head folded
    into the query dimension, so that K and V are never repeated. Longer ones, softcap and sinks take an online softmax
    over the tiles, in float32 for half types.
    """

    name = "torch"
    auto_priority = 0

    def __init__(self) -> None:
        super().__init__()
        self._key_buffer = _GatherBuffer()
        self._value_buffer = _GatherBuffer()

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """None: torch runs everywhere, except where there are no values."""
        return "meta tensors hold no values" if device.type == "meta" else None

    def attend(
        self,
        query: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        plan = plan_of(metadata, params.window, params.chunk)
        queries = query if plan.gather is None else query.index_select(0, plan.gather)
        outputs = []
        # Autocast would round the scores of the online softmax to a half type.
        with torch.autocast(query.device.type, enabled=False):
            begin = 0
            for group in plan.groups:
                end = begin + group.num_segments * group.num_queries
                outputs.append(self._attend_group(queries[begin:end], blocks, group, params))
                begin = end
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if plan.restore is None else out.index_select(0, plan.restore)

    def _attend_group(
        self,
        query: torch.Tensor,
        blocks: KVBlocks,
        group: Group,
        params: AttentionParams,
    ) -> torch.Tensor:
        """query `[S * Q, Hq, D]` -> `[S * Q, Hq, Dv]`."""
        num_kv_heads = blocks.keys.shape[2]
        shape = (group.num_segments, group.num_queries, num_kv_heads, query.shape[1] // num_kv_heads, query.shape[2])
        grouped = query.view(shape).permute(0, 2, 3, 1, 4)  # [S, Hkv, G, Q, D]
        if len(group.tiles) == 1 and params.softcap is None and params.sinks is None:
            out = self._attend_fused(grouped, blocks, group, params.scale)
        else:
            out = self._attend_tiles(grouped, blocks, group, params)
        return out.permute(0, 3, 1, 2, 4).reshape(query.shape[0], query.shape[1], blocks.values.shape[-1])

    def _attend_fused(self, query: torch.Tensor, blocks: KVBlocks, group: Group, scale: float) -> torch.Tensor:
        """One call over the only tile: query `[S, Hkv, G, Q, D]` -> `[S, Hkv, G, Q, Dv]`."""
        self.num_calls += 1
        (tile,) = group.tiles
        num_segments, num_kv_heads, group_size = query.shape[:3]
        key = self._key_buffer.gather(blocks.key_slots, blocks.key_scale_slots, tile.slots, query.dtype)
        value = self._value_buffer.gather(blocks.value_slots, blocks.value_scale_slots, tile.slots, query.dtype)
        key = key.view(num_segments, -1, *key.shape[1:]).transpose(1, 2)  # [S, Hkv, W, D]
        value = value.view(num_segments, -1, *value.shape[1:]).transpose(1, 2)
        if group.is_causal:
            # Half of the scores are never computed, which is worth a copy of K and V per query head.
            if group_size > 1:
                key, value = key.repeat_interleave(group_size, dim=1), value.repeat_interleave(group_size, dim=1)
            out = F.scaled_dot_product_attention(query.flatten(1, 2), key, value, is_causal=True, scale=scale)
            return out.view(out.shape[0], num_kv_heads, group_size, *out.shape[2:])
        bias = tile.bias(group_size, query.dtype)
        out = F.scaled_dot_product_attention(query.flatten(2, 3), key, value, attn_mask=bias, scale=scale)
        return _unfold(out, group_size)

    def _attend_tiles(
        self,
        query: torch.Tensor,
        blocks: KVBlocks,
        group: Group,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Tile by tile with a running softmax: query `[S, Hkv, G, Q, D]` -> `[S, Hkv, G, Q, Dv]`."""
        num_segments, num_kv_heads, group_size, num_queries, _ = query.shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        scaled = query.flatten(2, 3).to(dtype) * params.scale  # [S, Hkv, G * Q, D]
        if params.sinks is not None:  # a key seen by all, whose value is zero
            sinks = params.sinks.to(dtype).view(1, num_kv_heads, group_size, 1, 1)
            highest = sinks.expand(num_segments, -1, -1, num_queries, -1).flatten(2, 3)  # [S, Hkv, G * Q, 1]
            total = torch.ones_like(highest)
        else:
            highest = scaled.new_full((*scaled.shape[:3], 1), LOWEST_SCORE)
            total = torch.zeros_like(highest)
        out = scaled.new_zeros(*scaled.shape[:3], blocks.values.shape[-1])

        for tile in group.tiles:
            self.num_calls += 1
            rows = tile.head_rows(num_kv_heads, num_segments)
            key = self._key_buffer.gather(*_by_head(blocks.keys, blocks.key_scales), rows, dtype)
            value = self._value_buffer.gather(*_by_head(blocks.values, blocks.value_scales), rows, dtype)
            key = key.view(num_segments, num_kv_heads, -1, key.shape[-1])
            value = value.view(num_segments, num_kv_heads, -1, value.shape[-1])
            scores = scaled @ key.transpose(2, 3)
            if params.softcap is not None:
                scores = scores.div_(params.softcap).tanh_().mul_(params.softcap)
            if tile.hidden is not None:
                _unfold(scores, group_size).masked_fill_(tile.hidden[:, None, None], float("-inf"))
            new_highest = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
            decay = torch.exp(highest - new_highest)
            weights = scores.sub_(new_highest).exp_()
            total = total.mul_(decay).add_(weights.sum(dim=-1, keepdim=True))
            out = out.mul_(decay).add_(weights @ value)
            highest = new_highest
        return _unfold(out.div_(total).to(query.dtype), group_size)

    def attend_latent(
        self,
        query_latent: torch.Tensor,
        query_rope: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend_latent`."""
        out, num_passes = latent_attention(query_latent, query_rope, blocks, metadata, params, self._read_latents)
        self.num_calls += num_passes
        return out

    def _read_latents(
        self, blocks: KVBlocks, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self._key_buffer.gather(blocks.key_slots, blocks.key_scale_slots, slots, dtype),
            self._value_buffer.gather(blocks.value_slots, blocks.value_scale_slots, slots, dtype),
        )


def _unfold(folded: torch.Tensor, group_size: int) -> torch.Tensor:
    """`[S, Hkv, G * Q, X]` -> `[S, Hkv, G, Q, X]`, a view."""
    return folded.view(*folded.shape[:2], group_size, -1, folded.shape[3])


def _by_head(blocks: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`[num_blocks, block_size, H, D]` and its scales as `[num_slots * H, D]` and `[num_slots * H]`, views."""
    return blocks.view(-1, blocks.shape[3]), None if scales is None else scales.view(-1)


class _GatherBuffer:
    """Memory that gathered tiles go to, kept between calls.

    On a CPU a fresh tile of some MB costs more in page faults than the attention over it. GPU allocators keep freed
    memory anyway, and there nothing is held.
    """

    def __init__(self) -> None:
        self._held: dict[torch.dtype, torch.Tensor] = {}

    def gather(
        self, rows: torch.Tensor, scales: torch.Tensor | None, index: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """rows `[N, ..., D]`, scales `[N, ...]` or None, index `[M]` -> `[M, ..., D]`, valid until the next call."""
        if scales is not None:
            raw = self._gather(raw_bytes(rows), index, torch.uint8)
            factors = scales.index_select(0, index).unsqueeze(-1)
            if raw.device.type != "cpu":
                return raw.view(rows.dtype).to(dtype).mul_(factors)
            stored = raw.view(rows.dtype)
            if rows.dtype == torch.float8_e4m3fn:
                stored = e4m3_as_half(raw, self._empty(raw.shape, torch.int16))
                factors *= E4M3_HALF_FACTOR
            return self._empty(raw.shape, dtype).copy_(stored).mul_(factors)
        return self._gather(rows, index, dtype)

    def _gather(self, rows: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if rows.device.type != "cpu":
            return rows.index_select(0, index).to(dtype)
        shape = (index.shape[0], *rows.shape[1:])
        gathered = torch.index_select(rows, 0, index, out=self._empty(shape, rows.dtype))
        return gathered if dtype == rows.dtype else self._empty(shape, dtype).copy_(gathered)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape)
        held = self._held.get(dtype)
        if held is None or held.numel() < size:
            if size * dtype.itemsize > MAX_HELD_BYTES:
                return torch.empty(shape, dtype=dtype)
            with torch.inference_mode(False):  # a tensor born in inference mode can't be written to outside of it
                held = self._held[dtype] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)
