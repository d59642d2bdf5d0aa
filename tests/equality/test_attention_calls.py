"""Attention calls a layer follow the lengths in the batch, not the number of sequences. Counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_paged import PagedConfig, PagedEngine
from tests import zoo
from tests.equality.drive import run_to_end, tokens_of
from tests.oracle import Ids, assert_rows_equal_solo, ragged_prompts, random_prompt

NEW = 6


def _engine(name: str, prompts: list[Ids]) -> PagedEngine:
    settings = PagedConfig(
        block_size=16,
        num_blocks=sum(len(prompt) // 16 + 9 for prompt in prompts) + 64,
        max_batch_tokens=512,
        enable_prefix_caching=False,
        attention_backend="torch",
    )
    return PagedEngine(zoo.build(name), settings)


def _calls_a_layer_and_step(name: str, prompts: list[Ids]) -> tuple[float, float]:
    """Of the whole run, and of its steps in which every sequence decodes."""
    num_layers = zoo.build(name).config.num_hidden_layers
    with _engine(name, prompts) as engine:
        # Requests run until they are aborted, so that all of them decode at once for some steps.
        ids = [engine.add_request(prompt, max_new_tokens=100) for prompt in prompts]
        seen: dict[Any, int] = {}
        while len(seen) < len(ids):
            seen.update({out.request_id: 1 for out in engine.step() if out.outputs[0].token_ids})
        middle = engine.stats()
        assert middle["num_running"] == len(prompts)
        for _ in range(NEW):
            engine.step()
        end = engine.stats()
        assert end["num_packed_tokens"] - middle["num_packed_tokens"] == NEW * len(prompts)
        for request_id in ids:
            engine.abort(request_id)
    decode_calls = end["num_attention_calls"] - middle["num_attention_calls"]
    return end["num_attention_calls"] / end["num_steps"] / num_layers, decode_calls / NEW / num_layers


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_calls_do_not_grow_with_the_number_of_sequences(name: str) -> None:
    calls = {n: _calls_a_layer_and_step(name, ragged_prompts(n, seed=91, shortest=12)) for n in (1, 16, 128)}
    assert all(1 <= decode <= 3 and 1 <= whole <= 5 for whole, decode in calls.values()), calls
    # eight times the sequences of alike lengths: at most one more group, where a border moved
    assert calls[128][1] <= calls[16][1] + 1, calls


def test_calls_are_bounded_by_the_length_groups() -> None:
    """Lengths over two orders of magnitude are some groups, however many sequences there are of each."""
    lengths = [3 + 397 * i // 31 for i in range(32)]
    calls = [
        _calls_a_layer_and_step("llama", [random_prompt(length, seed) for seed in range(copies) for length in lengths])
        for copies in (1, 4)
    ]
    decode = [each[1] for each in calls]
    assert max(decode) <= 8, calls
    assert decode[1] <= decode[0] + 1, calls


def test_the_count_is_of_real_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """`num_attention_calls` equals the calls of torch's fused attention, where all attention is fused."""
    calls = []
    fused = F.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return fused(*args, **kwargs)

    prompts = ragged_prompts(8, seed=94)
    with _engine("llama", prompts) as engine:
        before = engine.stats()["num_attention_calls"]
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", counted)
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
            ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in prompts]
            final = run_to_end(engine, ids)
        assert engine.stats()["num_attention_calls"] - before == len(calls) > 0
    rows = tokens_of([final[request_id] for request_id in ids])
    assert_rows_equal_solo(zoo.build("llama"), prompts, rows, max_new_tokens=NEW)
