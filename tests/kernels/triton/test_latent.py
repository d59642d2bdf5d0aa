"""The latent attention kernel under Triton's interpreter, against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_paged.errors import PagedError
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.reference import ReferenceBackend
from tests.kernels.latent_packed import LatentPacked, pack_latent
from tests.kernels.packed import decodes
from tests.kernels.tolerances import assert_close

# A fresh prompt, a chunk of a long one, a speculative check, a first token, decodes; in no order
MIXED = [(1, 150), (13, 13), (12, 70), (1, 1), (4, 90)]
FEATURES: list[dict[str, Any]] = [
    {"window": 16},
    {"window": 1},
    {"window": 140},
    {"chunk": 32},
    {"softcap": 1.5},
    {"with_sinks": True},
    {"window": 100, "softcap": 2.0, "with_sinks": True},
]


def attend(packed: LatentPacked) -> torch.Tensor:
    from hf_paged.kernels.triton.latent import attend_latent

    step = packed.step
    step.metadata.plans.clear()
    return attend_latent(packed.query_latent, packed.query_rope, step.blocks, step.metadata, step.params)


def check(packed: LatentPacked) -> None:
    actual, expected = attend(packed), packed.attend(ReferenceBackend())
    assert actual.shape == expected.shape
    assert_close(actual, expected)


@pytest.mark.parametrize(("num_heads", "rank", "rope_dim"), [(1, 24, 8), (3, 64, 16), (16, 24, 24), (40, 40, 8)])
def test_any_heads_and_sizes(num_heads: int, rank: int, rope_dim: int) -> None:
    check(pack_latent([(9, 9), (1, 40), (3, 50)], num_heads=num_heads, rank=rank, rope_dim=rope_dim))


def test_the_sizes_of_real_models() -> None:
    check(pack_latent([(1, 40), (9, 20)], num_heads=16, rank=512, rope_dim=64))


@pytest.mark.parametrize("block_size", [8, 16, 256])
def test_lengths_around_the_borders_of_blocks_tiles_and_splits(block_size: int) -> None:
    check(pack_latent(decodes([1, 15, 16, 17, 127, 129, 255]), block_size=block_size))
    check(pack_latent([(9, length) for length in (9, 16, 33, 129)], block_size=block_size))


def test_a_context_of_many_splits() -> None:
    check(pack_latent(decodes([4097]), num_heads=1, block_size=64))


@pytest.mark.parametrize("options", [{}, *FEATURES], ids=str)
def test_mixed_steps_with_windows_chunks_softcap_and_sinks(options: dict[str, Any]) -> None:
    check(pack_latent(MIXED, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype) -> None:
    check(pack_latent(MIXED, dtype=dtype))


@pytest.mark.parametrize("dtypes", [{"key_dtype": torch.bfloat16}, {"value_dtype": torch.float16}], ids=str)
def test_storage_of_another_dtype_is_cast_when_read(dtypes: dict[str, torch.dtype]) -> None:
    check(pack_latent([(1, 40), (12, 70)], **dtypes))


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantised_latents_are_read_directly(stored: torch.dtype, dtype: torch.dtype) -> None:
    lengths = [(1, 150), (12, 40)]
    check(pack_latent(lengths, dtype=dtype, key_dtype=stored, value_dtype=stored))
    check(pack_latent(lengths, dtype=dtype, key_dtype=stored))


@pytest.mark.parametrize("sequence", [0, 2])
def test_a_result_does_not_depend_on_the_batch(sequence: int) -> None:
    packed = pack_latent([(1, 150), (1, 300), (12, 70)])
    together = attend(packed)
    tokens, whole = packed.step.tokens_of(sequence), packed.step.metadata
    num_queries, num_keys = whole.query_lens[sequence], whole.kv_lens[sequence]
    packed.step.metadata = replace(
        whole,
        query_start_loc=torch.tensor([0, num_queries], dtype=torch.int32),
        seq_lens=torch.tensor([num_keys], dtype=torch.int32),
        block_table=whole.block_table[sequence : sequence + 1],
        query_lens=(num_queries,),
        kv_lens=(num_keys,),
        plans={},
    )
    packed.query_latent, packed.query_rope = packed.query_latent[tokens], packed.query_rope[tokens]
    assert torch.equal(attend(packed), together[tokens])


def test_a_sequence_with_nan_spoils_only_itself() -> None:
    packed = pack_latent(decodes([40, 44, 48]))
    clean = attend(packed)
    blocks = packed.step.metadata.block_table[1, :2].long()
    packed.step.blocks.keys[blocks] = float("nan")
    spoilt = attend(packed)
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])


def test_latents_that_are_too_long_are_refused() -> None:
    packed = pack_latent(decodes([5]), rank=520, num_heads=1)
    with pytest.raises(PagedError, match="up to 512 numbers, not 520"):
        attend(packed)


def test_blocks_past_two_to_the_31_elements_are_found() -> None:
    """Strides that make the second block begin past 2^31 elements, in memory that holds only what is read."""
    from hf_paged.kernels.triton.latent import attend_latent

    rank, rope_dim, block_size = 16, 16, 16
    far = 2**31 // (block_size * rank) + 3
    # Never written pages of an empty tensor take no memory.
    latents = torch.empty(far + 1, block_size, 1, rank, dtype=torch.int8)
    rotary = torch.empty(far + 1, block_size, 1, rope_dim, dtype=torch.int8)
    scales = torch.empty(far + 1, block_size, 1)
    for tensor in (latents, rotary):
        tensor[far] = torch.randint(-127, 127, tensor.shape[1:], dtype=torch.int8)
    scales[far] = 0.01
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([7], dtype=torch.int32),
        block_table=torch.tensor([[far]], dtype=torch.int32),
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        block_size=block_size,
        query_lens=(1,),
        kv_lens=(7,),
    )
    arguments = (
        torch.randn(1, 2, rank),
        torch.randn(1, 2, rope_dim),
        KVBlocks(latents, rotary, scales, scales),
        metadata,
        AttentionParams(scale=0.2),
    )
    assert_close(attend_latent(*arguments), ReferenceBackend().attend_latent(*arguments))
