"""Workloads as data: the token ids of every request and how many tokens it wants back. Equal arguments, equal ids."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

FIRST_ID, LAST_ID = 10, 49_000  # plain tokens of SmolLM2: ids from the first up to, not including, the last
NUM_TURNS = 4  # of a conversation


@dataclass(frozen=True)
class WorkloadRequest:
    """One prompt. Exactly `num_output_tokens` tokens are wanted for each of `num_sequences` answers.

    `follows` is the index of the request whose prompt and answer stand before this one's ids: a conversation's last
    turn. It can't start before that one is answered.
    """

    prompt_ids: tuple[int, ...]
    num_output_tokens: int
    num_sequences: int = 1
    follows: int | None = None


@dataclass(frozen=True)
class Workload:
    """Requests in their order of arrival; all that follow none are there at the start."""

    name: str
    requests: tuple[WorkloadRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, conversations included."""
        return sum(self._prompt_lengths())

    @property
    def num_output_tokens(self) -> int:
        """Tokens wanted back, over all answers."""
        return sum(request.num_output_tokens * request.num_sequences for request in self.requests)

    @property
    def is_sampled(self) -> bool:
        """Whether answers are drawn: several greedy ones of a prompt would be one."""
        return is_sampled(self.requests)

    def _prompt_lengths(self) -> list[int]:
        lengths: list[int] = []
        for request in self.requests:
            before = 0
            if request.follows is not None:
                before = lengths[request.follows] + self.requests[request.follows].num_output_tokens
            lengths.append(before + len(request.prompt_ids))
        return lengths


def is_sampled(requests: Iterable[WorkloadRequest]) -> bool:
    """Whether any request wants more than one answer."""
    return any(request.num_sequences > 1 for request in requests)


def answers_of(requests: Sequence[WorkloadRequest], tokens: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """A list of answers a request, from a list that has all answers in a row."""
    rest = iter(tokens)
    return [[next(rest) for _ in range(request.num_sequences)] for request in requests]


def complete(
    requests: Sequence[WorkloadRequest], answers: Sequence[Sequence[Sequence[int]] | None]
) -> list[WorkloadRequest | None]:
    """The requests with everything before their ids put in front; None where that isn't known yet.

    Args:
        requests: of one workload.
        answers: the answers to each, None where there is none so far.
    """
    whole: list[WorkloadRequest | None] = []
    for request in requests:
        if request.follows is None:
            whole.append(request)
            continue
        before, said = whole[request.follows], answers[request.follows]
        if before is None or said is None:
            whole.append(None)
        else:
            ids = (*before.prompt_ids, *said[0], *request.prompt_ids)
            whole.append(replace(request, prompt_ids=ids, follows=None))
    return whole


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


def multi_turn(num_requests: int = 32, seed: int = 1, first_id: int = FIRST_ID, last_id: int = LAST_ID) -> Workload:
    """Conversations of four turns, all at once: every turn's prompt is all that was said before, and a new message.

    Messages are lognormal(3.4, 0.7) within 4 to 256 tokens, answers lognormal(3.4, 0.7) within 4 to 128.
    """
    rng = random.Random(seed)
    num_conversations = max(1, num_requests // NUM_TURNS)
    requests = []
    for turn in range(NUM_TURNS):
        for conversation in range(num_conversations):
            message_length = _lognormal(rng, 3.4, 0.7, 4, 256)
            output_length = _lognormal(rng, 3.4, 0.7, 4, 128)
            follows = (turn - 1) * num_conversations + conversation if turn else None
            message = _ids(rng, message_length, first_id, last_id)
            requests.append(WorkloadRequest(message, output_length, follows=follows))
    return Workload("multi-turn", tuple(requests))


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


def long_among_short(
    num_requests: int = 32, seed: int = 1, first_id: int = FIRST_ID, last_id: int = LAST_ID
) -> Workload:
    """Prompts of 16 to 96 tokens that want 16 to 64, and every eighth one, from the fourth on, of 2,048 that wants 16.

    What a long prompt does to the others' tails.
    """
    rng = random.Random(seed)
    requests = []
    for index in range(num_requests):
        is_long = index % 8 == 3
        prompt_length = 2048 if is_long else rng.randrange(16, 97)
        output_length = 16 if is_long else rng.randrange(16, 65)
        requests.append(WorkloadRequest(_ids(rng, prompt_length, first_id, last_id), output_length))
    return Workload("long among short", tuple(requests))


def alone(num_requests: int = 1, seed: int = 1, first_id: int = FIRST_ID, last_id: int = LAST_ID) -> Workload:
    """One request of 64 tokens that wants 128. More of them come one after another, never two at once."""
    rng = random.Random(seed)
    requests = [
        WorkloadRequest(_ids(rng, 64, first_id, last_id), 128, follows=index - 1 if index else None)
        for index in range(num_requests)
    ]
    return Workload("alone", tuple(requests))


def conversation(num_requests: int = 64, seed: int = 1, first_id: int = FIRST_ID, last_id: int = LAST_ID) -> Workload:
    """Lengths of Azure's public trace of chats, 2023: lognormal(6.63, 0.99) in, lognormal(5.02, 0.86) out."""
    return _lengths("conversation", num_requests, (6.63, 0.99), (5.02, 0.86), seed, first_id, last_id)


def code(num_requests: int = 64, seed: int = 1, first_id: int = FIRST_ID, last_id: int = LAST_ID) -> Workload:
    """Lengths of Azure's public trace of code completion, 2023: lognormal(7.00, 1.36) in, lognormal(2.79, 0.85) out."""
    return _lengths("code", num_requests, (7.00, 1.36), (2.79, 0.85), seed, first_id, last_id)


class Maker(NamedTuple):
    """Makes a workload of so many requests, from `first_id` up to `last_id`."""

    make: Callable[..., Workload]
    num_requests: int


WORKLOADS: dict[str, Maker] = {
    "mixed": Maker(mixed, 32),
    "mixed-128": Maker(mixed, 128),
    "chat": Maker(chat, 64),
    "multi-turn": Maker(multi_turn, 32),
    "parallel": Maker(parallel_sampling, 4),
    "long-short": Maker(long_among_short, 32),
    "alone": Maker(alone, 1),
    "conversation": Maker(conversation, 64),
    "code": Maker(code, 64),
}


def _lengths(
    name: str,
    num_requests: int,
    prompt: tuple[float, float],
    output: tuple[float, float],
    seed: int,
    first_id: int,
    last_id: int,
) -> Workload:
    # both within what a context of 8,192 holds
    rng = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        prompt_length = _lognormal(rng, *prompt, 8, 4096)
        output_length = _lognormal(rng, *output, 4, 1024)
        requests.append(WorkloadRequest(_ids(rng, prompt_length, first_id, last_id), output_length))
    return Workload(name, tuple(requests))


def _lognormal(rng: random.Random, mu: float, sigma: float, low: int, high: int) -> int:
    return min(high, max(low, int(rng.lognormvariate(mu, sigma))))


def _ids(rng: random.Random, count: int, first_id: int, last_id: int) -> tuple[int, ...]:
    return tuple(rng.randrange(first_id, last_id) for _ in range(count))
