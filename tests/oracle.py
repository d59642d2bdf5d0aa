"""What is right: stock `generate` on one prompt alone, and the comparisons against it, counted."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.zoo import PAD_TOKEN_ID, VOCAB_SIZE

Ids = list[int]


@dataclass
class Tally:
    """Comparisons made in this session, and the tokens that differed in them."""

    comparisons: int = 0
    tokens: int = 0
    differing_tokens: int = 0
    notes: list[str] = field(default_factory=list)  # lines for the end of the session
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, tokens: int, differing: int) -> None:
        with self.lock:
            self.comparisons += 1
            self.tokens += tokens
            self.differing_tokens += differing

    def counts(self) -> tuple[int, int, int, list[str]]:
        """All of it, in types that go from process to process."""
        return self.comparisons, self.tokens, self.differing_tokens, self.notes

    def add_counts(self, counts: tuple[int, int, int, list[str]] | None) -> None:
        """Adds another process's; None: it died before it could tell."""
        if counts is not None:
            comparisons, tokens, differing, notes = counts
            self.comparisons += comparisons
            self.tokens += tokens
            self.differing_tokens += differing
            self.notes += notes


TALLY = Tally()

_solo_runs: weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def solo(model: PreTrainedModel, ids: Sequence[int], **generate_kwargs: Any) -> Ids:
    """New tokens of stock `generate` on that prompt alone: batch 1, no padding, greedy unless told otherwise.

    Runs are remembered for as long as the model lives, so pass a model whose weights don't change.
    """
    runs = _solo_runs.setdefault(model, {})
    key = (tuple(ids), repr(sorted(generate_kwargs.items())))
    if key not in runs:
        input_ids = torch.tensor([list(ids)])
        options = {"do_sample": False, **generate_kwargs}
        out = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)
        runs[key] = tuple(out[0, len(ids) :].tolist())
    return list(runs[key])


def differing_tokens(actual: Sequence[int], expected: Sequence[int]) -> int:
    """Positions at which two token lists differ, a missing or an extra token included."""
    same = sum(a == b for a, b in zip(actual, expected, strict=False))
    return max(len(actual), len(expected)) - same


def assert_equal_tokens(actual: Sequence[int], expected: Sequence[int], what: str = "") -> None:
    """Counts one comparison; fails with both token lists and the first position at which they differ."""
    actual, expected = list(actual), list(expected)
    differing = differing_tokens(actual, expected)
    TALLY.add(len(expected), differing)
    if differing:
        pairs = enumerate(zip(actual, expected, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), min(len(actual), len(expected)))
        raise AssertionError(f"{what}: differs from stock at new token {first}\n  ours  {actual}\n  stock {expected}")


def assert_rows_equal_solo(
    model: PreTrainedModel, prompts: Sequence[Ids], outputs: Sequence[Sequence[int]], what: str = "", **solo_kwargs: Any
) -> None:
    """Every row of new tokens equals the solo run of its prompt."""
    assert len(outputs) == len(prompts), f"{what}: {len(outputs)} rows for {len(prompts)} prompts"
    for index, (ids, out) in enumerate(zip(prompts, outputs, strict=True)):
        assert_equal_tokens(out, solo(model, ids, **solo_kwargs), f"{what} row {index} (prompt of {len(ids)})")


def assert_equal_batches(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Two `[rows, length]` results of `generate` have one shape, one type and the same rows; each row is counted."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    for index, (a, b) in enumerate(zip(actual.tolist(), expected.tolist(), strict=True)):
        assert_equal_tokens(a, b, f"{what} row {index}")


def random_prompt(length: int, seed: int) -> Ids:
    """A prompt without the padding id, drawn from its own generator."""
    rng = random.Random(seed * 1_000_003 + length)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def ragged_prompts(count: int, seed: int = 0, shortest: int = 1, longest: int = 60) -> list[Ids]:
    """Prompts of mixed lengths; the shortest and the longest are always among them where `count` allows it."""
    rng = random.Random(seed)
    lengths = [shortest, longest] + [rng.randint(shortest, longest) for _ in range(count)]
    lengths = lengths[:count]
    rng.shuffle(lengths)
    return [random_prompt(length, seed * 1000 + index) for index, length in enumerate(lengths)]


def border_prompts(block_size: int, seed: int = 0) -> list[Ids]:
    """Prompts that end just before, at and just after a block's border; two are equal, two are prefixes of another."""
    base = random_prompt(2 * block_size + 1, seed)
    return [
        base[: block_size - 1],
        base[:block_size],
        base[: block_size + 1],
        base[: 2 * block_size],
        base,
        list(base),
        base[:block_size] + random_prompt(3, seed + 1),
    ]


def left_pad(prompts: Sequence[Ids], pad_id: int = PAD_TOKEN_ID) -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids` and `attention_mask` `[B, longest]`, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def staggered_ends(model: PreTrainedModel, prompts: Sequence[Ids], max_new_tokens: int) -> list[int]:
    """An end id for each prompt, taken from its own solo run: the first prompt ends at its first token, the next ones
    later and later."""
    ends = []
    for index, ids in enumerate(prompts):
        free_run = solo(model, ids, max_new_tokens=max_new_tokens)
        ends.append(free_run[(index * 3) % len(free_run)])
    return ends
