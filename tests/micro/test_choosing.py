"""Choosing the next tokens of 64 sequences, from a vocabulary of 49,152."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from transformers import GPT2Config, GPT2LMHeadModel

from hf_paged.engine.params import RequestResolver
from hf_paged.engine.sampler import SamplerRow, choose
from hf_paged.request import Request

NUM_ROWS = 64
VOCAB_SIZE = 49_152


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


def _rows(*keywords: dict[str, Any]) -> list[SamplerRow]:
    """Row i has the i-th keywords, over and over."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=8, n_layer=1, n_head=1))
    resolver = RequestResolver(model, None, VOCAB_SIZE)
    rows = []
    for index in range(NUM_ROWS):
        resolved = resolver.resolve(model, 8, {"max_new_tokens": 8, **keywords[index % len(keywords)]})
        request = Request(f"request-{index}", range(8), 8, sampling=resolved.sampling)
        request.wants_logprobs = resolved.sampling.num_logprobs is not None
        rows.append(SamplerRow(request.sequences[0], index))
    return rows


GREEDY: dict[str, Any] = {"do_sample": False}
SEEDED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "seed": 1}
PENALISED: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.1}
WITH_LOGPROBS: dict[str, Any] = {"do_sample": False, "logprobs": 5}


@pytest.mark.parametrize(
    "keywords",
    [
        pytest.param((GREEDY,), id="greedy"),
        pytest.param((SEEDED,), id="top-k with a seed each"),
        pytest.param((GREEDY, SEEDED), id="greedy and top-k in turn"),
        pytest.param((PENALISED,), id="a repetition penalty each"),
        pytest.param((WITH_LOGPROBS,), id="greedy with five log probabilities"),
    ],
)
def test_choosing(benchmark: BenchmarkFixture, logits: torch.Tensor, keywords: tuple[dict[str, Any], ...]) -> None:
    rows = _rows(*keywords)
    choices = benchmark(choose, rows, logits)
    assert all(choice.error is None for choice in choices)
    greedy = logits.argmax(dim=-1).tolist()
    for index, choice in enumerate(choices):
        if keywords[index % len(keywords)] in (GREEDY, WITH_LOGPROBS):
            assert choice.token_id == greedy[index]
    assert all((choice.logprobs is not None) == (keywords[0] is WITH_LOGPROBS) for choice in choices)
