"""How the torch backend cuts a packed step: into segments, groups of alike segments, and tiles of keys.

    sequence          queries          keys                   group 1: decodes of alike length      S = 3, Q = 1
      a   decode      1                0 ........ 300           a   tile 0 | tile 1 of at most KV_TILE keys each
      b   decode      1                0 ......... 350          b   tile 0 | tile 1
      c   decode      1                0 .. 20                  d   tile 0 | tile 1
      d   decode      1                0 ........ 290         group 2: c                            S = 1, Q = 1
      e   prefill     700              0 ... 700              group 3: e's first QUERY_TILE queries S = 1, Q = 512
                                                              group 4: the rest of them             S = 1, Q = 188

A segment is a run of at most QUERY_TILE queries of one sequence, with the range of keys that any of them sees. Keys
that lie behind the window of all of them are not part of it. Segments of a group are padded to its longest, and each
group is one attention call a tile. So calls follow the lengths in the batch, not the number of sequences.

A plan depends on the metadata, the window and the chunk only, so that all layers of a step that share them share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.spans import first_visible

KV_TILE = 512  # most keys of one sequence gathered at a time
QUERY_TILE = 512  # most queries of one sequence in a call
MAX_GROUP_QUERIES = 2048  # most queries in a call, beyond one a sequence: bounds scores and masks
SHORT_QUERIES = 16  # from 2 up to this many queries are one class: padding them costs less than another call
# A group may hold this much padding of keys, whichever is most:
MAX_PADDING = 0.25  # as a share of its real keys
SEGMENT_PADDING = 16  # keys a segment
FREE_PADDING = 256  # keys in all: they cost less than another call
WIDTH_MULTIPLE = 8  # masked tiles have such a width: fused kernels want aligned mask rows

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tile:
    """Some keys of every segment of a group: S segments, W keys each."""

    slots: torch.Tensor  # [S * W] int64: where they are in the cache
    hidden: torch.Tensor | None  # [S or 1, Q, W] bool: keys a query doesn't see; None: every query sees all
    _derived: dict[object, torch.Tensor] = field(default_factory=dict)

    def head_rows(self, num_kv_heads: int, num_segments: int) -> torch.Tensor:
        """Rows of the cache seen as `[num_slots * Hkv, D]` that gather to `[S, Hkv, W, D]`. Shape `[S * Hkv * W]`."""
        rows = self._derived.get(num_kv_heads)
        if rows is None:
            heads = torch.arange(num_kv_heads, device=self.slots.device)
            rows = (self.slots.view(num_segments, 1, -1) * num_kv_heads + heads[:, None]).flatten()
            self._derived[num_kv_heads] = rows
        return rows

    def bias(self, group_size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """`hidden` as what is added to scores, 0 or -inf, `[S, 1, G * Q, W]`, for queries laid out as (G, Q)."""
        if self.hidden is None:
            return None
        num_segments, num_queries, width = self.hidden.shape
        key = (group_size if num_queries > 1 else 1, dtype)
        bias = self._derived.get(key)
        if bias is None:
            bias = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
            bias = bias.masked_fill_(self.hidden, float("-inf"))[:, None, None]
            bias = bias.expand(-1, -1, key[0], -1, -1).reshape(num_segments, 1, key[0] * num_queries, width)
            self._derived[key] = bias
        return bias if num_queries > 1 else bias.expand(-1, -1, group_size, -1)


@dataclass(frozen=True, eq=False)
class Group:
    """Segments that are attended together, padded to Q queries and to the same number of keys."""

    num_segments: int  # S
    num_queries: int  # Q
    is_causal: bool  # query i sees keys 0 to i of the only tile
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """All groups of a step."""

    groups: tuple[Group, ...]
    gather: torch.Tensor | None  # [sum of S * Q] int64: the token of each query of each group; None: tokens in order
    restore: torch.Tensor | None  # [T] int64: where each token's result is among them; None: in order


@dataclass(frozen=True, eq=False)
class _Segments:
    """Host arrays, one entry a segment."""

    row: IntArray  # sequence, a row of the block table
    token: IntArray  # first query in the packed batch
    num_queries: IntArray
    position: IntArray  # of the first query
    first_key: IntArray  # position of the first key that any query of the segment sees
    num_keys: IntArray  # from there to the last query's own

    def take(self, index: IntArray) -> _Segments:
        return _Segments(*(array[index] for array in self._arrays()))

    def stacked(self) -> IntArray:
        return np.stack(self._arrays())

    def _arrays(self) -> tuple[IntArray, ...]:
        return self.row, self.token, self.num_queries, self.position, self.first_key, self.num_keys


def plan_of(metadata: AttentionMetadata, window: int | None, chunk: int | None) -> Plan:
    """The plan of a step for layers of a window and a chunk, made by the first layer that asks."""
    key = ("torch", window, chunk)
    plan = metadata.plans.get(key)
    if not isinstance(plan, Plan):
        plan = metadata.plans[key] = _make_plan(metadata, window, chunk)
    return plan


def _make_plan(metadata: AttentionMetadata, window: int | None, chunk: int | None) -> Plan:
    segments = _cut(metadata, window, chunk)
    members = [segments.take(index) for index in _group(segments)]
    gather, restore = _token_order(members, sum(metadata.query_lens))

    # Everything the device needs goes over in one copy.
    host = [member.stacked() for member in members]
    index_size = 0 if gather is None else gather.size
    flat = np.concatenate([array.ravel() for array in (gather, restore, *host) if array is not None])
    device_flat = torch.from_numpy(flat).to(metadata.block_table.device, non_blocking=True)
    sizes = [array.size for array in (gather, restore) if array is not None] + [array.size for array in host]
    parts = list(torch.split(device_flat, sizes))
    gather_tensor, restore_tensor = (parts.pop(0), parts.pop(0)) if index_size else (None, None)

    groups = tuple(
        _make_group(member, part.view(6, -1), metadata, window, chunk)
        for member, part in zip(members, parts, strict=True)
    )
    return Plan(groups, gather_tensor, restore_tensor)


def _cut(metadata: AttentionMetadata, window: int | None, chunk: int | None) -> _Segments:
    query_lens = np.array(metadata.query_lens, dtype=np.int64)
    kv_lens = np.array(metadata.kv_lens, dtype=np.int64)
    counts = -(-query_lens // QUERY_TILE)
    row = np.repeat(np.arange(len(query_lens)), counts)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * QUERY_TILE

    token = (np.cumsum(query_lens) - query_lens)[row] + offset
    num_queries = np.minimum(query_lens[row] - offset, QUERY_TILE)
    position = (kv_lens - query_lens)[row] + offset
    first_key = first_visible(position, window, chunk)
    return _Segments(row, token, num_queries, position, first_key, position + num_queries - first_key)


def _group(segments: _Segments) -> Iterator[IntArray]:
    """Yields the segments of each group, in their order in the batch."""
    num_queries = segments.num_queries
    query_class = np.ceil(np.log2(np.maximum(num_queries, SHORT_QUERIES))).astype(np.int64) * (num_queries > 1)
    order = np.lexsort((-segments.num_keys, query_class))  # decodes first, the longest of a class first
    columns = (query_class, num_queries, segments.num_keys)
    rows = zip(*(column[order].tolist() for column in columns), strict=True)  # host: numpy arrays
    begin = group_class = longest = widest = num_keys = 0
    for end, (cls, queries, keys) in enumerate(rows):
        size = end + 1 - begin
        num_keys, widest = num_keys + keys, max(widest, queries)
        padding = longest * size - num_keys
        is_alike = cls == group_class and padding <= max(MAX_PADDING * num_keys, SEGMENT_PADDING * size, FREE_PADDING)
        if size == 1 or not is_alike or (cls and widest * size > MAX_GROUP_QUERIES):
            if size > 1:
                yield np.sort(order[begin:end])
            begin, group_class, longest, widest, num_keys = end, cls, keys, queries, keys
    yield np.sort(order[begin:])


def _token_order(members: list[_Segments], num_tokens: int) -> tuple[IntArray | None, IntArray | None]:
    """Which token each padded query of each group is, and where each token went. None, None: tokens in order."""
    gather: list[IntArray] = []
    restore = np.empty(num_tokens, dtype=np.int64)
    base = 0
    for member in members:
        steps = np.arange(member.num_queries.max())
        # Padding repeats a segment's last query: it sees keys, so it can't become NaN, and is dropped afterwards.
        tokens = member.token[:, None] + np.minimum(steps, member.num_queries[:, None] - 1)
        is_real = steps < member.num_queries[:, None]
        restore[tokens[is_real]] = base + np.flatnonzero(is_real)
        gather.append(tokens.ravel())
        base += tokens.size
    flat = np.concatenate(gather)
    if np.array_equal(flat, np.arange(num_tokens)):
        return None, None
    return flat, restore


def _make_group(
    host: _Segments, device: torch.Tensor, metadata: AttentionMetadata, window: int | None, chunk: int | None
) -> Group:
    """`device` `[6, S]` holds the same arrays as `host`."""
    row, _, num_queries, position, first_key, num_keys = device.unbind(0)
    width = int(host.num_keys.max())
    max_queries = int(host.num_queries.max())
    last = host.position + host.num_queries - 1
    # Does every query of the group see back to its segment's first key?
    sees_first = True
    if window is not None:
        sees_first &= bool((host.first_key > last - window).all())
    if chunk is not None:
        sees_first &= bool((host.first_key // chunk == last // chunk).all())
    is_causal = width <= KV_TILE and max_queries > 1 and sees_first and bool((host.position == host.first_key).all())
    # Keys up to this index are seen by all queries of all segments.
    num_seen_by_all = int((host.position - host.first_key).min()) + 1 if sees_first else 0
    if not is_causal and num_seen_by_all < width:
        width += -width % WIDTH_MULTIPLE

    # Past its last key a segment reads that key again, masked. Any other slot might hold NaN, and 0 * NaN is NaN.
    key_position = first_key[:, None] + torch.arange(width, device=device.device)
    stored = torch.minimum(key_position, (first_key + num_keys - 1)[:, None])
    blocks = metadata.block_table.index_select(0, row).gather(1, stored // metadata.block_size)
    slots = blocks.long() * metadata.block_size + stored % metadata.block_size

    steps = torch.arange(max_queries, device=device.device)
    query_position = position[:, None] + torch.minimum(steps, num_queries[:, None] - 1)
    tiles = []
    for begin in range(0, width, KV_TILE):
        end = min(begin + KV_TILE, width)
        hidden = None
        if is_causal:  # for softcap and sinks; the fused call has a flag for it
            hidden = torch.ones(1, max_queries, width, dtype=torch.bool, device=device.device).triu_(1)
        elif num_seen_by_all < end:
            hidden = _hidden(query_position[:, :, None], key_position[:, None, begin:end], window, chunk)
        tiles.append(Tile(slots[:, begin:end].flatten(), hidden))
    return Group(len(host.row), max_queries, is_causal, tuple(tiles))


def _hidden(
    query_position: torch.Tensor, key_position: torch.Tensor, window: int | None, chunk: int | None
) -> torch.Tensor:
    hidden = key_position > query_position
    if window is not None:
        hidden |= key_position <= query_position - window
    if chunk is not None:
        hidden |= key_position // chunk != query_position // chunk
    return hidden
