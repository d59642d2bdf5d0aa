"""Paged attention on a CPU, native beside torch, with the heads of SmolLM2: 9 and 3, of 64 numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from hf_paged.kernels.registry import available_backends, resolve_backend
from tests.kernels.packed import Packed, decodes, pack

NUM_LAYERS = 4  # so that one layer's K and V are not all that the CPU's caches hold


def _lengths(count: int) -> list[int]:
    rng = random.Random(1)
    return [rng.randint(3, 400) for _ in range(count)]


STEPS = {
    "decode of 1 of 400 tokens": decodes([400]),
    "decode of 32 of 3 to 400 tokens": decodes(_lengths(32)),
    "decode of 64 of 3 to 400 tokens": decodes(_lengths(64)),
    "decode of 4 of 4000 tokens": decodes([4000] * 4),
    "check of 5 tokens in 8 of 300": [(5, 300)] * 8,
    "chunk of 64 of 1024": [(64, 1024)],
    "prompt of 512": [(512, 512)],
    "chunk of 512 of 2048": [(512, 2048)],
    "mixed": [*decodes(_lengths(30)), (200, 200), (180, 180), (100, 300)],
}


def _layers(lengths: list[tuple[int, int]]) -> list[Packed]:
    layers = [pack(lengths, num_kv_heads=3, group_size=3, head_dim=64) for _ in range(NUM_LAYERS)]
    return [replace(layer, metadata=layers[0].metadata) for layer in layers]  # a step has one


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_attention_of_four_layers(benchmark: BenchmarkFixture, lengths: list[tuple[int, int]], name: str) -> None:
    reason = available_backends("cpu")[name]
    if reason is not None:
        pytest.skip(f"the {name} backend can't run: {reason}")
    backend, layers = resolve_backend(name, "cpu"), _layers(lengths)

    def step() -> torch.Tensor:
        layers[0].metadata.plans.clear()  # a new step plans anew
        return torch.stack([backend.attend(p.query, p.blocks, p.metadata, p.params) for p in layers])

    assert benchmark(step).isfinite().all()
