"""What the host must know of a step to launch the kernels, the same for all layers."""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.triton.launch_table import MAX_DECODE_QUERIES

_PLAN = "triton"  # the key among the step's plans


@dataclass(frozen=True)
class StepShape:
    """Which kernels a step needs, and how large the decodes are."""

    max_decode_queries: int  # 0: no sequence goes to a decode kernel
    max_decode_keys: int
    has_prefill: bool


def step_shape(metadata: AttentionMetadata) -> StepShape:
    """The shape of a step, made by the first layer that asks."""
    shape = metadata.plans.get(_PLAN)
    if not isinstance(shape, StepShape):
        lens = list(zip(metadata.query_lens, metadata.kv_lens, strict=True))
        decodes = [(queries, keys) for queries, keys in lens if 0 < queries <= MAX_DECODE_QUERIES]
        shape = metadata.plans[_PLAN] = StepShape(
            max((queries for queries, _ in decodes), default=0),
            max((keys for _, keys in decodes), default=0),
            any(queries > MAX_DECODE_QUERIES for queries, _ in lens),
        )
    return shape
