"""PagedConfig: every knob of the cache, the scheduler and the kernels, validated in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hf_paged.errors import ConfigError, nearest

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
QUANTISED_KV_DTYPES = ("float8_e4m3fn", "int8")
LINEAR_BACKENDS = ("auto", "native", "torch")
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", *QUANTISED_KV_DTYPES)

# What other systems call our settings, so that a typo from habit gets a useful answer.
FOREIGN_NAMES = {
    # vLLM
    "gpu_memory_utilization": "memory_fraction",
    "max_num_batched_tokens": "max_batch_tokens",
    "max_num_seqs": "max_requests_per_batch",
    "num_gpu_blocks_override": "num_blocks",
    "num_gpu_blocks": "num_blocks",
    "kv_cache_dtype": "k_dtype' and 'v_dtype",
    "attention_config": "attention_backend",
    "max_model_len": None,
    "enable_chunked_prefill": None,
    "swap_space": None,
    # transformers.ContinuousBatchingConfig
    "max_memory_percent": "memory_fraction",
    "allow_block_sharing": "enable_prefix_caching",
    "page_size": "block_size",
    "scheduler_type": None,
    "use_cuda_graph": None,
    "use_async_batching": None,
    "safety_margin": None,
    "max_blocks_per_request": None,
    "q_padding_interval_size": None,
    "kv_padding_interval_size": None,
    "varlen_compile_config": None,
    "decode_compile_config": None,
    "default_compile_level": None,
    "return_logprobs": None,
    "seed": None,
    # text-generation-inference
    "max_batch_prefill_tokens": "max_batch_tokens",
    "max_batch_total_tokens": "num_blocks",
    "max_batch_size": "max_requests_per_batch",
    "max_concurrent_requests": "max_queue_size",
    "cuda_memory_fraction": "memory_fraction",
}


@dataclass(frozen=True)
class PagedConfig:
    """How the pool is cut, how much of it there is, and how much runs in one step.

    Args:
        block_size: tokens in a block, a power of two from 8 to 256.
        num_blocks: blocks in the pool: `num_blocks * block_size` tokens of full context, however many layer groups the
            model has. None sizes the pool by the workload (`generate`) or by the free memory (an explicit engine).
        memory_fraction: the share of the free memory that a pool sized by itself may take, in (0, 1].
        max_batch_tokens: most tokens computed in one step (the token budget). A longer prompt is prefilled in chunks.
        max_requests_per_batch: most sequences running at once.
        max_queue_size: most requests waiting to run; one more is refused. None: no limit.
        enable_prefix_caching: keep full blocks of finished prompts, and reuse them for prompts that begin alike.
        prefix_cache_fraction: share of the pool, in [0, 1), reserved for cached prefixes: running requests evict cached
            blocks only beyond it.
        attention_backend: "auto", or the name of a registered backend; a name that can't run here raises.
        linear_backend: who multiplies with the weights of `nn.Linear` layers on a CPU. "torch" does, as outside of the
            engine. "native" is a C kernel that reads the weights as they are, and raises where it can't be built.
            "auto" takes the kernel where there is one, for as many rows as it is measured to be faster, and leaves
            models with less than 4 MiB of such weights alone. Norms, gates and rotary embeddings of float32 models go
            with it: one pass of C each, or torch's.
        k_dtype: storage type of keys: "auto" for what the model computes, "float32", "float16" or "bfloat16", or
            quantised as "float8_e4m3fn" (or "fp8") or "int8". Quantised keys take one byte a value and 4 bytes a token
            and kv head for a scale: with a head dim of 128, 52% of the bytes of a half type. They are rounded: fp8 by
            up to 1/16 of each value, int8 by up to 1/254 of the head's largest. So tokens may differ from stock's.
        v_dtype: the same for values. It may differ: keys in fp8 beside values in bfloat16 save a quarter of the bytes.

    Raises:
        ConfigError: an unknown name (with the nearest known one), or a value out of range.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float = 0.8
    max_batch_tokens: int = 512
    max_requests_per_batch: int = 256
    max_queue_size: int | None = None
    enable_prefix_caching: bool = True
    prefix_cache_fraction: float = 0.0
    attention_backend: str = "auto"
    linear_backend: str = "auto"
    k_dtype: str = "auto"
    v_dtype: str = "auto"

    def __new__(cls, *args: Any, **options: Any) -> PagedConfig:
        """Refuses unknown names first: a dataclass answers a typo with a bare TypeError, not with what was meant."""
        cls._check_names(options)
        return super().__new__(cls)

    @classmethod
    def _check_names(cls, options: Mapping[str, Any]) -> None:
        known = [field.name for field in fields(cls)]
        for name in options:
            if name in known:
                continue
            if name in FOREIGN_NAMES:
                ours = FOREIGN_NAMES[name]
                hint = f"here it is {ours!r}" if ours else "it has no counterpart here; leave it out"
                raise ConfigError(f"PagedConfig has no {name!r}: {hint}".replace('"', "'") + ".")
            raise ConfigError(f"PagedConfig has no {name!r}: {nearest(name, known)}")

    def __post_init__(self) -> None:
        for name in ("k_dtype", "v_dtype"):  # a torch.dtype is welcome too
            spelling = str(getattr(self, name)).removeprefix("torch.")
            object.__setattr__(self, name, "float8_e4m3fn" if spelling == "fp8" else spelling)
        self._require(
            "block_size",
            self._positive(self.block_size) and self.block_size in BLOCK_SIZES,
            f"one of {', '.join(map(str, BLOCK_SIZES))}",
        )
        self._require("num_blocks", self.num_blocks is None or self._positive(self.num_blocks), "a positive integer")
        share = self.memory_fraction
        self._require("memory_fraction", self._number(share) and 0 < share <= 1, "above 0 and at most 1")
        self._require("max_batch_tokens", self._positive(self.max_batch_tokens), "a positive integer")
        self._require("max_requests_per_batch", self._positive(self.max_requests_per_batch), "a positive integer")
        queue = self.max_queue_size
        self._require("max_queue_size", queue is None or self._positive(queue), "a positive integer or None")
        self._require("enable_prefix_caching", isinstance(self.enable_prefix_caching, bool), "True or False")
        share = self.prefix_cache_fraction
        self._require("prefix_cache_fraction", self._number(share) and 0 <= share < 1, "at least 0 and below 1")
        self._require("attention_backend", isinstance(self.attention_backend, str), "the name of a backend, or 'auto'")
        backends = ", ".join(LINEAR_BACKENDS)
        self._require("linear_backend", self.linear_backend in LINEAR_BACKENDS, f"one of {backends}")
        self._require("k_dtype", self.k_dtype in KV_DTYPES, f"one of {', '.join(KV_DTYPES)}")
        self._require("v_dtype", self.v_dtype in KV_DTYPES, f"one of {', '.join(KV_DTYPES)}")

    def _require(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise ConfigError(f"PagedConfig.{name} must be {expected}, not {getattr(self, name)!r}.")

    @staticmethod
    def _positive(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value > 0

    @staticmethod
    def _number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    @classmethod
    def from_any(cls, value: PagedConfig | Mapping[str, Any] | None) -> PagedConfig:
        """A PagedConfig from itself, from a mapping of its fields, or from None for the defaults."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls(**value)
        raise ConfigError(f"A cache_config must be a PagedConfig or a dict of its fields, not {type(value).__name__}.")

    def with_options(self, **changes: Any) -> PagedConfig:
        """A copy with some fields changed, checked like a new one."""
        self._check_names(changes)
        return replace(self, **changes)
