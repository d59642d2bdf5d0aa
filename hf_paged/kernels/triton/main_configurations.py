"""The settings that every kernel is compiled in before a release: real models' shapes, as launches of the backend.

All tensors are meta tensors. Sizes are those of a busy server, since Triton looks at some: on ROCm a pool of 2 GiB a
layer is addressed with 64 bits, a smaller one with 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch

from hf_paged.kernels.kv_blocks import QUANTISED_DTYPES, KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.triton.backend import TritonBackend
from hf_paged.kernels.triton.capture import Launch

META = torch.device("meta")
NUM_POOL_TOKENS = 2**20
BLOCK_SIZE = 16


class Matrix(Enum):
    """Which matrix instructions of a target a kernel must have."""

    NONE = auto()  # it multiplies no matrices
    ANY = auto()
    WIDEST = auto()  # bound by them: wgmma on sm_90, tcgen05 on sm_100


# A kernel that isn't named here must have some.
_MATRIX = {
    "_prefill_kernel": Matrix.WIDEST,
    "_join_kernel": Matrix.NONE,
    "_write_kernel": Matrix.NONE,
    "_copy_kernel": Matrix.NONE,
}


def matrix_of(launch: Launch) -> Matrix:
    """What is asked of a launch."""
    return _MATRIX.get(launch.name, Matrix.ANY)


@dataclass(frozen=True)
class MainConfiguration:
    """One call of the backend: `launch` makes meta tensors and hands them over."""

    name: str
    launch: Callable[[], None]


@dataclass(frozen=True)
class Heads:
    """A model's attention, as a name says it: 32/8 x 128 is 32 query heads on 8 kv heads of 128."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} x {self.head_dim}"


LLAMA_3_8B = Heads(32, 8, 128)
QWEN3_06B = Heads(16, 8, 128)
GPT_OSS_20B = Heads(64, 8, 64)
GEMMA_2_2B = Heads(8, 4, 256)


