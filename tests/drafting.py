"""Models, prompts and distributions for tests of speculative decoding."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from statistics import NormalDist
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from tests import zoo
from tests.oracle import Ids

FEW = 8  # a vocabulary so small that tokens follow each other as they did before
NAMES = ("llama", "mistral", "gemma2")


@functools.cache
def model_of_few(name: str) -> PreTrainedModel:
    """A model of a small vocabulary: what it generates repeats itself, and lookups are often right."""
    return zoo.fresh(name, vocab_size=FEW)


def prompts_of_few(count: int, seed: int = 0, shortest: int = 3, longest: int = 40) -> list[Ids]:
    """Ragged prompts for such a model."""
    rng = random.Random(seed)
    lengths = [shortest, longest, *(rng.randint(shortest, longest) for _ in range(count))][:count]
    return [[rng.randrange(1, FEW) for _ in range(length)] for length in lengths]


def assistant_of(model: PreTrainedModel, noise: float = 0.1, num_tokens: int = 4, **config: Any) -> PreTrainedModel:
    """A copy that is right often and wrong often; `noise` 0 is always right."""
    assistant = copy.deepcopy(model)
    assistant.generation_config.update(
        **{
            "num_assistant_tokens": num_tokens,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
            **config,
        }
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return assistant


# -- distributions -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def exact_distribution(
    model: PreTrainedModel, prompt: Ids, num_tokens: int, processors: LogitsProcessorList
) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `num_tokens` tokens, from the model's logits and the processors."""
    vocab = model.config.vocab_size
    paths = torch.tensor(list(itertools.product(range(vocab), repeat=num_tokens)))
    ids = torch.cat([torch.tensor(prompt).expand(len(paths), -1), paths], dim=1)
    logits = model(ids, use_cache=False).logits.float()
    chance = torch.ones(len(paths), dtype=torch.float64)
    for index in range(num_tokens):
        length = len(prompt) + index
        scores = processors(ids[:, :length], logits[:, length - 1].clone())
        chance *= scores.double().softmax(-1).gather(1, paths[:, index : index + 1])[:, 0]
    assert abs(float(chance.sum()) - 1) < 1e-9
    return {tuple(path): float(value) for path, value in zip(paths.tolist(), chance, strict=True)}


def chi_square(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """Pearson's statistic of drawn continuations, and the value that it passes once in a million by chance.

    Cells that expect fewer than five are taken together. The bound is Wilson and Hilferty's.
    """
    total = sum(counts.values())
    assert all(expected[path] > 0 for path in counts), "something impossible was drawn"
    cells, rest_seen, rest_expected = [], 0, 0.0
    for path, chance in expected.items():
        if total * chance >= 5:
            cells.append((counts.get(path, 0), total * chance))
        else:
            rest_seen, rest_expected = rest_seen + counts.get(path, 0), rest_expected + total * chance
    if rest_expected:
        cells.append((rest_seen, rest_expected))
    freedom = len(cells) - 1
    assert freedom >= 10, "too few cells to tell distributions apart"
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    spread = 2 / (9 * freedom)
    bound = freedom * (1 - spread + NormalDist().inv_cdf(1 - 1e-6) * spread**0.5) ** 3
    return statistic, bound
