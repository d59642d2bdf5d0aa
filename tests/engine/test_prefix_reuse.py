"""Prefix blocks are reused exactly when they are the same, and reuse changes no token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_paged import PagedConfig, PagedEngine, get_engine
from tests.oracle import assert_equal_tokens, random_prompt, solo
from tests.zoo import build

NEW = 6
BASE = random_prompt(64, 21)  # four blocks of 16


def _engine(model: Any = None, **config: Any) -> PagedEngine:
    return PagedEngine(model or build("llama"), PagedConfig(**{"block_size": 16, "num_blocks": 64, **config}))


def _cached(engine: PagedEngine, prompt: list[int], **keywords: Any) -> int:
    output = engine.generate([prompt], max_new_tokens=NEW, **keywords)[0]
    engine.check()
    if not keywords:
        assert_equal_tokens(output.token_ids, solo(build("llama"), prompt, max_new_tokens=NEW))
    return output.num_cached_tokens


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token() -> None:
    engine = _engine()
    assert [_cached(engine, BASE) for _ in range(3)] == [0, 48, 48]
    assert _cached(engine, [*BASE, 5]) == 64
    assert _cached(engine, BASE[:48]) == 32
    assert _cached(engine, BASE[:20]) == 16


def test_the_same_prompt_is_answered_alike_every_time() -> None:
    for caching in (True, False):
        engine = _engine(enable_prefix_caching=caching)
        assert [_cached(engine, BASE) > 0 for _ in range(5)] == [False] + [caching] * 4


def test_a_prefix_shorter_than_a_block_never_hits() -> None:
    engine = _engine()
    shared = BASE[:15]
    assert _cached(engine, [*shared, 1, 2, 3]) == 0
    assert _cached(engine, [*shared, 4, 5, 6]) == 0
    assert engine.stats()["prefix_hit_tokens"] == 0


def test_blocks_of_a_request_that_never_ran_are_not_reused() -> None:
    engine = _engine(max_batch_tokens=16)
    request_id = engine.add_request(BASE, max_new_tokens=NEW)
    engine.step()  # one block of four
    engine.abort(request_id)
    assert _cached(engine, BASE) == 16
    engine.reset_prefix_cache()
    engine.abort(engine.add_request(BASE, max_new_tokens=NEW))
    assert _cached(engine, BASE) == 0


def test_new_weights_flush_the_prefixes() -> None:
    model, other = copy.deepcopy(build("llama")), build("llama", seed=9)
    engine = _engine(model)
    engine.generate([BASE], max_new_tokens=NEW)
    model.load_state_dict(other.state_dict())
    output = engine.generate([BASE], max_new_tokens=NEW)[0]
    assert output.num_cached_tokens == 0
    assert_equal_tokens(output.token_ids, solo(other, BASE, max_new_tokens=NEW))


@pytest.mark.parametrize("change", ["data", "optimiser", "swap", "one value"])
def test_any_way_of_changing_weights_is_noticed(change: str) -> None:
    model = copy.deepcopy(build("llama"))
    engine = _engine(model)
    engine.generate([BASE], max_new_tokens=NEW)
    weight = model.model.layers[0].self_attn.v_proj.weight
    if change == "data":
        weight.data.mul_(1.5)
    elif change == "optimiser":
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        weight.grad = torch.ones_like(weight)
        optimiser.step()
    elif change == "swap":
        model.model.layers[0].self_attn.v_proj.weight = torch.nn.Parameter(weight.detach() * 1.5)
    else:
        with torch.no_grad():
            weight[1, 2] += 100
    output = engine.generate([BASE], max_new_tokens=NEW)[0]
    assert output.num_cached_tokens == 0
    expected = model.generate(torch.tensor([BASE]), max_new_tokens=NEW, do_sample=False)[0, 64:].tolist()
    assert_equal_tokens(output.token_ids, expected)


def test_a_loop_that_trains_between_generations_gets_the_trained_tokens() -> None:
    model = copy.deepcopy(build("llama"))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02)
    ids = torch.tensor([BASE])
    for _ in range(3):
        model.train()
        model(ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        paged = model.generate(ids, max_new_tokens=NEW, do_sample=False, cache_implementation="paged")
        assert model.training
        model.eval()
        assert_equal_tokens(paged[0].tolist(), model.generate(ids, max_new_tokens=NEW, do_sample=False)[0].tolist())
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["prefix_hit_tokens"] == 0


def test_a_salt_keeps_prefixes_apart() -> None:
    engine = _engine()
    cached = [_cached(engine, BASE, cache_salt=salt) for salt in ("a", "b", "a", None)]
    assert cached == [0, 0, 48, 0]


def test_prompt_logprobs_are_the_same_on_a_cached_prompt() -> None:
    engine = _engine(max_batch_tokens=24)
    first, second = (engine.generate([BASE], max_new_tokens=2, logprobs=2, prompt_logprobs=3)[0] for _ in range(2))
    assert second.num_cached_tokens == 0, "prompt logprobs need the whole prompt computed"
    model = build("llama")
    with torch.no_grad():
        expected = model(torch.tensor([BASE])).logits[0].log_softmax(-1)
    for output in (first, second):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(BASE)
        for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
            assert entry is not None
            assert entry.token_id == BASE[position]
            assert entry.logprob == pytest.approx(expected[position - 1, BASE[position]].item(), abs=1e-4)
            assert entry.top[0][1] == pytest.approx(expected[position - 1].max().item(), abs=1e-4)
        assert output.outputs[0].logprobs is not None
        assert output.outputs[0].logprobs[0].logprob == pytest.approx(expected[-1].max().item(), abs=1e-4)


def test_penalties_see_a_cached_prompt() -> None:
    engine = _engine()
    expected = solo(build("llama"), BASE, max_new_tokens=NEW, repetition_penalty=1.5)
    for cached in (0, 48):
        output = engine.generate([BASE], max_new_tokens=NEW, repetition_penalty=1.5)[0]
        assert output.num_cached_tokens == cached
        assert_equal_tokens(output.token_ids, expected)


def test_cached_tokens_are_counted_once_for_several_sequences() -> None:
    engine = _engine()
    keywords = {"do_sample": True, "seed": 1, "num_return_sequences": 4, "max_new_tokens": NEW}
    assert engine.generate([BASE], **keywords)[0].num_cached_tokens == 0
    before = engine.stats()
    assert engine.generate([BASE], **keywords)[0].num_cached_tokens == 48
    after = engine.stats()
    assert after["prefix_hit_tokens"] - before["prefix_hit_tokens"] == 48
    assert after["prefix_query_tokens"] - before["prefix_query_tokens"] == 64


def test_siblings_share_the_blocks_of_their_prompt() -> None:
    engine = _engine(enable_prefix_caching=False)
    engine.generate([BASE], do_sample=True, seed=1, num_return_sequences=4, max_new_tokens=NEW)
    assert engine.stats()["peak_blocks"] == 4 + 4  # the prompt's once, and one of each sequence


def test_generate_shares_the_prompt_among_its_return_sequences() -> None:
    model = copy.deepcopy(build("llama"))
    ids = torch.tensor([BASE])
    model.generate(ids, do_sample=True, num_return_sequences=4, max_new_tokens=NEW, cache_implementation="paged")
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["peak_blocks"] == 4 + 4


def test_weights_that_change_while_a_request_runs_are_noticed_by_the_next() -> None:
    model, other = copy.deepcopy(build("llama")), build("llama", seed=9)
    engine = _engine(model)
    stream = engine.stream(BASE, max_new_tokens=50)
    next(stream)
    model.load_state_dict(other.state_dict())
    output = engine.generate([[*BASE, 5]], max_new_tokens=NEW)[0]
    assert output.num_cached_tokens == 0
    assert_equal_tokens(output.token_ids, solo(other, [*BASE, 5], max_new_tokens=NEW))
    stream.close()
    engine.check()
    assert engine.generate([[*BASE, 5]], max_new_tokens=NEW)[0].num_cached_tokens == 64


def test_streams_that_are_left_leave_nothing_behind() -> None:
    engine = _engine()
    for _ in range(5):
        stream = engine.stream(BASE, max_new_tokens=9)
        next(stream)
        stream.close()
    engine.generate([BASE], max_new_tokens=2)
    assert engine.step() == []