def _attend(
    heads: Heads,
    lens: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> None:
    """`lens` has (new tokens, keys) of each sequence."""
    num_tokens = sum(queries for queries, _ in lens)
    TritonBackend().attend(
        torch.empty(num_tokens, heads.num_heads, heads.head_dim, dtype=dtype, device=META),
        _blocks(heads, cache_dtype or dtype),
        _metadata(lens),
        AttentionParams(
            scale=heads.head_dim**-0.5,
            window=window,
            softcap=softcap,
            sinks=torch.empty(heads.num_heads, dtype=dtype, device=META) if has_sinks else None,
        ),
    )


def _metadata(lens: tuple[tuple[int, int], ...]) -> AttentionMetadata:
    num_tokens = sum(queries for queries, _ in lens)
    most_blocks = -(-max(keys for _, keys in lens) // BLOCK_SIZE)
    return AttentionMetadata(
        query_start_loc=torch.empty(len(lens) + 1, dtype=torch.int32, device=META),
        seq_lens=torch.empty(len(lens), dtype=torch.int32, device=META),
        block_table=torch.empty(len(lens), most_blocks, dtype=torch.int32, device=META),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=META),
        block_size=BLOCK_SIZE,
        query_lens=tuple(queries for queries, _ in lens),
        kv_lens=tuple(keys for _, keys in lens),
    )


def _write(heads: Heads, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    num_tokens = 64
    key, value = (
        torch.empty(num_tokens, heads.num_kv_heads, heads.head_dim, dtype=dtype, device=META) for _ in range(2)
    )
    slots = torch.empty(num_tokens, dtype=torch.int64, device=META)
    TritonBackend().write(_blocks(heads, cache_dtype), key, value, slots)


def _copy(heads: Heads, cache_dtype: torch.dtype) -> None:
    TritonBackend().copy_blocks([_blocks(heads, cache_dtype) for _ in range(4)], [(1, 2), (3, 4), (5, 6)])


def _blocks(heads: Heads, cache_dtype: torch.dtype) -> KVBlocks:
    shape = (NUM_POOL_TOKENS // BLOCK_SIZE, BLOCK_SIZE, heads.num_kv_heads)
    keys, values = (torch.empty(*shape, heads.head_dim, dtype=cache_dtype, device=META) for _ in range(2))
    if cache_dtype not in QUANTISED_DTYPES:
        return KVBlocks(keys, values)
    return KVBlocks(keys, values, *(torch.empty(shape, dtype=torch.float32, device=META) for _ in range(2)))


def _attend_latent(
    num_heads: int, rank: int, rope_dim: int, lens: tuple[tuple[int, int], ...], dtype: torch.dtype
) -> None:
    num_tokens = sum(queries for queries, _ in lens)
    shape = (NUM_POOL_TOKENS // BLOCK_SIZE, BLOCK_SIZE, 1)
    TritonBackend().attend_latent(
        torch.empty(num_tokens, num_heads, rank, dtype=dtype, device=META),
        torch.empty(num_tokens, num_heads, rope_dim, dtype=dtype, device=META),
        KVBlocks(*(torch.empty(*shape, dim, dtype=dtype, device=META) for dim in (rank, rope_dim))),
        _metadata(lens),
        AttentionParams(scale=(128 + rope_dim) ** -0.5),
    )


_DECODES = ((1, 4097),) * 64
_CHECKS = ((4, 4097),) * 64  # tokens that were guessed, and wait to be checked
_PREFILLS = ((2048, 2048), (512, 32768))

_BF16, _FP16, _FP8, _INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8


def _configurations() -> dict[str, Callable[[], None]]:
    llama, qwen, gpt_oss, gemma = LLAMA_3_8B, QWEN3_06B, GPT_OSS_20B, GEMMA_2_2B
    return {
        f"decode {llama} bf16": partial(_attend, llama, _DECODES, _BF16),
        f"decode {llama} bf16, 4 tokens": partial(_attend, llama, _CHECKS, _BF16),
        f"decode {llama} fp16": partial(_attend, llama, _DECODES, _FP16),
        f"decode {llama} bf16, fp8 cache": partial(_attend, llama, _DECODES, _BF16, _FP8),
        f"decode {llama} bf16, int8 cache": partial(_attend, llama, _DECODES, _BF16, _INT8),
        f"decode {llama} bf16, window, softcap, sinks": partial(
            _attend, llama, _DECODES, _BF16, window=1024, softcap=50.0, has_sinks=True
        ),
        f"decode {qwen} bf16": partial(_attend, qwen, _DECODES, _BF16),
        f"decode {gpt_oss} bf16, window, sinks": partial(_attend, gpt_oss, _DECODES, _BF16, window=128, has_sinks=True),
        f"decode {gemma} bf16, softcap": partial(_attend, gemma, _DECODES, _BF16, softcap=50.0),
        f"prefill {llama} bf16": partial(_attend, llama, _PREFILLS, _BF16),
        f"prefill {llama} fp16": partial(_attend, llama, _PREFILLS, _FP16),
        f"prefill {llama} bf16, fp8 cache": partial(_attend, llama, _PREFILLS, _BF16, _FP8),
        f"prefill {qwen} bf16": partial(_attend, qwen, _PREFILLS, _BF16),
        f"prefill {gpt_oss} bf16, window, sinks": partial(
            _attend, gpt_oss, _PREFILLS, _BF16, window=128, has_sinks=True
        ),
        f"prefill {gemma} bf16, softcap": partial(_attend, gemma, _PREFILLS, _BF16, softcap=50.0),
        "latent decode 128 x 512 + 64 bf16": partial(_attend_latent, 128, 512, 64, _DECODES, _BF16),
        "latent prefill 128 x 512 + 64 bf16": partial(_attend_latent, 128, 512, 64, _PREFILLS, _BF16),
        f"write {llama} bf16": partial(_write, llama, _BF16, _BF16),
        f"write {llama} bf16, fp8 cache": partial(_write, llama, _BF16, _FP8),
        f"write {llama} bf16, int8 cache": partial(_write, llama, _BF16, _INT8),
        f"copy {llama} bf16": partial(_copy, llama, _BF16),
    }


MAIN_CONFIGURATIONS = tuple(MainConfiguration(name, launch) for name, launch in _configurations().items())
