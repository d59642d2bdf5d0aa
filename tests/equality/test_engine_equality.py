"""The engine gives stock's greedy tokens, whatever the block size, budget, pool, prefixes and company."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from hf_paged import PagedConfig, PagedEngine
from tests import zoo
from tests.equality.drive import pool_of_2048, run_requests, run_to_end, tokens_of
from tests.oracle import (
    Ids,
    assert_equal_tokens,
    assert_rows_equal_solo,
    border_prompts,
    differing_tokens,
    ragged_prompts,
    random_prompt,
    solo,
    staggered_ends,
)

BLOCK_SIZES = (8, 16, 64)
BUDGETS = (1, 2, 7, 64, 512)
NEW = 12

RAGGED = ragged_prompts(7, seed=1)
FEW = ragged_prompts(4, seed=2, longest=40)  # for budgets that need a step a token


def _prompts(budget: int) -> list[Ids]:
    return FEW if budget <= 2 else RAGGED


def _pairwise() -> list[tuple[str, int, int]]:
    """Every model meets every budget; over the models every block size meets every budget."""
    cases = []
    for m, name in enumerate(zoo.ARCHITECTURES):
        for b, budget in enumerate(BUDGETS):
            cases.append((name, BLOCK_SIZES[(m + b) % len(BLOCK_SIZES)], budget))
    return cases


def _each_model_one_size_and_some_all() -> list[tuple[str, int]]:
    cases = [(name, BLOCK_SIZES[m % len(BLOCK_SIZES)]) for m, name in enumerate(zoo.ARCHITECTURES)]
    return sorted({*cases, *itertools.product(("llama", "gemma2"), BLOCK_SIZES)})


def _check_grid_point(name: str, block_size: int, budget: int, caching: bool, **config: Any) -> None:
    model = zoo.build(name)
    prompts = _prompts(budget)
    settings = PagedConfig(
        block_size=block_size,
        max_batch_tokens=budget,
        num_blocks=1024 // block_size,
        enable_prefix_caching=caching,
        **config,
    )
    with PagedEngine(model, settings) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=NEW)
        stats = engine.stats()
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), f"{name} {block_size}/{budget}", max_new_tokens=NEW)
    assert all(output.finish_reason == "length" for output in outputs)
    assert stats["num_packed_tokens"] <= stats["num_steps"] * budget
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert stats["num_fallbacks"] == 0


@pytest.mark.parametrize(("name", "block_size", "budget"), _pairwise())
def test_ragged_prompts(name: str, block_size: int, budget: int) -> None:
    _check_grid_point(name, block_size, budget, caching=(block_size + budget) % 2 == 0)


@pytest.mark.grid
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("name", "block_size", "budget"), list(itertools.product(zoo.ARCHITECTURES, BLOCK_SIZES, BUDGETS))
)
def test_ragged_prompts_on_the_whole_grid(name: str, block_size: int, budget: int, caching: bool) -> None:
    _check_grid_point(name, block_size, budget, caching)


@pytest.mark.grid
@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_few_at_once_on_the_whole_grid(name: str, at_once: int) -> None:
    _check_grid_point(name, 8, 64, True, max_requests_per_batch=at_once)


@pytest.mark.parametrize(("name", "block_size"), _each_model_one_size_and_some_all())
def test_prompts_that_end_at_block_borders(name: str, block_size: int) -> None:
    """Equal prompts and prefixes of one another in one batch; chunks end inside blocks, and blocks inside chunks."""
    model = zoo.build(name)
    prompts = border_prompts(block_size)
    with PagedEngine(model, pool_of_2048(block_size=block_size, max_batch_tokens=block_size + 3)) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=6)
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), name, max_new_tokens=6)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_long_prompts_across_many_blocks(name: str) -> None:
    model = zoo.build(name)
    prompts = [random_prompt(length, 5) for length in (200, 131, 3)]
    with PagedEngine(model, pool_of_2048(block_size=8, max_batch_tokens=50)) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=NEW)
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), name, max_new_tokens=NEW)


def test_decoding_far_past_the_window() -> None:
    """A window moves over many blocks while decoding; what lies behind it is given back and used by others."""
    for name in zoo.WINDOWED:
        model = zoo.build(name)
        prompts = [random_prompt(length, 6) for length in (1, 40)]
        with PagedEngine(model, pool_of_2048(block_size=8, max_batch_tokens=16)) as engine:
            outputs = run_requests(engine, prompts, max_new_tokens=45)
        assert_rows_equal_solo(model, prompts, tokens_of(outputs), name, max_new_tokens=45)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_generate_of_many_prompts_at_once(name: str) -> None:
    model = zoo.build(name)
    with PagedEngine(model, PagedConfig()) as engine:
        outputs = engine.generate(RAGGED, max_new_tokens=NEW)
        assert_rows_equal_solo(model, RAGGED, tokens_of(outputs), name, max_new_tokens=NEW)
        engine.check()


def test_one_length_a_prompt() -> None:
    model = zoo.build("llama")
    lengths = [1, 2, 3, 12, 7, 1, 12]
    with PagedEngine(model, pool_of_2048(max_batch_tokens=32)) as engine:
        outputs = engine.generate(RAGGED, max_new_tokens=lengths)
    for ids, length, output in zip(RAGGED, lengths, outputs, strict=True):
        assert_equal_tokens(output.token_ids, solo(model, ids, max_new_tokens=length))
        assert output.finish_reason == "length"


# --- a pool so small that requests are preempted


def _tight_pool(prompts: list[Ids], new: int, block_size: int, spare: int) -> int:
    """Blocks that hold the largest request and `spare` more."""
    return max(math.ceil((len(ids) + new) / block_size) for ids in prompts) + spare


def _preempting() -> list[tuple[str, int, bool]]:
    """Every model with both block sizes, with and without prefix caching (a resume may find its own blocks in it)."""
    cases = []
    for m, name in enumerate(zoo.ARCHITECTURES):
        cases += [(name, 8, m % 2 == 0), (name, 16, m % 2 == 1)]
    return cases


@pytest.mark.parametrize(("name", "block_size", "caching"), _preempting())
def test_preempted_requests_resume_with_the_same_tokens(name: str, block_size: int, caching: bool) -> None:
    model = zoo.build(name)
    prompts = [random_prompt(length, 7) for length in (4, 3, 5, 6, 15, 9, 7, 30)]
    new = 18
    settings = PagedConfig(
        block_size=block_size,
        num_blocks=_tight_pool(prompts, new, block_size, spare=1 if block_size == 8 else 0),
        max_batch_tokens=64,
        enable_prefix_caching=caching,
    )
    with PagedEngine(model, settings) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=new)
        assert engine.stats()["num_preemptions"] > 0
        assert engine.stats()["peak_blocks"] <= settings.num_blocks
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), name, max_new_tokens=new)
    assert all(output.finish_reason == "length" for output in outputs)


@pytest.mark.parametrize("budget", BUDGETS)
def test_preemption_under_every_budget(budget: int) -> None:
    model = zoo.build("qwen3")
    prompts = [random_prompt(length, 8) for length in (6, 7, 8, 14)]
    settings = PagedConfig(
        block_size=8,
        num_blocks=_tight_pool(prompts, 16, 8, spare=0),
        max_batch_tokens=budget,
        enable_prefix_caching=False,
    )
    with PagedEngine(model, settings) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=16)
        preemptions = engine.stats()["num_preemptions"]
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), f"budget {budget}", max_new_tokens=16)
    # With one or two tokens a step the oldest ends before its neighbours need the blocks.
    assert preemptions > 0 or budget <= 2


def test_preemption_with_one_large_block_each() -> None:
    """All prompts fit their first block of 64 and outgrow it at different steps."""
    model = zoo.build("llama")
    prompts = [random_prompt(length, 9) for length in (60, 57, 63, 55)]
    settings = PagedConfig(block_size=64, num_blocks=5, max_batch_tokens=512)
    with PagedEngine(model, settings) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=NEW)
        assert engine.stats()["num_preemptions"] > 0
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), "block 64", max_new_tokens=NEW)


# --- prefixes, warm and cold


@pytest.mark.parametrize(("name", "block_size"), _each_model_one_size_and_some_all())
def test_a_second_call_hits_the_first_and_changes_nothing(name: str, block_size: int) -> None:
    model = zoo.build(name)
    prompts = [random_prompt(length, 10) for length in (67, 130, 5)]
    with PagedEngine(model, PagedConfig(block_size=block_size, num_blocks=1024 // block_size)) as engine:
        cold = run_requests(engine, prompts, max_new_tokens=6)
        assert engine.stats()["prefix_hit_tokens"] == 0
        warm = run_requests(engine, prompts, max_new_tokens=6)
        hits = engine.stats()["prefix_hit_tokens"]
        assert 0 < hits <= engine.stats()["prefix_query_tokens"]
        engine.reset_prefix_cache()
        reset = run_requests(engine, prompts, max_new_tokens=6)
        assert engine.stats()["prefix_hit_tokens"] == hits
    for outputs in (cold, warm, reset):
        assert_rows_equal_solo(model, prompts, tokens_of(outputs), name, max_new_tokens=6)
    assert [output.num_cached_tokens for output in cold] == [0, 0, 0]
    assert warm[0].num_cached_tokens == 64
    assert warm[1].num_cached_tokens == 128
    assert warm[2].num_cached_tokens == 0
    assert hits == 64 + 128


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_without_prefix_caching_there_are_no_hits(name: str) -> None:
    model = zoo.build(name)
    prompts = [random_prompt(length, 11) for length in (40, 40, 9)]
    with PagedEngine(model, pool_of_2048(block_size=8, enable_prefix_caching=False)) as engine:
        first = run_requests(engine, prompts, max_new_tokens=6)
        second = run_requests(engine, prompts, max_new_tokens=6)
        assert engine.stats()["prefix_hit_tokens"] == 0
    assert_rows_equal_solo(model, prompts, tokens_of(first), name, max_new_tokens=6)
    assert_rows_equal_solo(model, prompts, tokens_of(second), name, max_new_tokens=6)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_prompts_that_share_a_beginning(name: str) -> None:
    """Longer, shorter, forked at a border and inside a block; a prompt cached as a whole still computes one token."""
    model = zoo.build(name)
    base = random_prompt(64, 12)
    family = [
        base,
        base,  # cached as a whole
        [*base, 5],
        base[:48],  # as a whole, and shorter
        base[:47],
        base[:32] + random_prompt(9, 13),
        base[:37] + random_prompt(9, 14),
        random_prompt(1, 15) + base[1:],  # shares all but the first token, so nothing
    ]
    with PagedEngine(model, pool_of_2048(block_size=16, max_batch_tokens=40)) as engine:
        cached = []
        for ids in family:
            (output,) = run_requests(engine, [ids], max_new_tokens=5)
            assert_equal_tokens(output.token_ids, solo(model, ids, max_new_tokens=5), f"{name} prompt of {len(ids)}")
            cached.append(output.num_cached_tokens)
    assert family[-1][0] != base[0]
    assert cached[0] == 0
    assert cached[-1] == 0
    assert 48 <= cached[1] < 64
    assert cached[2] == 64
    assert 32 <= cached[3] < 48
    assert cached[4] == 32
    assert cached[5] == 32
    assert cached[6] == 32


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_a_conversation_hits_what_was_generated(name: str) -> None:
    """Each turn's prompt is the last turn's prompt and answer, and a little more."""
    model = zoo.build(name)
    ids = random_prompt(10, 16)
    with PagedEngine(model, pool_of_2048(block_size=8, max_batch_tokens=16)) as engine:
        for turn in range(4):
            (output,) = run_requests(engine, [ids], max_new_tokens=11)
            assert_equal_tokens(output.token_ids, solo(model, ids, max_new_tokens=11), f"{name} turn {turn}")
            if turn:
                assert output.num_cached_tokens > 0
            ids = ids + list(output.token_ids) + random_prompt(3, 17 + turn)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_prefixes_under_eviction(name: str) -> None:
    """The pool holds one family of prompts at a time, so that cached blocks are evicted, reused and hit again."""
    model = zoo.build(name)
    families = [[random_prompt(33, seed) + random_prompt(tail, seed + 1) for tail in (2, 9)] for seed in (20, 30, 40)]
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=13, max_batch_tokens=24)) as engine:
        for family in [*families, *reversed(families)]:
            outputs = run_requests(engine, family, max_new_tokens=7)
            assert_rows_equal_solo(model, family, tokens_of(outputs), name, max_new_tokens=7)
        assert engine.stats()["prefix_hit_tokens"] > 0


# --- different ends


@pytest.mark.parametrize(
    ("name", "budget"), [(name, 7) for name in zoo.ARCHITECTURES] + [("llama", 2), ("gpt2", 512), ("gemma2", 512)]
)
def test_rows_that_stop_at_different_steps(name: str, budget: int) -> None:
    model = zoo.build(name)
    prompts = _prompts(budget)
    ends = staggered_ends(model, prompts, NEW)
    with PagedEngine(model, pool_of_2048(block_size=8, max_batch_tokens=budget)) as engine:
        outputs = run_requests(engine, prompts, [{"eos_token_id": end} for end in ends], max_new_tokens=NEW)
    lengths = set()
    for ids, end, output in zip(prompts, ends, outputs, strict=True):
        expected = solo(model, ids, max_new_tokens=NEW, eos_token_id=end)
        assert_equal_tokens(output.token_ids, expected, f"{name} end {end}")
        assert expected[-1] == end
        assert output.finish_reason == "stop"
        assert output.outputs[0].stop_reason == end
        lengths.add(len(expected))
    assert 1 in lengths
    assert len(lengths) > 2


def test_any_of_several_ends_stops() -> None:
    model = zoo.build("phi3")
    free_runs = [solo(model, ids, max_new_tokens=NEW) for ids in RAGGED]
    ends = sorted({free_runs[0][4], free_runs[1][2], free_runs[2][0]})
    with PagedEngine(model, PagedConfig()) as engine:
        outputs = engine.generate(RAGGED, max_new_tokens=NEW, eos_token_id=ends)
    assert_rows_equal_solo(model, RAGGED, tokens_of(outputs), "ends", max_new_tokens=NEW, eos_token_id=ends)
    assert {output.finish_reason for output in outputs} == {"stop", "length"}


# --- company: who else runs may not matter


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_requests_that_arrive_while_others_run(name: str) -> None:
    model = zoo.build(name)
    with PagedEngine(model, pool_of_2048(block_size=8, max_batch_tokens=7, max_requests_per_batch=4)) as engine:
        arrivals = dict(enumerate(RAGGED))
        request_ids, final = [], {}
        for step in range(2_000):
            if step % 5 == 0 and arrivals:
                index = min(arrivals)
                request_ids.append(engine.add_request(arrivals.pop(index), max_new_tokens=NEW))
            for output in engine.step():
                if output.finished:
                    final[output.request_id] = output
            engine.check()
            if not arrivals and len(final) == len(RAGGED):
                break
        outputs = [final[request_id] for request_id in request_ids]
    assert_rows_equal_solo(model, RAGGED, tokens_of(outputs), name, max_new_tokens=NEW)


def test_an_aborted_request_leaves_the_others_right() -> None:
    model = zoo.build("llama")
    with PagedEngine(model, pool_of_2048(block_size=8, max_batch_tokens=32)) as engine:
        ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in RAGGED]
        early: dict[Any, Any] = {}
        for step in range(6):
            if step == 1:
                engine.abort(ids[5])  # may not have started
            if step == 5:
                engine.abort(ids[0])  # half way
            for output in engine.step():
                if output.finished:
                    early[output.request_id] = output
            engine.check()
        final = {**early, **run_to_end(engine, [i for i in ids if i not in early and i not in (ids[0], ids[5])])}
        assert engine.stats()["num_running"] == 0
    for index in (1, 2, 3, 4, 6):
        assert_equal_tokens(final[ids[index]].token_ids, solo(model, RAGGED[index], max_new_tokens=NEW))
    for index in (0, 5):
        if ids[index] in final:
            assert final[ids[index]].finish_reason == "abort"
            got = list(final[ids[index]].token_ids)
            assert_equal_tokens(got, solo(model, RAGGED[index], max_new_tokens=NEW)[: len(got)])


def test_each_request_keeps_its_own_processors() -> None:
    """Processors that read the history or the length, all different, in one batch with small chunks and preemption."""
    model = zoo.build("llama")
    free = [solo(model, ids, max_new_tokens=NEW) for ids in RAGGED]
    own: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[free[3][0]], [free[3][2], free[3][3]]]},
        {"min_new_tokens": 6, "eos_token_id": free[4][2]},
        {"suppress_tokens": [free[5][0], free[5][1]]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 1, "forced_eos_token_id": 9},
    ]
    expected = [solo(model, ids, max_new_tokens=NEW, **options) for ids, options in zip(RAGGED, own, strict=True)]
    assert sum(differing_tokens(a, b) > 0 for a, b in zip(expected, free, strict=True)) >= 5  # the processors bite
    settings = PagedConfig(block_size=8, num_blocks=10, max_batch_tokens=23)
    with PagedEngine(model, settings) as engine:
        outputs = run_requests(engine, RAGGED, own, max_new_tokens=NEW)
        assert engine.stats()["num_preemptions"] > 0
    for index, (output, tokens) in enumerate(zip(outputs, expected, strict=True)):
        assert_equal_tokens(output.token_ids, tokens, f"{own[index]}")


def test_a_seeded_request_samples_alike_in_any_company() -> None:
    model = zoo.build("qwen3")
    prompt, options = RAGGED[0], {"do_sample": True, "temperature": 1.3, "seed": 7, "max_new_tokens": NEW}
    with PagedEngine(model, pool_of_2048(block_size=8)) as engine:
        (alone,) = run_requests(engine, [prompt], [options])
        crowd = run_requests(engine, RAGGED, [options] + [{**options, "seed": s} for s in range(6)])
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=10, max_batch_tokens=7)) as tight:
        squeezed = run_requests(tight, RAGGED, [options] + [{**options, "seed": s} for s in range(6)])
    for outputs in (crowd, squeezed):
        assert_equal_tokens(outputs[0].token_ids, alone.token_ids, "seeded")
    assert tokens_of(crowd) == tokens_of(squeezed)
    assert list(alone.token_ids) != solo(model, prompt, max_new_tokens=NEW)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_streamed_outputs_grow_into_the_solo_run(name: str) -> None:
    model = zoo.build(name)
    with PagedEngine(model, pool_of_2048(max_batch_tokens=9)) as engine:
        seen = [list(output.token_ids) for output in engine.stream(RAGGED[1], max_new_tokens=NEW)]
        engine.check()
    assert_equal_tokens(seen[-1], solo(model, RAGGED[1], max_new_tokens=NEW), name)
    assert [tokens for tokens in seen if tokens] == [seen[-1][: n + 1] for n in range(NEW)]
