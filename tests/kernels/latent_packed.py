"""Packed batches of latent attention over a scattered, poisoned cache, on the blocks that packed.py fills."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_paged.kernels.backend import AttentionBackend
from tests.kernels.packed import Packed, pack


@dataclass
class LatentPacked:
    """A step of latent attention."""

    step: Packed  # its blocks hold latents as keys and rotary keys as values
    query_latent: torch.Tensor  # [T, H, R]
    query_rope: torch.Tensor  # [T, H, P]

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        """What a backend makes of it, with the plans of other backends forgotten."""
        self.step.metadata.plans.clear()
        step = self.step
        return backend.attend_latent(self.query_latent, self.query_rope, step.blocks, step.metadata, step.params)


def pack_latent(
    lengths: list[tuple[int, int]], *, num_heads: int = 4, rank: int = 24, rope_dim: int = 8, **options: Any
) -> LatentPacked:
    """A batch of sequences with (queries, keys) as many as `lengths` says; other options as `pack` has them."""
    step = pack(lengths, num_kv_heads=1, group_size=num_heads, head_dim=rank, value_dim=rope_dim, **options)
    random = torch.Generator().manual_seed(1)
    # As it comes from a model: a part of longer queries, heads first in memory.
    whole = torch.randn(num_heads, step.query.shape[0], 5 + rope_dim, generator=random).to(step.query.dtype)
    scale = (rank + rope_dim) ** -0.5
    step.params = replace(step.params, scale=scale)
    return LatentPacked(step, step.query, whole[..., 5:].transpose(0, 1))
