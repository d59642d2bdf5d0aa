"""The least time that a workload's matrix products can take in float32 without reuse, at this machine's best rate.

Every token that is fed goes through all linear layers, every token that comes out through the vocabulary projection
once. The last token of an answer is not fed.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

SIZE = 1536  # of the square matrices: their products are bound by arithmetic, and each takes some 50 ms on two cores
SECONDS = 2.0


def gemm_flops_per_second(seconds: float = SECONDS) -> float:
    """The best rate of a float32 product, over as many as fit into `seconds`."""
    left, right = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    torch.mm(left, right)
    best = float("inf")
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        begin = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - begin)
    return 2 * SIZE**3 / best


def model_flops(folder: str) -> dict[str, Any]:
    """Operations of a model's products: `per_token` that is fed, and `per_output` token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    head = model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    return {
        "per_token": 2 * sum(module.weight.numel() for module in linears),
        "per_output": 2 * head.weight.numel(),
    }


def limit_seconds(num_prompt_tokens: int, num_output_tokens: int, flops: dict[str, Any], rate: float) -> float:
    """Seconds of a workload's products at `rate` operations a second."""
    total = (num_prompt_tokens + num_output_tokens) * flops["per_token"] + num_output_tokens * flops["per_output"]
    return float(total / rate)
