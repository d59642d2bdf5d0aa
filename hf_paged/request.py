"""A request, its sequences, and the immutable outputs that leave the engine.

Request ── what the caller asked
  └─ Sequence, n of them ── one token stream each, the unit that the scheduler runs

WAITING ──admitted──▶ RUNNING ──finished, aborted, failed──▶ FINISHED
   ▲                     │
   └─────preempted───────┘        (its tokens stay, its blocks go)

A running sequence whose tokens are all computed waits for its next token; if it is preempted then, it is IDLE:
it needs nothing until the token comes.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_paged.cache.block_table import BlockTable
    from hf_paged.cache.prefix import PrefixNode

_arrivals = itertools.count()


class SequenceState(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    IDLE = "idle"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, from the model's own logits in float32.

    `logprob` is of the token that stands there; `top` holds the most likely `(token id, logprob)`, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds of `time.monotonic()`; None where it hasn't happened yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True, eq=False)
class SequenceOutput:
    """A snapshot of one sequence. It never changes, however far the sequence goes on.

    `finish_reason` is "stop", "length", "abort" or "error", None while it runs; `stop_reason` is the token id or the
    string that stopped it.
    """

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    # The sequence's own lists only ever grow, so a snapshot is a list and a length: copying all tokens at every step
    # would be quadratic.
    _tokens: list[int] = field(repr=False)
    _start: int = field(repr=False)
    _stop: int = field(repr=False)
    _logprobs: list[TokenLogprobs] | None = field(repr=False)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """An entry a generated token, or None where they were not asked for."""
        return None if self._logprobs is None else tuple(self._logprobs[: self.num_tokens])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens, the stop token included, the prompt not."""
        return tuple(self._tokens[self._start : self._stop])

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated."""
        return self._stop - self._start


@dataclass(frozen=True, eq=False)
class RequestOutput:
    """A snapshot of one request: its prompt, and each of its sequences as far as they are."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[SequenceOutput, ...]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: BaseException | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens of the only sequence."""
        return self._only().token_ids

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of the only sequence."""
        return self._only().finish_reason

    def _only(self) -> SequenceOutput:
        if len(self.outputs) != 1:
            raise AttributeError(
                f"Request {self.request_id!r} has {len(self.outputs)} sequences; read them in .outputs."
            )
        return self.outputs[0]


class Sequence:
    """One token stream. `token_ids` only ever grows; `num_computed_tokens` of them have their K/V in the cache."""

    def __init__(self, request: Request, index: int, token_ids: list[int]) -> None:
        self.request = request
        self.index = index
        self.token_ids = token_ids
        self.num_computed_tokens = 0
        self.state = SequenceState.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.next_logits: Any = None  # for a token chosen outside the engine
        # guesses at what comes after `token_ids`, and the probabilities that they were drawn with
        self.draft_token_ids: list[int] = []
        self.draft_probs: Any = None  # [drafts, vocab]
        self.num_revocable_tokens = 0  # of the last tokens, how many may be taken back
        self.has_long_frequencies = False  # what its first tokens were rotated with, where a model has two sets
        self.history: Any = None  # what processors and criteria see of it, kept by the engine
        # owned by the block allocator
        self.block_tables: list[BlockTable] = []
        self.prefix_node: PrefixNode | None = None
        self.num_indexed_blocks = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and generated."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose K/V is not in the cache yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended, for whatever reason."""
        return self.state is SequenceState.FINISHED

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first: lower priority values, then earlier arrival, then lower index."""
        return (self.request.priority, self.request.arrival, self.index)

    def snapshot(self) -> SequenceOutput:
        """What the caller sees of it now."""
        return SequenceOutput(
            index=self.index,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            _tokens=self.token_ids,
            _start=self.request.num_prompt_tokens,
            _stop=len(self.token_ids),
            _logprobs=self.logprobs if self.request.wants_logprobs else None,
        )


class Request:
    """What a caller asked for, and how far it is.

    Args:
        request_id: unique among the unfinished requests of an engine.
        prompt_token_ids: at least one token.
        max_new_tokens: most tokens generated a sequence.
        num_sequences: sequences that share the prompt (`num_return_sequences`).
        priority: lower runs first.
        cache_salt: only requests with an equal salt share prefix blocks.
        adapter: the name of an adapter, "__base__" for none, None for the model's active ones. Only requests with an
            equal one share prefix blocks; another version of it is another version of the weights.
        prompt_embeds: `[prompt, hidden]`, for a prompt whose tokens only count; opaque here.
        given: K and V of its first tokens, which are not computed then and share no prefixes; opaque here but for its
            `num_tokens`, which leave at least one token to compute.
        sampling: how tokens are chosen and when to stop; opaque here.
        wants_logprobs: outputs carry the log probabilities of generated tokens.
        wants_prompt_logprobs: the whole prompt is computed, so cached prefixes are not used.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        max_new_tokens: int,
        *,
        num_sequences: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        prompt_embeds: Any = None,
        given: Any = None,
        sampling: Any = None,
        wants_logprobs: bool = False,
        wants_prompt_logprobs: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.max_new_tokens = max_new_tokens
        self.num_sequences = num_sequences
        self.priority = priority
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.prompt_embeds = prompt_embeds
        self.given = given
        self.sampling = sampling
        self.wants_logprobs = wants_logprobs
        self.wants_prompt_logprobs = wants_prompt_logprobs
        self.arrive()
        self.arrival_time = time.monotonic()
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.finished_time: float | None = None
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self._prompt_logprobs_shown: tuple[TokenLogprobs | None, ...] = ()
        self.error: BaseException | None = None
        self.is_abandoned = False  # nobody reads its outputs: who asked has left, or looks at the request itself
        self.sequences = [Sequence(self, 0, list(self.prompt_token_ids))]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_given_tokens(self) -> int:
        """Tokens of the prompt whose K and V the caller brought."""
        return 0 if self.given is None else int(self.given.num_tokens)

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def max_computed_tokens(self) -> int:
        """Most tokens whose K/V a sequence can ever hold: the last generated token is never fed back."""
        return self.num_prompt_tokens + self.max_new_tokens - 1

    @property
    def is_external(self) -> bool:
        """Whether someone outside the engine chooses its tokens, and nobody reads its outputs."""
        return bool(getattr(self.sampling, "is_external", False))

    def arrive(self) -> None:
        """Takes its place in the order of arrival, behind all others."""
        self.arrival = next(_arrivals)

    def snapshot(self) -> RequestOutput:
        """What the caller sees of it now."""
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(sequence.snapshot() for sequence in self.sequences),
            finished=self.is_finished,
            num_cached_tokens=self.num_cached_tokens or 0,
            metrics=RequestMetrics(
                self.arrival_time, self.first_scheduled_time, self.first_token_time, self.finished_time
            ),
            prompt_logprobs=self._prompt_logprobs_so_far(),
            error=self.error,
        )

    def _prompt_logprobs_so_far(self) -> tuple[TokenLogprobs | None, ...] | None:
        if not self.wants_prompt_logprobs:
            return None
        if len(self._prompt_logprobs_shown) != len(self.prompt_logprobs):  # once a chunk, not once an output
            self._prompt_logprobs_shown = tuple(self.prompt_logprobs)
        return self._prompt_logprobs_shown
