"""Whatever is added, stepped and aborted in whatever order, every request gets the tokens that it gets alone."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hf_paged import PagedConfig, PagedEngine, RequestOutput
from hf_paged.errors import CapacityError
from tests import zoo
from tests.oracle import Ids, assert_equal_tokens, random_prompt, solo

LONGEST_NEW = 24
_BASE = random_prompt(40, seed=3)
PROMPTS: tuple[Ids, ...] = (
    _BASE[:1],
    _BASE[:8],
    _BASE[:16],
    _BASE[:17],
    _BASE[:16] + random_prompt(9, seed=4),
    _BASE,
    random_prompt(15, seed=5),
    random_prompt(33, seed=6),
)
SAMPLED_NEW, NUM_SIBLINGS = 9, 3

TOTAL: Counter[str] = Counter()  # what happened in all runs of this session


@functools.cache
def _sampled_alone(name: str, prompt: int) -> tuple[tuple[int, ...], ...]:
    """The siblings of a seeded request in an engine of their own, one prompt at a time, with room for everything."""
    with PagedEngine(zoo.build(name), PagedConfig(num_blocks=64, enable_prefix_caching=False)) as engine:
        [output] = engine.generate([PROMPTS[prompt]], **_sampled(prompt))
    return tuple(each.token_ids for each in output.outputs)


def _sampled(prompt: int) -> dict[str, object]:
    return {
        "max_new_tokens": SAMPLED_NEW,
        "do_sample": True,
        "top_k": 20,
        "seed": prompt,
        "num_return_sequences": NUM_SIBLINGS,
    }


class EngineMachine(RuleBasedStateMachine):
    engine: PagedEngine | None = None

    @initialize(
        name=st.sampled_from(["llama", "mistral"]),
        block_size=st.sampled_from([8, 8, 16]),
        num_tokens=st.integers(4, 8).map(lambda n: n * 16),
        budget=st.integers(1, 40),
        max_requests=st.integers(2, 5),
        caching=st.sampled_from([True, True, False]),
        reserved=st.sampled_from([0.0, 0.0, 0.25]),
    )
    def start(
        self,
        name: str,
        block_size: int,
        num_tokens: int,
        budget: int,
        max_requests: int,
        caching: bool,
        reserved: float,
    ) -> None:
        self.name = name
        config = PagedConfig(
            block_size=block_size,
            num_blocks=num_tokens // block_size,
            max_batch_tokens=budget,
            max_requests_per_batch=max_requests,
            enable_prefix_caching=caching,
            prefix_cache_fraction=reserved,
        )
        self.engine = PagedEngine(zoo.build(name), config)
        self.open: dict[str, tuple[int, int | None]] = {}  # request id -> prompt, new tokens (None: sampled siblings)
        self.aborted: set[str] = set()
        for prompt in (2, 3, 6):  # more than most of these pools hold to the end
            self._add(prompt, LONGEST_NEW, {"max_new_tokens": LONGEST_NEW})

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        new=st.integers(1, LONGEST_NEW),
        priority=st.sampled_from([0, 0, -1]),
        drafts=st.sampled_from([None, 1, 6]),
    )
    def add(self, prompt: int, new: int, priority: int, drafts: int | None) -> None:
        self._add(prompt, new, {"max_new_tokens": new, "priority": priority, "prompt_lookup_num_tokens": drafts})

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), drafts=st.sampled_from([None, 3]))
    def add_siblings(self, prompt: int, drafts: int | None) -> None:
        self._add(prompt, None, {**_sampled(prompt), "prompt_lookup_num_tokens": drafts})

    def _add(self, prompt: int, new: int | None, options: dict[str, object]) -> None:
        assert self.engine is not None
        try:
            request_id = self.engine.add_request(PROMPTS[prompt], **options)
        except CapacityError as error:
            message = str(error)
        else:
            self.open[request_id] = (prompt, new)
            return
        assert "raise PagedConfig.num_blocks" in message

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        assert self.engine is not None
        for _ in range(count):
            for output in self.engine.step():
                self._take(output)
            self.engine.check()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.engine is not None
        request_id = data.draw(st.sampled_from(sorted(self.open.keys() - self.aborted) or [""]))
        if request_id:
            self.engine.abort(request_id)
            self.aborted.add(request_id)
            self.engine.check()

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.engine is not None
        self.engine.reset_prefix_cache()
        self.engine.check()

    def _take(self, output: RequestOutput) -> None:
        prompt, new = self.open[output.request_id]
        if new is None:
            expected = _sampled_alone(self.name, prompt)
        else:
            expected = (solo(zoo.build(self.name), PROMPTS[prompt], max_new_tokens=LONGEST_NEW)[:new],)
        assert output.error is None, output.error
        for each in output.outputs:
            goal, got = list(expected[each.index]), list(each.token_ids)
            assert got == goal[: len(got)]
            assert (each.finish_reason == "length") == (len(got) == len(goal))
            if output.finished:
                assert_equal_tokens(got, goal[: len(got)], f"{self.name}, prompt {prompt}, sequence {each.index}")
        if output.finished:
            if output.request_id not in self.aborted:
                assert len(output.outputs) == len(expected)
                assert [each.finish_reason for each in output.outputs] == ["length"] * len(expected)
            del self.open[output.request_id]
            TOTAL["finished"] += 1

    def teardown(self) -> None:
        if self.engine is None:
            return
        for _ in range(20_000):
            if not self.engine.has_unfinished_requests:
                break
            self.step(count=1)
        self.step(count=1)  # what was aborted last is still to be reported
        assert not self.open, f"requests without an end: {self.open}"
        stats = self.engine.stats()
        assert stats["num_running"] == stats["num_waiting"] == 0
        assert stats["free_blocks"] == stats["num_blocks"]
        TOTAL["steps"] += stats["num_steps"]
        TOTAL["preemptions"] += stats["num_preemptions"]
        TOTAL["hit tokens"] += stats["prefix_hit_tokens"]
        TOTAL["aborts"] += stats["num_aborted"]
        self.engine.close()


def _run(max_examples: int, steps: int) -> None:
    TOTAL.clear()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],  # a failure takes minutes to shrink, and says what differs without that
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_adding_stepping_and_aborting() -> None:
    _run(max_examples=12, steps=16)
    assert min(TOTAL[name] for name in ("finished", "preemptions", "hit tokens", "aborts")) > 0, TOTAL


@pytest.mark.grid
def test_any_order_of_adding_stepping_and_aborting_at_length() -> None:
    _run(max_examples=50, steps=40)
    assert min(TOTAL[name] for name in ("finished", "preemptions", "hit tokens", "aborts")) > 20, TOTAL
