"""Which layers there are, what one token of each takes, and which of them share a block group.

layers of a model with alternating attention          groups
  0 full     [8 heads, 128]                              0: full           layers 0, 2
  1 window   [8 heads, 128]                              1: window 1024    layers 1, 3
  2 full     [8 heads, 128]
  3 window   [8 heads, 128]                           a sequence has one block table a group

Recurrent states don't grow with the tokens. They have a group of their own, the last one, in which every sequence holds
one block for life: its row of each state tensor (`state_storage.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_paged.cache.allocator import BlockGroup
from hf_paged.cache.state_storage import StateKey, StateSpec
from hf_paged.cache.storage import KVSpec


@dataclass(frozen=True)
class AttentionSpan:
    """How far back a layer's queries see. At most one of the two is set; neither means the full context."""

    window: int | None = None  # the last `window` positions, the query's own included
    chunk: int | None = None  # the positions of the query's own chunk, up to the query

    @property
    def group(self) -> BlockGroup:
        """The block group for such layers: a chunk never reaches further back than a window of its size."""
        return BlockGroup(self.window if self.window is not None else self.chunk)


@dataclass(frozen=True)
class CacheLayer:
    """One layer that writes to the cache."""

    spec: KVSpec
    span: AttentionSpan
    group: int
    is_gathered: bool = False  # the model changes K or V between the cache and attention (`gather_cache.py`)


@dataclass(frozen=True)
class CacheLayout:
    """Every caching layer by the index that it passes to `update`, and the block groups.

    `attended` lists the layer whose K and V each attention call of a forward reads, in order: longer than `layers`
    where layers share K and V. `states` are those of recurrent layers, by layer and kind.
    """

    layers: dict[int, CacheLayer]
    groups: tuple[BlockGroup, ...]
    attended: tuple[int, ...]
    states: dict[StateKey, StateSpec] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        specs: dict[int, KVSpec],
        spans: dict[int, AttentionSpan],
        attended: tuple[int, ...],
        gathered: frozenset[int] = frozenset(),
        states: dict[StateKey, StateSpec] | None = None,
    ) -> CacheLayout:
        """Groups layers by how much of the past they need, the full context first and states last."""
        groups = sorted(
            {spans[index].group for index in specs}, key=lambda group: (group.window is not None, group.window or 0)
        )
        layers = {
            index: CacheLayer(spec, spans[index], groups.index(spans[index].group), index in gathered)
            for index, spec in specs.items()
        }
        if states:
            groups.append(BlockGroup(is_state=True))
        return cls(layers, tuple(groups), attended, states or {})

    @property
    def mode(self) -> str:
        """How the model runs: "direct" and "gather" in one packed row of tokens, "by row" one row a sequence."""
        if self.states:
            return "by row"
        return "gather" if any(layer.is_gathered for layer in self.layers.values()) else "direct"

    @property
    def device(self) -> torch.device:
        """Where the first layer's K and V live, or its states."""
        for layer in self.layers.values():
            return layer.spec.device
        return next(iter(self.states.values())).device

    @property
    def state_group(self) -> int | None:
        """The group of the recurrent states, None if there are none."""
        return len(self.groups) - 1 if self.states else None

    def group_layers(self, group: int) -> list[int]:
        """The indices of a group's layers."""
        return [index for index, layer in self.layers.items() if layer.group == group]
