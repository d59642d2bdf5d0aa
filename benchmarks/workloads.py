"""Workloads as data: the token ids of every request and how many tokens it wants back. Equal arguments, equal ids."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_ID, LAST_ID = 10, 49_000  # plain tokens of SmolLM2: ids from the first up to, not including, the last


@dataclass(frozen=True)
class WorkloadRequest:
    """One prompt. Exactly `num_output_tokens` tokens are wanted for each of `num_sequences` answers."""

    prompt_ids: tuple[int, ...]
    num_output_tokens: int
    num_sequences: int = 1


@dataclass(frozen=True)
class Workload:
    """Requests in their order of arrival; all of them are there at the start."""

    name: str
    requests: tuple[WorkloadRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens wanted back, over all answers."""
        return sum(request.num_output_tokens * request.num_sequences for request in self.requests)


def mixed(num_requests: int = 32, seed: int = 1, first_id: int = FIRST_ID, last_id: int = LAST_ID) -> Workload:
    """Short and long prompts that want short and long answers.

    Prompt lengths are lognormal(4.2, 0.9) within 8 to 512, output lengths lognormal(3.6, 0.9) within 4 to 192. A
    request draws its prompt length, then its output length, then its ids. With the defaults: 3,163 tokens in and
    1,261 out; 128 requests have 12,400 and 6,539.
    """
    rng = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        prompt_length = _lognormal(rng, 4.2, 0.9, 8, 512)
        output_length = _lognormal(rng, 3.6, 0.9, 4, 192)
        requests.append(WorkloadRequest(_ids(rng, prompt_length, first_id, last_id), output_length))
    return Workload("mixed", tuple(requests))


def chat(num_requests: int = 32, seed: int = 1, first_id: int = FIRST_ID, last_id: int = LAST_ID) -> Workload:
    """Many users of one assistant: a system prompt of 256 tokens, then a message of each user's own."""
    rng = random.Random(seed)
    system = _ids(rng, 256, first_id, last_id)
    requests = []
    for _ in range(num_requests):
        message_length = _lognormal(rng, 3.4, 0.7, 4, 256)
        output_length = _lognormal(rng, 3.6, 0.9, 4, 192)
        requests.append(WorkloadRequest(system + _ids(rng, message_length, first_id, last_id), output_length))
    return Workload("chat", tuple(requests))


def parallel_sampling(
    num_requests: int = 4, seed: int = 1, first_id: int = FIRST_ID, last_id: int = LAST_ID
) -> Workload:
    """Eight answers to each prompt, which are lognormal(5.0, 0.5) within 64 to 512 tokens."""
    rng = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        prompt_length = _lognormal(rng, 5.0, 0.5, 64, 512)
        output_length = _lognormal(rng, 3.6, 0.9, 4, 192)
        prompt_ids = _ids(rng, prompt_length, first_id, last_id)
        requests.append(WorkloadRequest(prompt_ids, output_length, num_sequences=8))
    return Workload("parallel sampling", tuple(requests))


def _lognormal(rng: random.Random, mu: float, sigma: float, low: int, high: int) -> int:
    return min(high, max(low, int(rng.lognormvariate(mu, sigma))))


def _ids(rng: random.Random, count: int, first_id: int, last_id: int) -> tuple[int, ...]:
    return tuple(rng.randrange(first_id, last_id) for _ in range(count))
