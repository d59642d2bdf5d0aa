"""AttentionBackend: what every implementation of paged attention promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.torch_cache import copy_blocks, write_slots
from hf_paged.kernels.torch_latent import latent_attention


class AttentionBackend(ABC):
    """One way to compute attention over a paged cache. Subclass it and hand it to `register_backend`.

    An instance belongs to one engine and is used by one thread at a time.
    """

    name: ClassVar[str]
    """What `PagedConfig.attention_backend` calls it."""

    auto_priority: ClassVar[int | None] = None
    """"auto" takes the highest one that can run; None: only when asked for by name."""

    auto_device_types: ClassVar[tuple[str, ...] | None] = None
    """Device types that "auto" considers it for; None: all that it can run on."""

    def __init__(self) -> None:
        self.num_calls = 0
        """Attention calls so far: every pass over some queries and some keys counts as one."""

    @classmethod
    @abstractmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """Why this backend can't run on a device, as half a sentence, or None when it can."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attends for every token of a packed step. K and V of these tokens are in the cache already.

        Query i of a sequence with n queries (`query_lens`) and L keys (`kv_lens`) stands at position p = L - n + i:

            keys                0 1 2 3 4 5 6 7         L = 8
            queries                       0 1 2         n = 3, so query 0 stands at position 5
            seen by query 1     + + + + + + + .         causal: its own position and those before
              window 4          . . . + + + + .         only the last `window` of them, its own included
              chunk 4           . . . . + + + .         only those of its own chunk: p // chunk

        Scores are `scale * q.k`, capped by `softcap` before they are masked. `sinks` add one logit a query head to the
        softmax's denominator, and no value. Query head h reads kv head h // G, with G = Hq / Hkv.

        A slot that no query sees may hold anything, NaN included: the tail of a last block, other sequences' blocks,
        and whatever block 0 holds where the table reads 0 for a block freed behind the window. None of it may reach
        the result.

        Args:
            query: `[T, Hq, D]`, the queries of all sequences one after another.
            blocks: the layer's K and V, on the query's device, in any floating dtype or quantised.
            metadata: lengths and block table of the step. `plans` keeps what was derived for the step's other layers.
            params: scale, window, chunk, softcap and sinks of this layer.

        Returns:
            `[T, Hq, Dv]` in the query's dtype.
        """

    def attend_latent(
        self,
        query_latent: torch.Tensor,
        query_rope: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attends to compressed keys and values, which all heads share, for every token of a packed step.

        A cached token is a latent c of R numbers in `keys` and a rotary key r of P numbers in `values`:

            scores   scale * (query_latent . c + query_rope . r)
            result   the softmax's mean of c

        Which keys a query sees, softcap, sinks and slots that may hold anything: as in `attend`.

        Args:
            query_latent: `[T, H, R]`, in any layout.
            query_rope: `[T, H, P]`, in any layout and the same dtype.
            blocks: `keys` `[num_blocks, block_size, 1, R]` and `values` `[num_blocks, block_size, 1, P]`, in any
                floating dtype or quantised.
            metadata: lengths and block table of the step.
            params: scale, window, chunk, softcap and sinks of this layer.

        Returns:
            `[T, H, R]` in the query's dtype.
        """
        out, num_passes = latent_attention(query_latent, query_rope, blocks, metadata, params)
        self.num_calls += num_passes
        return out

    def write(self, blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores new tokens of one layer.

        Args:
            blocks: the layer's tensors.
            key: `[T, H, D]`, in any layout.
            value: `[T, H, Dv]`, the same.
            slot_mapping: `[T]` int64, block id * block_size + offset; no slot twice.
        """
        write_slots(blocks, key, value, slot_mapping)

    def copy_blocks(self, layers: Sequence[KVBlocks], copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks in every layer of a group, `(source, destination)` each.

        No destination is a source or the destination of another copy.
        """
        copy_blocks(layers, copies)
