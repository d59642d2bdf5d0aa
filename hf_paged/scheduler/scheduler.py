"""Who runs next.

There are no phases. Every sequence only ever catches `num_computed_tokens` up to `num_tokens`: a new prompt, a chunk of
a long one, a decode, a resume after preemption and a prefix hit are the same thing with different numbers. So is a
check of draft tokens: a decode with some more behind it, as far as budget and blocks are left over.

    one step of schedule(), budget 8          uncomputed   gets
      running, oldest first   a                    1         1      decode
                              b                   20         7      next chunk of a long prompt
      waiting, first come     c                    5         -      no budget left
"""

from __future__ import annotations

import bisect
import heapq
import time

from hf_paged.cache.allocator import BlockAllocator, BlockCopy
from hf_paged.request import Sequence, SequenceState
from hf_paged.scheduler.output import ScheduledSequence, SchedulerOutput


class Scheduler:
    """Chooses the tokens of each step within a token budget.

    The oldest sequence always progresses: when blocks run out, the newest one that runs gives up its own and computes
    them again later. A sequence is admitted only when all of its known tokens fit beside the blocks
    that those that run need for theirs and one more, so that admission doesn't cause preemption in the very next step.

    Args:
        allocator: where blocks come from.
        max_batch_tokens: most tokens in one step.
        max_sequences: most sequences in one step.
    """

    def __init__(self, allocator: BlockAllocator, max_batch_tokens: int, max_sequences: int) -> None:
        self.allocator = allocator
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []  # a heap; finished ones are dropped when met
        self._num_waiting = 0
        self._blocked: tuple[object, ...] | None = None  # the pool's state when the first waiting one didn't fit

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first blocks, or for new ones after a preemption."""
        return self._num_waiting

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, or queues an idle one again because a token was appended."""
        sequence.state = SequenceState.WAITING
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self._num_waiting += 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets a child run on its parent's blocks, which a running parent has computed."""
        self.allocator.fork(parent, child)
        self._run(child)

    def replace(self, sequence: Sequence, source: Sequence) -> None:
        """Makes a sequence forget its own tokens and go on from those of another, whose blocks it shares.

        Both wait for their next token: all their tokens are computed, or were before they were preempted. For requests
        whose outputs nobody reads, since tokens that were shown would be taken back.
        """
        self.allocator.free(sequence)
        sequence.token_ids = list(source.token_ids)
        if source.state is SequenceState.RUNNING:
            self.allocator.fork(source, sequence)
            if sequence.state is not SequenceState.RUNNING:
                self._run(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.pop(self._position(sequence))
            sequence.state = SequenceState.IDLE

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is, and takes its blocks."""
        if sequence.state is SequenceState.RUNNING:
            self.running.pop(self._position(sequence))
        elif sequence.state is SequenceState.WAITING:
            self._num_waiting -= 1
        self.allocator.free(sequence)
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> SchedulerOutput:
        """The next step. Blocks for all its tokens are allocated; an empty step means that nothing needs computing."""
        scheduled: list[ScheduledSequence] = []
        copies: list[list[BlockCopy]] = [[] for _ in self.allocator.groups]
        budget = self._schedule_running(scheduled, copies, self.max_batch_tokens)
        budget = self._schedule_drafts(scheduled, budget)
        budget = self._schedule_waiting(scheduled, copies, budget)
        if not scheduled and self._num_waiting:
            # Everything that runs waits for a token from outside and holds the blocks that others need.
            while self.running and not scheduled:
                self.preempt(self.running[-1])
                budget = self._schedule_waiting(scheduled, copies, budget)
        return SchedulerOutput(tuple(scheduled), tuple(map(tuple, copies)), self.max_batch_tokens - budget)

    def stuck_sequence(self) -> Sequence | None:
        """The first that waits, if nothing runs: after an empty step, it can never fit."""
        if self.running or not self._num_waiting:
            return None
        while self._waiting[0][1].state is not SequenceState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][1]

    def _schedule_running(self, scheduled: list[ScheduledSequence], copies: list[list[BlockCopy]], budget: int) -> int:
        position = 0
        while position < len(self.running) and budget and len(scheduled) < self.max_sequences:
            sequence = self.running[position]
            num_new_tokens = min(sequence.num_uncomputed_tokens, budget)
            if num_new_tokens and not self._allocate(sequence, num_new_tokens, copies):
                break  # it was the newest, and has given way itself
            if num_new_tokens:
                scheduled.append(ScheduledSequence(sequence, num_new_tokens))
                budget -= num_new_tokens
            position += 1
        return budget

    def _schedule_drafts(self, scheduled: list[ScheduledSequence], budget: int) -> int:
        # after everybody's own tokens: a guess takes neither budget nor blocks from what is known
        for index, item in enumerate(scheduled):
            num_drafts = min(len(item.sequence.draft_token_ids), budget)
            if not num_drafts or not item.is_last_chunk:
                continue
            num_new_tokens = item.num_new_tokens + num_drafts
            if self.allocator.allocate(item.sequence, num_new_tokens) is not None:  # its own are private already
                scheduled[index] = ScheduledSequence(item.sequence, num_new_tokens, num_drafts)
                budget -= num_drafts
        return budget

    def _allocate(self, sequence: Sequence, num_new_tokens: int, copies: list[list[BlockCopy]]) -> bool:
        while (new_copies := self.allocator.allocate(sequence, num_new_tokens)) is None:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        for group, group_copies in zip(copies, new_copies, strict=True):
            group.extend(group_copies)
        return True

    def _schedule_waiting(self, scheduled: list[ScheduledSequence], copies: list[list[BlockCopy]], budget: int) -> int:
        spare: int | None = None  # summed once a step; who is admitted adds its own
        while self._waiting and budget and len(scheduled) < self.max_sequences:
            sequence = self._waiting[0][1]
            if sequence.state is not SequenceState.WAITING:
                heapq.heappop(self._waiting)
                continue
            if spare is None:
                spare = sum(map(self._spare_blocks, self.running))
            state = (sequence.order, spare, *(pool.num_allocatable for pool in self.allocator.pools))
            if state == self._blocked:
                break  # nothing has changed since it didn't fit
            prefix = self.allocator.find_prefix(sequence)
            if not self.allocator.admit(sequence, prefix, num_spare_blocks=spare):
                self._blocked = state
                break
            self._blocked = None
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            self._count_prefix(sequence)
            self._run(sequence)
            num_new_tokens = min(sequence.num_uncomputed_tokens, budget)
            new_copies = self.allocator.allocate(sequence, num_new_tokens)
            if new_copies is None:  # an allocator of one's own may admit more than it can give
                self.preempt(sequence)
                break
            for group, group_copies in zip(copies, new_copies, strict=True):
                group.extend(group_copies)
            scheduled.append(ScheduledSequence(sequence, num_new_tokens))
            budget -= num_new_tokens
            spare += self._spare_blocks(sequence)
        return budget

    def _count_prefix(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
        if request.num_cached_tokens is None:  # a resume finds its own blocks, which is no hit
            request.num_cached_tokens = sequence.num_computed_tokens
            if self.allocator.enable_prefix_caching and request.given is None:
                self.prefix_query_tokens += request.num_prompt_tokens
                self.prefix_hit_tokens += sequence.num_computed_tokens

    def _spare_blocks(self, sequence: Sequence) -> int:
        # what one that runs still needs for the tokens it has and for the next one, if it may get it
        num_tokens = min(sequence.num_tokens + 1, sequence.request.max_computed_tokens)
        return max(0, self.allocator.blocks_for(num_tokens) - len(sequence.block_tables[0]))

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        bisect.insort(self.running, sequence, key=lambda other: other.order)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks; it computes its tokens again when it gets new ones."""
        self.recompute(sequence)
        self.num_preemptions += 1

    def recompute(self, sequence: Sequence) -> None:
        """The same, not for want of blocks."""
        self.running.pop(self._position(sequence))
        is_idle = sequence.num_uncomputed_tokens == 0
        self.allocator.free(sequence)
        if is_idle:
            sequence.state = SequenceState.IDLE
        else:
            self.add(sequence)

    def _position(self, sequence: Sequence) -> int:
        return bisect.bisect_left(self.running, sequence.order, key=lambda other: other.order)
