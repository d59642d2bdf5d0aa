"""RowCache: the cache of models with recurrent states, which need one row a sequence.

    sequences       a  (5 new tokens)        b, c, d (one new token each)
    forwards        [1, 5]                   [3, 1]
    attention       K and V in the block pool, by block tables, as in a packed step
    states          rows of the state tensors:  read into [B, ...] before a forward, written back after it

During a forward the layers hold Transformers' own state objects, so that conv windows and recurrences are advanced by
the same code as in stock's cache. Rows are written back when all forwards of a step have ended: a step that raises has
changed none, and can be run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from hf_paged.cache.allocator import BlockCopy
from hf_paged.cache.layout import CacheLayout
from hf_paged.cache.state_storage import StateKey, StateSpec, StateStorage
from hf_paged.cache.step_cache import PackedLayer, StepCache
from hf_paged.cache.storage import LayerStorage
from hf_paged.errors import PackedStepError
from hf_paged.kernels.backend import AttentionBackend


class StateLayer(LinearAttentionLayer):
    """The states of one recurrent layer, for the rows of one forward."""

    def clear(self) -> None:
        """As before a first token."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def states(self) -> dict[tuple[str, int], torch.Tensor]:
        """The states `[B, ...]` that there are, by kind and index."""
        found = {("conv", index): state for index, state in self.conv_states.items()}
        found |= {("recurrent", index): state for index, state in self.recurrent_states.items()}
        return {key: state for key, state in found.items() if state is not None}


class _StateAndAttentionLayer(StateLayer, PackedLayer):
    """A layer that has both."""

    is_compileable = False

    def __init__(self, number_of_states: int = 1) -> None:
        PackedLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


def row_layers(config: Any) -> list[Any] | None:
    """The layers of a cache for a model with recurrent states, None for a model without.

    Args:
        config: the model's config, which says what stock's cache has in each layer.
    """
    try:
        stock = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a config that stock's cache can't be made from
        return None
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in stock):
        return None
    return [_layer_like(layer) for layer in stock]


def _layer_like(stock: Any) -> Any:
    if not isinstance(stock, LinearAttentionCacheLayerMixin):
        return PackedLayer()
    kind = _StateAndAttentionLayer if isinstance(stock, CacheLayerMixin) else StateLayer
    return kind(number_of_states=stock.number_of_states)


def found_states(layers: Sequence[Any]) -> dict[StateKey, torch.Tensor]:
    """Every state `[B, ...]` that a forward left in the layers."""
    return {
        StateKey(layer_idx, kind, index): state
        for layer_idx, layer in enumerate(layers)
        if isinstance(layer, StateLayer)
        for (kind, index), state in layer.states().items()
    }


def load_rows(layers: Sequence[Any], states: Mapping[StateKey, torch.Tensor]) -> None:
    """Gives layers, ours or stock's, the states `[B, ...]` that earlier tokens left."""
    for (layer_idx, kind, number), state in states.items():
        layer = layers[layer_idx]
        if kind == "conv":
            layer.conv_states[number] = state
            layer.is_conv_states_initialized[number] = True
            layer.conv_kernel_size[number] = state.shape[-1]
        else:
            layer.recurrent_states[number] = state
            layer.is_recurrent_states_initialized[number] = True
        if layer.device is None:
            layer.dtype, layer.device = state.dtype, state.device
        layer.has_previous_state[number] = True


class RowCache(StepCache):
    """The pool's tensors and the state rows, for one forward after the other.

    Args:
        layout: layers, groups and states.
        storages: the block tensors of each attention layer.
        backend: reads them.
        layers: what `row_layers` gave.
        num_rows: rows of each state.
    """

    def __init__(
        self,
        layout: CacheLayout,
        storages: dict[int, LayerStorage],
        backend: AttentionBackend,
        layers: list[Any],
        num_rows: int,
    ) -> None:
        super().__init__(layout, storages, backend, layers)
        self.states = {key: StateStorage(spec, num_rows) for key, spec in layout.states.items()}
        self._left: list[tuple[torch.Tensor, dict[StateKey, torch.Tensor]]] = []

    @contextmanager
    def open_rows(self, rows: torch.Tensor, *, is_first: bool) -> Iterator[None]:
        """The layers hold the states of some rows; what a forward makes of them is kept for `write_back`.

        Args:
            rows: `[B]` int64, one row each; none twice.
            is_first: the sequences have computed nothing yet, so whatever the rows hold is not theirs.

        Raises:
            PackedStepError: the forward left other states than the layout says.
        """
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.clear()
        if not is_first:
            load_rows(self.layers, {key: storage.read(rows) for key, storage in self.states.items()})
        try:
            yield
            left = found_states(self.layers)
            if {key: StateSpec.of(state) for key, state in left.items()} != self.layout.states:
                raise PackedStepError(
                    "A forward left other recurrent states than its layout says; "
                    "run this model without cache_implementation='paged'."
                )
            self._left.append((rows, left))
        finally:
            for layer in self.layers:
                if isinstance(layer, StateLayer):
                    layer.clear()

    def write_back(self) -> None:
        """Stores the states that the forwards since the last call left, all of them or, after an error, none."""
        for rows, left in self._left:
            for key, state in left.items():
                self.states[key].write(rows, state)
        self._left.clear()

    def drop_left(self) -> None:
        """Forgets what forwards left: one of the same step has raised, and all of it will be computed again."""
        self._left.clear()

    def grow_rows(self, num_rows: int) -> None:
        """Makes room for `num_rows` sequences; the states of those there are stay."""
        for storage in self.states.values():
            storage.grow(num_rows)

    @property
    def num_rows(self) -> int:
        """Sequences that there is room for."""
        return min(len(storage.rows) for storage in self.states.values())

    def copy_blocks(self, copies: Sequence[Sequence[BlockCopy]]) -> None:
        """Does a step's block copies, those of state rows included."""
        group = self.layout.state_group
        super().copy_blocks([() if index == group else pairs for index, pairs in enumerate(copies)])
        if group is not None and copies[group]:
            for storage in self.states.values():
                storage.copy(copies[group])

    @property
    def num_bytes(self) -> int:
        """Bytes of all block tensors and states."""
        return super().num_bytes + sum(storage.num_bytes for storage in self.states.values())
