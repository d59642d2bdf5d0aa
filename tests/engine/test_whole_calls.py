"""A call that returns when its last request ends begins with those that may take longest."""

from __future__ import annotations

from hf_paged import PagedConfig, PagedEngine
from tests.oracle import assert_equal_tokens, ragged_prompts, solo
from tests.zoo import build

LENGTHS = [3, 9, 1, 9, 6, 12]
PROMPTS = ragged_prompts(len(LENGTHS), seed=5, shortest=4, longest=16)


def _engine(**config: int) -> PagedEngine:
    return PagedEngine(build("llama"), PagedConfig.from_any({"block_size": 8, "num_blocks": 64, **config}))


def test_the_longest_start_first_and_answers_come_in_the_order_of_the_prompts() -> None:
    engine = _engine(max_requests_per_batch=1)
    outputs = engine.generate(PROMPTS, max_new_tokens=LENGTHS)
    for prompt, length, output in zip(PROMPTS, LENGTHS, outputs, strict=True):
        assert_equal_tokens(output.token_ids, solo(build("llama"), prompt, max_new_tokens=length))
    started = [output.metrics.first_scheduled_time or 0.0 for output in outputs]
    assert sorted(range(len(LENGTHS)), key=started.__getitem__) == [5, 1, 3, 4, 0, 2]


def test_a_priority_counts_more_than_a_length() -> None:
    engine = _engine(max_requests_per_batch=1)
    outputs = engine.generate(PROMPTS, max_new_tokens=LENGTHS, priority=[1, 1, 0, 1, 0, 1])
    started = [output.metrics.first_scheduled_time or 0.0 for output in outputs]
    assert sorted(range(len(LENGTHS)), key=started.__getitem__) == [4, 2, 5, 1, 3, 0]


def test_the_last_steps_are_fewer() -> None:
    lengths, prompts = [4] * 8 + [24], ragged_prompts(9, seed=6, shortest=16, longest=16)
    engine = _engine(max_batch_tokens=16)
    engine.generate(prompts, max_new_tokens=lengths)
    one_by_one = _engine(max_batch_tokens=16)
    for prompt, length in zip(prompts, lengths, strict=True):
        one_by_one.add_request(prompt, max_new_tokens=length)
    while one_by_one.has_unfinished_requests:
        one_by_one.step()
    assert engine.stats()["num_steps"] == 24
    assert one_by_one.stats()["num_steps"] > 30
