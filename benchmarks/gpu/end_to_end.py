"""A whole model: Qwen3-0.6B's shape with random weights, on the workload that nano-vllm is measured with.

Everybody gets the same requests at once and has a limit of time. Who needs longer is measured on what it has done by
then; the row says so ("complete": false). A prefix flatters: its batch is full all the time, while a whole workload
has a tail.
"""

from __future__ import annotations

import copy
import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3Config

from benchmarks.gpu.part import Row, Setting
from benchmarks.gpu.peers import Job, Peer, run_engine, run_generate, run_generate_batch, run_hook
from benchmarks.workloads import WorkloadRequest

ENGINE = "hf_paged engine"
HOOK = "hf_paged hook"
STOCK = "stock generate"
STOCK_BATCH = "stock generate_batch, sdpa"
TOKENS = "tokens in float32"

LIMITS = {TOKENS: 20.0, ENGINE: 60.0, STOCK_BATCH: 30.0, HOOK: 35.0, STOCK: 15.0}  # seconds, in the order they run
MAX_BATCH_TOKENS = 8192  # in a step, of everybody who has such a setting
WARM_UP = (18, 5)  # prompts of as many tokens: all kernels run once
NEAR_TIE = 1e-3  # two logits closer than this may swap when sums are made in another order


def nano_vllm(num_requests: int = 256, longest: int = 1024, shortest: int = 100) -> list[WorkloadRequest]:
    """256 requests, 100 to 1,024 tokens in and out, drawn as nano-vllm's benchmark draws them."""
    drawn = random.Random(0)
    top_id = 10000 if longest == 1024 else 100
    prompts = [
        tuple(drawn.randint(0, top_id) for _ in range(drawn.randint(shortest, longest))) for _ in range(num_requests)
    ]
    return [WorkloadRequest(prompt, drawn.randint(shortest, longest)) for prompt in prompts]


def rows(setting: Setting) -> list[Row]:
    """Equality of tokens first, then what the mark is about."""
    bench = _Bench(setting)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        TOKENS: bench.compare_tokens,
        ENGINE: functools.partial(bench.measure, ENGINE, run_engine),
        STOCK_BATCH: functools.partial(bench.measure, STOCK_BATCH, run_generate_batch),
        HOOK: functools.partial(bench.measure, HOOK, run_hook),
        STOCK: functools.partial(bench.measure, STOCK, run_generate),
    }
    return [Row(name, run) for name, run in runs.items()]


class _Bench:
    """The model and the workload; the model is made when first needed."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._requests = nano_vllm(3, 5, 2) if setting.smoke else nano_vllm()

    @functools.cached_property
    def _model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
        }
        if self._setting.smoke:
            sizes = {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "intermediate_size": 64,
                "vocab_size": 128,
            }
        config = Qwen3Config(
            **sizes,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            initializer_range=3 * sizes["hidden_size"] ** -0.5,  # with the usual 0.02 it only repeats its last token
        )
        with torch.device(self._setting.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        return model

    def _job(self, model: PreTrainedModel, requests: Sequence[WorkloadRequest]) -> Job:
        return Job(model, requests, self._setting.backend_name, 64 if self._setting.smoke else MAX_BATCH_TOKENS)

    def measure(self, name: str, peer: Peer) -> dict[str, Any]:
        """Throughput and memory of one peer."""
        device = self._setting.device
        job = self._job(self._model, self._requests)
        resting = _memory(device, reset=True)
        run, close = peer(job)
        try:
            begin = time.monotonic()
            run([WorkloadRequest(tuple(range(10, 10 + size)), 2) for size in WARM_UP], begin + 60)
            started = time.monotonic()
            tokens = run(self._requests, started + self._limit(name))
            seconds = time.monotonic() - started
        finally:
            close()
        wanted = [request.num_output_tokens for request in self._requests]
        done = [min(len(row), want) for row, want in zip(tokens, wanted, strict=True)]
        return {
            "peer": name,
            "num_output_tokens": sum(done),
            "num_wanted_tokens": sum(wanted),
            "num_prompt_tokens": sum(len(request.prompt_ids) for request in self._requests),
            "complete": done == wanted,
            "workload_seconds": seconds,
            "warm_up_seconds": started - begin,
            "tokens_per_second": sum(done) / seconds,
            "peak_bytes_above_weights": _memory(device) - resting if device.type == "cuda" else None,
        }

    def _limit(self, name: str) -> float:
        later = list(LIMITS)[list(LIMITS).index(name) :]
        share = LIMITS[name] / sum(LIMITS[other] for other in later)
        return max(1.0, min(LIMITS[name], self._setting.time_left() * share - 2))

    @torch.no_grad()
    def compare_tokens(self) -> dict[str, Any]:
        """A few short requests in float32: ours and stock's tokens, equal but where two logits are nearly the same."""
        model = copy.deepcopy(self._model).float()
        count, length = (2, 3) if self._setting.smoke else (8, 48)
        requests = [WorkloadRequest(request.prompt_ids[:300], length) for request in self._requests[:count]]
        job = self._job(model, requests)
        run, close = run_engine(job)
        try:
            ours = run(requests, time.monotonic() + 60)
        finally:
            close()
        num_equal, gaps = 0, []
        for request, row in zip(requests, ours, strict=True):
            ids = torch.tensor([request.prompt_ids], device=model.device)
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length)
            stock = output[0, ids.shape[1] :].tolist()
            if row == stock:
                num_equal += 1
                continue
            place = next(i for i, (a, b) in enumerate(zip(row, stock, strict=False)) if a != b)
            prefix = torch.tensor([[*request.prompt_ids, *stock[:place]]], device=model.device)
            logits = model(prefix, logits_to_keep=1).logits[0, -1]
            gaps.append(float(logits[stock[place]] - logits[row[place]]))
        return {
            "ok": all(abs(gap) <= NEAR_TIE for gap in gaps),
            "peer": TOKENS,
            "num_requests": count,
            "num_equal": num_equal,
            "gaps_where_different": gaps,
            "num_distinct_tokens": len({token for row in ours for token in row}),
            "num_tokens": sum(map(len, ours)),
        }


def _memory(device: torch.device, reset: bool = False) -> int:
    """Most bytes allocated since the last reset; with `reset`, what is allocated now."""
    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)
