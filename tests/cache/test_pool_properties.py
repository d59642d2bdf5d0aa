"""Whatever happens to pool, allocator and scheduler, in any order: no block leaks, and all read their own tokens."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hf_paged.request import Request
from tests.scheduler.fake_model import FakeEngine

TOTAL: Counter[str] = Counter()  # what happened in all runs of this session

SEEDS = st.integers(0, 2**32 - 1)
RARELY = st.sampled_from([False, False, True])
WINDOWS = st.sampled_from([(None,), (None, 6), (5,), (3, 9), (None, 4, 11), (1,)])


class PoolMachine(RuleBasedStateMachine):
    """Requests of two tokens and few shapes, so that prefixes meet, in pools that are too small for them."""

    engine: FakeEngine

    @initialize(
        windows=WINDOWS,
        num_blocks=st.integers(1, 24),
        block_size=st.sampled_from([1, 2, 3, 4]),
        budget=st.integers(1, 12),
        max_sequences=st.integers(1, 6),
        caching=st.sampled_from([True, True, True, False]),
        reserved=st.sampled_from([0.0, 0.0, 0.3, 0.7]),
    )
    def start(
        self,
        windows: tuple[int | None, ...],
        num_blocks: int,
        block_size: int,
        budget: int,
        max_sequences: int,
        caching: bool,
        reserved: float,
    ) -> None:
        self.engine = FakeEngine(windows, num_blocks, block_size, budget, max_sequences, caching, reserved)

    @rule(
        length=st.integers(1, 24),
        new=st.integers(1, 12),
        kind=st.integers(0, 2),
        salt=st.sampled_from([None, None, "salt"]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        siblings=st.sampled_from([1, 1, 1, 2, 4]),
        external=st.sampled_from([False, False, True]),
    )
    def add(
        self, length: int, new: int, kind: int, salt: str | None, priority: int, siblings: int, external: bool
    ) -> None:
        if not self.engine.fits(length, new):
            return
        prompt = [0] * length if kind == 0 else [1] + [0] * (length - 1) if kind == 1 else [0, 1] * (length // 2) + [0]
        request = Request(
            f"request-{TOTAL['requests']}",
            prompt[:length],
            new,
            num_sequences=siblings,
            priority=priority,
            cache_salt=salt,
            sampling="external" if external else None,
        )
        self.engine.add(request)
        TOTAL["requests"] += 1

    @rule(seed=SEEDS, count=st.integers(1, 6))
    def step(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            self.engine.step(rng)
            self.engine.check()

    @precondition(lambda self: self.engine.awaiting_token())
    @rule(seed=SEEDS)
    def give_tokens(self, seed: int) -> None:
        rng = random.Random(seed)
        for sequence in self.engine.awaiting_token():
            if rng.random() < 0.8:
                self.engine.give_token(sequence, rng.randint(0, 1))

    @precondition(lambda self: self.engine.requests)
    @rule(seed=SEEDS, really=RARELY)
    def abort(self, seed: int, really: bool) -> None:
        if really:
            self.engine.abort(random.Random(seed).choice(self.engine.requests))

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(seed=SEEDS)
    def interrupt(self, seed: int) -> None:
        """As when a step is interrupted: what ran gives up its blocks, and computes them again."""
        rng = random.Random(seed)
        for sequence in list(self.engine.scheduler.running):
            if rng.random() < 0.5:
                self.engine.scheduler.preempt(sequence)

    @rule(really=RARELY)
    def new_weights(self, really: bool) -> None:
        if really:
            self.engine.new_weights()

    @rule(extra=st.integers(0, 6))
    def grow(self, extra: int) -> None:
        if self.engine.allocator.num_blocks < 40:
            self.engine.allocator.grow(self.engine.allocator.num_blocks + extra)

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.drain(random.Random(0))
        TOTAL["steps"] += self.engine.num_steps
        TOTAL["preemptions"] += self.engine.scheduler.num_preemptions
        TOTAL["hits"] += self.engine.num_hits
        TOTAL["copies"] += self.engine.num_copies
        TOTAL["taken back"] += self.engine.num_taken_back


EVENTS = ("preemptions", "hits", "copies", "taken back")  # that a history has to have had

SUPPRESSED = [HealthCheck.too_slow, HealthCheck.data_too_large]


def test_any_history_of_a_few_hundred_steps() -> None:
    TOTAL.clear()
    for _ in range(5):  # which rules an example may use is drawn, too: at times no example of a round preempts anything
        run_state_machine_as_test(
            PoolMachine,
            settings=settings(
                max_examples=80, stateful_step_count=40, deadline=None, database=None, suppress_health_check=SUPPRESSED
            ),
        )
        if min(TOTAL[name] for name in EVENTS) > 0:
            break
    assert TOTAL["steps"] > 300
    assert min(TOTAL[name] for name in EVENTS) > 0, TOTAL


@pytest.mark.grid
def test_any_history_of_twenty_thousand_steps() -> None:
    TOTAL.clear()
    while TOTAL["steps"] < 20_000:
        run_state_machine_as_test(
            PoolMachine,
            settings=settings(
                max_examples=100, stateful_step_count=60, deadline=None, database=None, suppress_health_check=SUPPRESSED
            ),
        )
    assert min(TOTAL[name] for name in EVENTS) > 100, TOTAL
