"""StepCache: the engine's view of the global pool, as the Cache that a packed forward is given.

It has no rows and no lengths of its own: where new tokens go and what each sequence attends to is in the packed step
that is open. `update` writes the new K and V into the pool and hands them back unchanged but tagged; the attention
function finds the pool by the tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_paged.cache.allocator import BlockCopy
from hf_paged.cache.layout import CacheLayer, CacheLayout
from hf_paged.cache.storage import LayerStorage
from hf_paged.errors import PackedStepError
from hf_paged.kernels.backend import AttentionBackend
from hf_paged.kernels.metadata import current_step
from hf_paged.kernels.rows import by_token


class PackedLayer(CacheLayerMixin):
    """What a model may ask of one layer: a packed forward always starts from nothing."""

    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool exists."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Not for layers: the cache itself updates."""
        raise PackedStepError("A packed step updates the cache, not its layers.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask would be made for."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before this forward, as far as masks and default positions are concerned."""
        return 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class TaggingCache(Cache):
    """The part that every cache of a packed forward has: one entry a layer, and tagged keys."""

    def __init__(self, layers: list[Any]) -> None:
        # one entry a layer, since all([]) is True and stock code asks all(cache.is_linear)
        super().__init__(layers=layers or [PackedLayer()])

    @property
    def is_compileable(self) -> bool:
        """Never: static-cache compilation is not for a pool."""
        return False

    def tag(self, key: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Marks keys as this cache's, so that attention reads the pool and not the tensor."""
        key._paged = (self, layer_idx)  # type: ignore[attr-defined]
        return key


class StepCache(TaggingCache):
    """The pool's tensors, written through the open packed step.

    Args:
        layout: layers and groups.
        storages: the block tensors of each layer in the layout.
        backend: reads them.
        layers: what a model may ask of each layer; None for a model that only attends.
    """

    def __init__(
        self,
        layout: CacheLayout,
        storages: dict[int, LayerStorage],
        backend: AttentionBackend,
        layers: list[Any] | None = None,
    ) -> None:
        super().__init__(layers or [PackedLayer() for _ in range(max(layout.layers, default=0) + 1)])
        self.layout = layout
        self.storages = storages
        self.backend = backend

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes key `[B, H, n, D]` and value `[B, H, n, Dv]` to the step's slots; returns them, the key tagged.

        The tokens of row 0 come first, then those of row 1, ...; a packed step has one row.
        """
        step = current_step()
        if step is None or step.cache is not self:
            raise PackedStepError(
                "The engine's cache was used outside of its packed step; give generate() its own cache."
            )
        storage = self.storages[layer_idx]
        layer = self.layout.layers[layer_idx]
        metadata = step.metadata(layer.group, storage.spec.device)
        self.backend.write(storage.blocks, by_token(key_states), by_token(value_states), metadata.slot_mapping)
        step.updated.append(layer_idx)
        if layer.is_gathered:
            gathered = step.gathered(layer.group, storage.spec.device)
            key_states, value_states = gathered.hand_out(storage.blocks, key_states, value_states)
        return self.tag(key_states, layer_idx), value_states

    def layer(self, layer_idx: int) -> CacheLayer:
        """The layout's entry of a layer."""
        return self.layout.layers[layer_idx]

    def copy_blocks(self, copies: Sequence[Sequence[BlockCopy]]) -> None:
        """Does a step's block copies, one list a group, in every layer."""
        for group, group_copies in enumerate(copies):
            if group_copies:
                layers = self.layout.group_layers(group)
                self.backend.copy_blocks([self.storages[index].blocks for index in layers], group_copies)

    @property
    def num_bytes(self) -> int:
        """Bytes of all block tensors."""
        return sum(storage.num_bytes for storage in self.storages.values())
