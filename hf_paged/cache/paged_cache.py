"""A paged cache that stock `generate` takes in place of its DynamicCache.

Layers that see the same tokens form a group: the full-attention layers are one, the layers of each window another. A
group has one block pool and one block table, so a block id means the same tokens in each of its layers; each layer
keeps tensors of its own (`storage.py`). Beams, copies and rollbacks change the table, never the tensors:

    prompt of 6 tokens, block_size 4           reorder_cache([0, 0]): both rows point at row 0's blocks
      row 0  [ 0 1 2 3 | 4 5 . . ]               row 0 ─┬─▶ block 0 [ 0 1 2 3 ]   count 2
               block 0    block 1                row 1 ─┤
      row 1  [ 0 1 2 3 | 4 5 . . ]                      └─▶ block 1 [ 4 5 . . ]   count 2
               block 2    block 3                blocks 2 and 3 are free again

    the next token is written to a shared block: the first writer gets a copy, the last one keeps the original
      row 0 ─┬────────────────────▶ block 0 [ 0 1 2 3 ]   count 2, still shared
             └─▶ block 2 [ 4 5 a . ]                      copy of block 1, then a
      row 1 ─── (block 0) ─┬──────▶ block 1 [ 4 5 b . ]   count 1, written in place
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.storage import KVSpec, LayerStorage
from hf_paged.errors import PagedError
from hf_paged.kernels.torch_cache import copy_blocks, write_slots

NO_BLOCK = -1  # in a table: behind the window, given back or never stored


@dataclass
class _Step:
    """Where the tokens `start` to `end - 1` of every row go, and what their queries see. One a forward and group."""

    table: NDArray[np.int64]
    block_size: int
    start: int
    end: int
    first_visible: int  # the oldest key that the first query may see
    store_from: int  # the first new token that a later forward can still see; those before it are not stored
    num_pending: int  # layers of the group that this forward has not reached yet
    _slots: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    _blocks: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    @property
    def stores_all(self) -> bool:
        """Whether every new token is stored, so that past and new can be read back together."""
        return self.store_from == self.start

    @property
    def gather_end(self) -> int:
        """One past the last token to read from the blocks."""
        return self.end if self.stores_all else self.start

    def slot_mapping(self, device: torch.device) -> torch.Tensor:
        """Slots of the new tokens, row by row: `[batch * stored]` int64."""
        if device not in self._slots:
            positions = np.arange(self.store_from, self.end)
            slots = self.table[:, positions // self.block_size] * self.block_size + positions % self.block_size
            self._slots[device] = torch.from_numpy(slots.ravel()).to(device)
        return self._slots[device]

    def blocks(self, device: torch.device) -> torch.Tensor:
        """Blocks that hold the tokens to read, row by row: `[batch * blocks a row]` int64."""
        if device not in self._blocks:
            self._blocks[device] = _block_ids(self.table, self.first_visible, self.gather_end, self.block_size, device)
        return self._blocks[device]


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _block_ids(table: NDArray[np.int64], start: int, end: int, block_size: int, device: torch.device) -> torch.Tensor:
    """The blocks of tokens `start` to `end - 1` of every row: `[batch * blocks a row]` int64."""
    ids = table[:, start // block_size : _num_blocks(end, block_size)]
    if (ids == NO_BLOCK).any():
        raise PagedError(
            "A layer asked for tokens that its group gave back behind the sliding window; "
            "run every layer in every forward, or call activate_past_recording() before the first one."
        )
    return torch.from_numpy(ids.ravel()).to(device)


def _gather(pool: torch.Tensor, blocks: torch.Tensor, batch_size: int, start: int, end: int) -> torch.Tensor:
    """Tokens `start` to `end - 1` of every row, dense: `[batch, heads, end - start, dim]`, contiguous.

    Stock's caches return contiguous tensors, and attention code of some models takes views that need it.
    """
    _, block_size, num_heads, head_dim = pool.shape
    width = blocks.numel() // batch_size * block_size if batch_size else 0
    rows = pool.index_select(0, blocks).view(batch_size, width, num_heads, head_dim)
    offset = start % block_size
    return rows[:, offset : offset + end - start].transpose(1, 2).contiguous()


class LayerGroup:
    """Layers that share a block pool and a block table.

    Args:
        block_size: tokens a block.
        window: keys that a query may see, itself included; None is all of them.
    """

    def __init__(self, block_size: int, window: int | None = None) -> None:
        self.block_size = block_size
        self.window = window
        self.pool = BlockPool(0)
        self.layers: list[PagedLayer] = []
        self.table: NDArray[np.int64] = np.empty((0, 0), dtype=np.int64)  # [batch, blocks a row]
        self.num_tokens = 0  # tokens of a row that blocks were reserved for
        self.record_past = False
        self._step: _Step | None = None

    @property
    def num_blocks_dense(self) -> int:
        """Blocks that the rows would hold if they shared none."""
        return int((self.table != NO_BLOCK).sum())

    def first_visible(self, num_tokens: int) -> int:
        """The oldest key that the query behind `num_tokens` keys may see."""
        return 0 if self.window is None else max(num_tokens - self.window + 1, 0)

    def begin(self, batch_size: int, start: int, end: int) -> _Step:
        """Reserves room for tokens `start` to `end - 1` of every row; later layers of a forward get the same step.

        Raises:
            PagedError: the batch differs from the one in the cache.
            PoolMemoryError: the pool had to grow and couldn't.
        """
        step = self._step
        if step is not None and (step.start, step.end) == (start, end) and len(step.table) == batch_size:
            return step
        if len(self.table) != batch_size:
            if self.num_tokens:
                raise PagedError(
                    f"The cache holds {len(self.table)} rows, but the forward has {batch_size}; "
                    "call batch_repeat_interleave or batch_select_indices first, or use a new cache."
                )
            self.table = np.empty((batch_size, 0), dtype=np.int64)
        if end > self.num_tokens:
            self._release_behind(start)  # a layer that skipped the last forward kept it from being released
        keep_from = 0 if self.record_past else self.first_visible(end) // self.block_size * self.block_size
        store_from = max(start, keep_from)
        self._own_blocks(store_from, end)
        self.num_tokens = max(self.num_tokens, end)
        first_visible = self.first_visible(start)
        self._step = _Step(self.table, self.block_size, start, end, first_visible, store_from, len(self.layers))
        return self._step

    def finish(self, step: _Step) -> None:
        """One more layer is done with a step; after the last one, blocks behind the window go back."""
        step.num_pending -= 1
        if step.num_pending == 0:
            self._step = None
            self._release_behind(step.end)

    def _own_blocks(self, start: int, end: int) -> None:
        """Gives every row blocks of its own for tokens `start` to `end - 1`: new ones, or copies of shared ones."""
        first, width = start // self.block_size, _num_blocks(end, self.block_size)
        if width > self.table.shape[1]:
            added = np.full((len(self.table), width - self.table.shape[1]), NO_BLOCK, dtype=np.int64)
            self.table = np.concatenate([self.table, added], axis=1)
        written = self.table[:, first:width]
        missing, present = np.argwhere(written == NO_BLOCK), np.argwhere(written != NO_BLOCK)
        shared = [(row, column) for row, column in present if self.pool.ref_count(int(written[row, column])) > 1]
        self._grow_for(len(missing) + len(shared))
        for row, column in missing:
            written[row, column] = self.pool.allocate()
        copies = []
        for row, column in shared:
            block_id = int(written[row, column])
            if self.pool.ref_count(block_id) > 1:  # the last of the sharers keeps the original
                written[row, column] = self.pool.allocate()
                copies.append((block_id, int(written[row, column])))
                self.pool.free([block_id])
        if copies:
            with torch.no_grad():
                copy_blocks([layer.storage.blocks for layer in self.layers if layer.storage is not None], copies)

    def _grow_for(self, num_new: int) -> None:
        if num_new > self.pool.num_free:
            size = max(2 * self.pool.num_blocks, self.pool.num_referenced + num_new)
            for layer in self.layers:
                if layer.storage is not None and layer.storage.num_blocks < size:
                    layer.storage.grow(size)
            self.pool.grow(size)

    def _release_behind(self, num_tokens: int) -> None:
        """Gives back the blocks that no query behind `num_tokens` keys can see."""
        if self.window is not None and not self.record_past:
            self._release(self.table[:, : self.first_visible(num_tokens) // self.block_size])

    def _release(self, columns: NDArray[np.int64]) -> None:
        self.pool.free(columns[columns != NO_BLOCK].tolist())
        columns[...] = NO_BLOCK

    def fork(self, rows: NDArray[np.int64]) -> None:
        """Row i becomes another table on the blocks of the old row `rows[i]`. Nothing is copied."""
        if self.num_tokens == 0:
            return
        forked = self.table[rows]
        size = self.pool.num_blocks
        change = np.bincount(forked[forked != NO_BLOCK], minlength=size)
        change -= np.bincount(self.table[self.table != NO_BLOCK], minlength=size)
        for block_id in np.flatnonzero(change > 0).tolist():
            for _ in range(change[block_id]):
                self.pool.touch(block_id)
        dropped = np.flatnonzero(change < 0)
        self.pool.free(np.repeat(dropped, -change[dropped]).tolist())
        self.table = forked
        self._step = None

    def require_crop(self, num_removed: int) -> None:
        """Raises PagedError if the last `num_removed` tokens can't be taken back."""
        if self.window is None or num_removed == 0 or self.num_tokens < self.window:
            return
        num_tokens = max(self.num_tokens - num_removed, 0)
        first = self.first_visible(num_tokens) // self.block_size
        kept = self.table[:, first : _num_blocks(num_tokens, self.block_size)]
        if not self.record_past or (kept == NO_BLOCK).any():
            raise PagedError(
                f"The last {num_removed} tokens can't be taken back: what a window of {self.window} then shows was "
                "given back; call activate_past_recording() before the tokens are added."
            )

    def crop(self, num_removed: int) -> None:
        """Takes back the last `num_removed` tokens of every row, and what was only kept for that."""
        self.num_tokens = max(self.num_tokens - num_removed, 0)
        for layer in self.layers:
            layer.num_tokens = max(layer.num_tokens - num_removed, 0)
        width = _num_blocks(self.num_tokens, self.block_size)
        self._release(self.table[:, width:])
        self.table = self.table[:, :width]
        self._release(self.table[:, : self.first_visible(self.num_tokens) // self.block_size])
        self._step = None

    def reset(self) -> None:
        """Gives every block back; the tensors stay for the next tokens."""
        self._release(self.table)
        self.table = np.empty((0, 0), dtype=np.int64)
        self.num_tokens = 0
        self.record_past = False
        self._step = None
        for layer in self.layers:
            layer.num_tokens = 0

    def check(self) -> None:
        """Proves that the pool's counts are those of the table, and that every layer has room for the pool."""
        ids, counts = np.unique(self.table[self.table != NO_BLOCK], return_counts=True)
        self.pool.check(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
        if self.table.shape[1] != _num_blocks(self.num_tokens, self.block_size):
            raise PagedError(f"The block table has {self.table.shape[1]} columns for {self.num_tokens} tokens.")
        for layer in self.layers:
            if layer.storage is not None and layer.storage.num_blocks < self.pool.num_blocks:
                raise PagedError("A layer has fewer blocks than its pool hands out.")


class PagedLayer(CacheLayerMixin):
    """One full-attention layer: tensors of its own, and the block table of its group."""

    is_sliding = False
    is_croppable = True

    # The base's __init__ would set `keys` and `values`, which are read from the blocks here.
    def __init__(self, group: LayerGroup) -> None:
        self.group = group
        self.storage: LayerStorage | None = None
        self.num_tokens = 0
        group.layers.append(self)

    @property
    def is_initialized(self) -> bool:
        """Whether the layer has met its first K and V."""
        return self.storage is not None

    @property
    def keys(self) -> torch.Tensor | None:
        """What the next query may see, dense: `[batch, heads, tokens, head_dim]`; gathered at each call."""
        return None if self.storage is None else self._dense(self.storage.blocks.keys)

    @property
    def values(self) -> torch.Tensor | None:
        """As `keys`, of V."""
        return None if self.storage is None else self._dense(self.storage.blocks.values)

    def _dense(self, pool: torch.Tensor) -> torch.Tensor:
        group = self.group
        start = 0 if group.record_past else group.first_visible(self.num_tokens)
        blocks = _block_ids(group.table, start, self.num_tokens, group.block_size, pool.device)
        return _gather(pool, blocks, len(group.table), start, self.num_tokens)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes the layer's tensors, of the shape, type and device of what `update` was handed."""
        spec = KVSpec.of(key_states, value_states)
        self.storage = LayerStorage(spec, self.group.pool.num_blocks, self.group.block_size)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new tokens and returns what their queries may see, past and new.

        Args:
            key_states: `[batch, heads, T, head_dim]`.
            value_states: `[batch, heads, T, value_head_dim]`.

        Returns:
            K and V, dense: `[batch, heads, past + T, ...]`. Gradients don't flow through what is stored.
        """
        batch_size, _, num_new, _ = key_states.shape
        if self.storage is None or (self.num_tokens == 0 and self.storage.spec != KVSpec.of(key_states, value_states)):
            self.lazy_initialization(key_states, value_states)
        step = self.group.begin(batch_size, self.num_tokens, self.num_tokens + num_new)
        storage = self.storage
        assert storage is not None
        self.num_tokens = step.end
        with torch.no_grad():
            write_slots(
                storage.blocks,
                _token_rows(key_states, step.store_from - step.start),
                _token_rows(value_states, step.store_from - step.start),
                step.slot_mapping(key_states.device),
            )
        if step.first_visible < step.start:
            blocks = step.blocks(key_states.device)
            keys = _gather(storage.blocks.keys, blocks, batch_size, step.first_visible, step.gather_end)
            values = _gather(storage.blocks.values, blocks, batch_size, step.first_visible, step.gather_end)
            if not step.stores_all:
                keys, values = torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)
            key_states, value_states = keys, values
        self.group.finish(step)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens a row that the layer has met, those behind the window included."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and first position of the keys that `update` will return for `query_length` new tokens."""
        first_visible = self.group.first_visible(self.num_tokens)
        return self.num_tokens + query_length - first_visible, first_visible

    def get_max_length(self) -> int:
        """The window, or -1: no limit."""
        return -1 if self.group.window is None else self.group.window

    def reset(self) -> None:
        """Not a layer's: the table is shared."""
        raise _not_alone("reset")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Not a layer's: the table is shared."""
        raise _not_alone("reorder_cache")

    def crop(self, tokens_to_remove: int) -> None:
        """Not a layer's: the table is shared."""
        raise _not_alone("crop")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not a layer's: the table is shared."""
        raise _not_alone("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Not a layer's: the table is shared."""
        raise _not_alone("batch_select_indices")

    def offload(self) -> None:
        """Not supported: the blocks stay where the layer runs."""

    def prefetch(self) -> None:
        """Not supported: the blocks stay where the layer runs."""


class PagedSlidingLayer(PagedLayer):
    """One layer with a window. Blocks behind it are given back, unless past recording keeps them until `crop`."""

    is_sliding = True

    @property
    def sliding_window(self) -> int:
        """Keys that a query may see, itself included."""
        assert self.group.window is not None
        return self.group.window

    @property
    def record_past(self) -> bool:
        """Whether blocks behind the window are kept until the next crop."""
        return self.group.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.group.record_past = value

    def activate_past_recording(self) -> None:
        """From now on, keeps what falls behind the window until `crop`, so that tokens can be taken back."""
        self.group.record_past = True


def _token_rows(states: torch.Tensor, num_skipped: int) -> torch.Tensor:
    """`[B, H, T, D]` without its first tokens, as rows of tokens: `[B * T, H, D]`."""
    return states[:, :, num_skipped:].transpose(1, 2).flatten(0, 1)


def _not_alone(method: str) -> PagedError:
    return PagedError(f"The layers of a PagedKVCache share their block table; call {method} on the cache.")


# A DynamicCache by type, since EncoderDecoderCache refuses to crop and some models refuse to wrap anything else.
class PagedKVCache(DynamicCache):
    """A cache of reference-counted blocks, for every generation mode of stock `generate`.

    Outputs equal those with a DynamicCache. Beams, `num_return_sequences` and `batch_repeat_interleave` share blocks
    until a row writes (see the drawing above), and blocks behind a sliding window are given back. It is made for
    inference: gradients don't flow through stored K and V.

    Args:
        config: the model's config, read for the number of layers and their windows as DynamicCache reads it. None:
            layers appear as the model uses them, and all are kept in full.
        block_size: tokens a block.

    Layers that aren't plain attention (recurrent and convolution state, sparse indexers) are kept in stock's own
    layer objects.

    Example:

    ```python
    >>> cache = PagedKVCache(model.config)
    >>> model.generate(**inputs, cache=cache, num_beams=4)  # past_key_values=cache before transformers 5.24
    >>> cache.num_blocks_held, cache.num_blocks_dense       # blocks in use; the same rows unshared
    ```
    """

    def __init__(self, config: PretrainedConfig | None = None, block_size: int = 16) -> None:
        if block_size < 1:
            raise PagedError(f"block_size is {block_size}; it must be at least 1.")
        super().__init__(config=config)
        self.layer_class_to_replicate = None  # `update` adds missing layers itself: they need their group
        self.block_size = block_size
        self._groups: dict[int | None, LayerGroup] = {}
        stock: list[Any] = vars(self)["layers"]
        self.layers: list[Any] = [self._paged(layer) for layer in stock]

    def _paged(self, layer: Any) -> Any:
        """Our layer for stock's, which knows whether and how far it slides; its own where it isn't plain attention."""
        if type(layer) is DynamicLayer:
            return PagedLayer(self._group(None))
        if type(layer) is DynamicSlidingWindowLayer:
            return PagedSlidingLayer(self._group(layer.sliding_window))
        return layer

    def _group(self, window: int | None) -> LayerGroup:
        if window not in self._groups:
            self._groups[window] = LayerGroup(self.block_size, window)
        return self._groups[window]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a layer's new K and V and returns what the new queries may see.

        Args:
            key_states: `[batch, heads, T, head_dim]`.
            value_states: `[batch, heads, T, value_head_dim]`.
            layer_idx: which layer.

        Returns:
            K and V, dense, past and new: `[batch, heads, kv_length, ...]`, with the `kv_length` of `get_mask_sizes`.

        Raises:
            PagedError: the batch differs from the one in the cache.
            PoolMemoryError: the blocks don't fit into memory.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(PagedLayer(self._group(None)))
        layer: Any = self.layers[layer_idx]
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        return keys, values

    @property
    def is_compileable(self) -> bool:
        """False: block tables are read on the host."""
        return False

    @property
    def num_blocks_held(self) -> int:
        """Blocks in use, over all groups; a shared one counts once."""
        return sum(group.pool.num_referenced for group in self._groups.values())

    @property
    def num_blocks_dense(self) -> int:
        """Blocks that the same rows would hold if they shared none, over all groups."""
        return sum(group.num_blocks_dense for group in self._groups.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the block tensors, free blocks included."""
        layers = [layer for group in self._groups.values() for layer in group.layers]
        return sum(layer.storage.num_bytes for layer in layers if layer.storage is not None)

    def check(self) -> None:
        """Proves that reference counts equal what the block tables say.

        Raises:
            PagedError: naming the first thing that is wrong.
        """
        for group in self._groups.values():
            group.check()

    def reset(self) -> None:
        """Forgets all tokens and gives every block back; the tensors stay for the next use."""
        for group in self._groups.values():
            group.reset()
        for layer in self._stock_layers():
            layer.reset()

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Takes tokens back from the end of every row, and gives back what was only kept for that.

        Args:
            tokens_to_remove: minus the number of tokens; a positive number is the length to crop to.

        Raises:
            PagedError: a window was passed without `activate_past_recording`. Nothing is changed.
        """
        amount = int(tokens_to_remove)
        if amount > 0:
            amount = min(amount - self.get_seq_length(), 0)
        for group in self._groups.values():
            group.require_crop(-amount)
        for group in self._groups.values():
            group.crop(-amount)
        for layer in self._stock_layers():
            layer.crop(amount)

    def activate_past_recording(self) -> None:
        """From now on, keeps what falls behind a window until `crop`, so that tokens can be taken back."""
        for layer in self.layers:
            activate = getattr(layer, "activate_past_recording", None)  # full layers keep everything anyway
            if activate is not None:
                activate()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i continues the old row `beam_idx[i]`: tables change, K and V stay.

        Args:
            beam_idx: `[batch]` int64.
        """
        self._fork(beam_idx.cpu().numpy())
        for layer in self._stock_layers():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows that share its blocks."""
        for group in self._groups.values():
            group.fork(np.repeat(np.arange(len(group.table)), repeats))
        for layer in self._stock_layers():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows of `indices`, `[new_batch]` int64 or `[batch]` bool; the others give their blocks back."""
        self._fork(torch.as_tensor(indices).cpu().numpy())
        for layer in self._stock_layers():
            layer.batch_select_indices(indices)

    def _fork(self, rows: NDArray[np.int64]) -> None:
        for group in self._groups.values():
            group.fork(rows)

    def _stock_layers(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, PagedLayer)]
