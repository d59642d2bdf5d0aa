"""A scheduler with a model that only remembers: every slot holds what the token that was written there had before it.

The history of a token is a chain of (history of the token before, token, weights it was computed with), below the
request's salt. What a sequence reads through its tables must be its own history, token by token: a wrong prefix hit, a
missed copy, a block written while shared or given away too early shows as somebody else's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

from hf_paged.cache.allocator import BlockAllocator, BlockGroup
from hf_paged.cache.block_table import BlockTable
from hf_paged.request import Request, Sequence, SequenceState
from hf_paged.scheduler.output import SchedulerOutput
from hf_paged.scheduler.scheduler import Scheduler

_Link = tuple[int, int, int]  # history before, token, weights


class FakeEngine:
    """Steps, tokens, ends and siblings as the engine does them, with memory that is checked.

    Args:
        windows: one layer group each, None for full context.
        num_blocks, block_size, budget, max_sequences, caching, reserved: the allocator's and the scheduler's settings.
    """

    def __init__(
        self,
        windows: SequenceOf[int | None],
        num_blocks: int,
        block_size: int,
        budget: int,
        max_sequences: int,
        caching: bool = True,
        reserved: float = 0.0,
    ) -> None:
        self.allocator = BlockAllocator(
            [BlockGroup(window) for window in windows],
            block_size,
            num_blocks,
            max_batch_tokens=budget,
            max_sequences=max_sequences,
            enable_prefix_caching=caching,
            prefix_cache_fraction=reserved,
        )
        self.scheduler = Scheduler(self.allocator, budget, max_sequences)
        self.requests: list[Request] = []
        self.weights = 0
        self.num_steps = 0
        self.num_hits = 0
        self.num_copies = 0
        self.num_taken_back = 0
        self._memory: list[dict[int, int]] = [{} for _ in windows]  # slot -> history
        self._links: dict[_Link | tuple[str | None], int] = {}
        # the tables that a sequence was admitted with, and the histories of the tokens whose K/V it has in them
        self._histories: dict[Sequence, tuple[list[BlockTable], list[int]]] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> list[Sequence]:
        """Every unfinished sequence, the oldest request first."""
        return [s for request in self.requests for s in request.sequences if not s.is_finished]

    def fits(self, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """What the engine asks before it takes a request."""
        limit = self.allocator.max_tokens_per_sequence
        return limit is None or num_prompt_tokens + max_new_tokens - 1 <= limit

    def add(self, request: Request) -> None:
        assert self.fits(request.num_prompt_tokens, request.max_new_tokens)
        self.requests.append(request)
        self.scheduler.add(request.sequences[0])

    def abort(self, request: Request) -> None:
        for sequence in request.sequences:
            if not sequence.is_finished:
                self.scheduler.finish(sequence)
        self._forget_finished()

    def give_token(self, sequence: Sequence, token: int) -> None:
        """The next token of a sequence that waits for one from outside, or its end."""
        if sequence.num_generated_tokens + 1 >= sequence.request.max_new_tokens:
            self.scheduler.finish(sequence)
        else:
            sequence.token_ids.append(token)
            if sequence.state is SequenceState.IDLE:
                self.scheduler.add(sequence)
        self._forget_finished()

    def awaiting_token(self) -> list[Sequence]:
        """Sequences driven from outside that have all their tokens computed, preempted since or not."""
        return [
            s
            for s in self.sequences
            if s.request.sampling == "external"
            and (s.state is SequenceState.IDLE or (s.state is SequenceState.RUNNING and not s.num_uncomputed_tokens))
        ]

    def new_weights(self) -> None:
        """The weights change and the prefixes are reset, whatever runs."""
        self.weights += 1
        self.allocator.reset_prefix_cache()

    def _forget_finished(self) -> None:
        self.requests = [request for request in self.requests if not request.is_finished]
        kept = set(self.sequences)
        self._histories = {sequence: history for sequence, history in self._histories.items() if sequence in kept}

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self, rng: random.Random) -> bool:
        """One step; False if there was nothing to compute. `rng` chooses tokens and ends."""
        has_work = any(
            s.state is SequenceState.WAITING or (s.state is SequenceState.RUNNING and s.num_uncomputed_tokens)
            for s in self.sequences
        )
        running = [s for s in self.scheduler.running if s.num_uncomputed_tokens]
        self._propose(rng)
        output = self.scheduler.schedule()
        assert bool(output.scheduled) == has_work, "there was work, and nothing was scheduled"
        self.num_steps += 1
        if not output.scheduled:
            return False
        if running:
            # One that waits may come before it: its priority is higher, or it was preempted while it was idle.
            assert output.scheduled[0].sequence.order <= running[0].order, "the oldest did not progress"
        self._forward(output)
        caught_up = []
        for item in output.scheduled:
            is_last_chunk = item.is_last_chunk
            item.sequence.num_computed_tokens += item.num_new_tokens - item.num_draft_tokens
            self.allocator.commit(item.sequence)
            if item.num_draft_tokens:
                self._check_drafts(item.sequence, rng.randint(0, item.num_draft_tokens))
            if is_last_chunk:
                caught_up += [item.sequence, *self._siblings(item.sequence)]
        for sequence in caught_up:
            if sequence.request.sampling == "external":
                continue
            sequence.token_ids.append(rng.randint(0, 1))
            sequence.draft_token_ids = []
            if sequence.num_generated_tokens >= sequence.request.max_new_tokens or rng.random() < 0.05:
                self.scheduler.finish(sequence)
        self._forget_finished()
        return True

    def _propose(self, rng: random.Random) -> None:
        # who decodes may get guesses, but never more than it may still generate
        for sequence in self.scheduler.running:
            most = sequence.request.max_new_tokens - sequence.num_generated_tokens - 1
            decodes = sequence.num_uncomputed_tokens == 1 and sequence.num_generated_tokens
            if decodes and sequence.request.sampling != "external" and not sequence.draft_token_ids:
                sequence.draft_token_ids = [rng.randint(0, 1) for _ in range(min(most, rng.randint(0, 5)))]

    def _check_drafts(self, sequence: Sequence, num_accepted: int) -> None:
        sequence.token_ids += sequence.draft_token_ids[:num_accepted]
        sequence.num_computed_tokens += num_accepted
        self.allocator.trim(sequence)
        del self._histories[sequence][1][sequence.num_computed_tokens :]
        self.num_taken_back += 1

    def _siblings(self, parent: Sequence) -> list[Sequence]:
        request = parent.request
        born = []
        for index in range(len(request.sequences), request.num_sequences):
            child = Sequence(request, index, list(request.prompt_token_ids))
            request.sequences.append(child)
            self.scheduler.fork(parent, child)
            self._histories[child] = (child.block_tables, list(self._histories[parent][1]))
            born.append(child)
        return born

    def _forward(self, output: SchedulerOutput) -> None:
        scheduled = output.scheduled
        assert len({id(item.sequence) for item in scheduled}) == len(scheduled) <= self.scheduler.max_sequences
        assert output.num_tokens == sum(item.num_new_tokens for item in scheduled) <= self.scheduler.max_batch_tokens
        assert all(item.num_new_tokens > 0 for item in scheduled), "a sequence was scheduled for nothing"
        for group, copies in enumerate(output.copies):
            self._copy(group, copies)
        for item in scheduled:
            self._write(item.sequence, item.num_new_tokens)
        for item in scheduled:
            self._read(item.sequence, item.num_new_tokens)

    def _copy(self, group: int, copies: SequenceOf[tuple[int, int]]) -> None:
        size, memory = self.allocator.block_size, self._memory[group]
        self.num_copies += len(copies)
        assert len({destination for _, destination in copies}) == len(copies), "a block is written by two copies"
        # all sources are read before any destination is written, as one gather and one scatter do
        contents = [[memory.get(source * size + offset) for offset in range(size)] for source, _ in copies]
        for (_, destination), content in zip(copies, contents, strict=True):
            for offset, history in enumerate(content):
                memory.pop(destination * size + offset, None)
                if history is not None:
                    memory[destination * size + offset] = history

    def _link(self, before: int, token: int) -> int:
        return self._links.setdefault((before, token, self.weights), len(self._links))

    def _start(self, sequence: Sequence) -> int:
        return self._links.setdefault((sequence.request.cache_salt,), len(self._links))

    def _history_of_hit(self, sequence: Sequence) -> list[int]:
        # whatever a hit brings must have been computed by the weights of now
        history, chain = self._start(sequence), []
        for token in sequence.token_ids[: sequence.num_computed_tokens]:
            history = self._link(history, token)
            chain.append(history)
        self.num_hits += bool(chain)
        return chain

    def _write(self, sequence: Sequence, num_new_tokens: int) -> None:
        size, start = self.allocator.block_size, sequence.num_computed_tokens
        admitted_with, chain = self._histories.get(sequence, (None, []))
        if admitted_with is not sequence.block_tables:  # admitted in this step
            chain = self._history_of_hit(sequence)
            self._histories[sequence] = (sequence.block_tables, chain)
        assert len(chain) == start
        tokens = [*sequence.token_ids, *sequence.draft_token_ids]
        for position in range(start, start + num_new_tokens):
            chain.append(self._link(chain[-1] if chain else self._start(sequence), tokens[position]))
            for group, pool in enumerate(self.allocator.pools):
                block = sequence.block_tables[group].blocks[position // size]
                assert block >= 0, "a token goes to a block that was given back"
                assert pool.ref_count(block) == 1, "a shared block is written"
                self._memory[group][block * size + position % size] = chain[-1]

    def _read(self, sequence: Sequence, num_new_tokens: int) -> None:
        size, chain = self.allocator.block_size, self._histories[sequence][1]
        for group, spec in enumerate(self.allocator.groups):
            memory, blocks = self._memory[group], sequence.block_tables[group].blocks
            for position in range(spec.first_needed_token(sequence.num_computed_tokens), len(chain)):
                block = blocks[position // size]
                assert block >= 0, "a token in sight lies in a block that was given back"
                assert memory.get(block * size + position % size) == chain[position], "someone else's token was read"

    # -- ends ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.allocator.check(self.sequences)
        held = [s for s in self.sequences if s.block_tables]
        assert {id(s) for s in held} <= {id(s) for s in self.scheduler.running}
        assert sorted(s.order for s in self.scheduler.running) == [s.order for s in self.scheduler.running]
        assert all(s.state is SequenceState.RUNNING for s in self.scheduler.running)
        waiting = sum(s.state is SequenceState.WAITING for s in self.sequences)
        assert waiting == self.scheduler.num_waiting

    def drain(self, rng: random.Random, limit: int = 3000) -> None:
        """Runs everything to its end; fails if that takes more than `limit` steps, or if anything stays behind."""
        for _ in range(limit):
            if not self.requests:
                break
            for sequence in self.awaiting_token():
                self.give_token(sequence, rng.randint(0, 1))
            self.step(rng)
            self.check()
        assert not self.requests, f"requests unfinished after {limit} steps"
        assert self.scheduler.running == []
        assert all(pool.num_referenced == 0 for pool in self.allocator.pools)
        self.allocator.reset_prefix_cache()
        self.check()
        assert all(pool.num_free == pool.num_blocks for pool in self.allocator.pools)
