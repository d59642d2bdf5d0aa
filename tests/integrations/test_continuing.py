"""Calls that go on from a cache run on the engine, and leave in it what stock would."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_paged import PagedConfig, PagedKVCache, get_engine, num_fallbacks
from hf_paged.compat import CACHE_KEYWORD
from tests.oracle import assert_equal_batches, left_pad, ragged_prompts
from tests.zoo import LATENT, PAD_TOKEN_ID, fresh

NEW = 8
PAGED = {"cache_implementation": "paged"}
IDS, MASK = left_pad(ragged_prompts(3, seed=71, shortest=2, longest=30))


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
    keywords = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD_TOKEN_ID, **options}
    return model.generate(ids, attention_mask=mask, **keywords, return_dict_in_generate=True)


def _longer(ids: torch.Tensor, mask: torch.Tensor, num_more: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    more = torch.randint(1, 100, (len(ids), num_more), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat([ids, more], -1)
    return ids, torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


def _assert_same_cache(ours: Any, stock: Any, mask: torch.Tensor) -> None:
    """The same length, and the same K and V wherever the next call's mask shows them."""
    assert ours.get_seq_length() == stock.get_seq_length()
    for mine, theirs in zip(ours.layers, stock.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            width = min(a.shape[2], b.shape[2])
            seen = mask[:, : ours.get_seq_length()][:, -width:, None].bool()[:, None]
            torch.testing.assert_close(a[:, :, -width:] * seen, b[:, :, -width:] * seen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2", "phi3", *LATENT])
def test_three_calls_on_one_cache(name: str) -> None:
    model = fresh(name)
    results = []
    for more in ({}, PAGED):
        outs, ids, mask, cache = [], IDS, MASK, {}
        for turn in range(3):
            out = _generate(model, ids, mask, **more, **cache)
            outs.append(out.sequences)
            if cache:
                assert out[CACHE_KEYWORD] is cache[CACHE_KEYWORD]  # stock's caller has one cache, which grows
            cache = {CACHE_KEYWORD: out[CACHE_KEYWORD]}
            ids, mask = _longer(out.sequences, mask, 2 + turn, seed=turn)
        results.append((outs, out[CACHE_KEYWORD], mask))
    (stock, stock_cache, mask), (paged, paged_cache, _) = results
    for turn, (ours, theirs) in enumerate(zip(paged, stock, strict=True)):
        assert_equal_batches(ours, theirs, f"call {turn}")
    _assert_same_cache(paged_cache, stock_cache, mask)
    assert num_fallbacks(model) == 0
    get_engine(model).check()


def test_cached_tokens_are_not_computed_again() -> None:
    model = fresh("llama")
    first = _generate(model, IDS, MASK, **PAGED)
    ids, mask = _longer(first.sequences, MASK, 3)
    get_engine(model).reset_prefix_cache()
    before = get_engine(model).stats()["num_packed_tokens"]
    _generate(model, ids, mask, **PAGED, **{CACHE_KEYWORD: first[CACHE_KEYWORD]})
    # a row: the last token of the first call, three more, and all that were generated but the last
    assert get_engine(model).stats()["num_packed_tokens"] - before == len(IDS) * (1 + 3 + NEW - 1)


@pytest.mark.parametrize("kind", ["paged", "dynamic", "empty paged", "empty dynamic"])
def test_any_plain_cache_will_do(kind: str) -> None:
    model = fresh("mistral")
    outs, caches = [], []
    for more in ({}, PAGED):
        is_paged = "paged" in kind and bool(more)
        cache = PagedKVCache(model.config) if is_paged else DynamicCache(config=model.config)
        ids, mask = IDS, MASK
        if "empty" not in kind:
            with torch.no_grad():
                positions = (MASK.cumsum(-1) - 1).clamp_min(0)
                model(IDS, attention_mask=MASK, position_ids=positions, use_cache=True, **{CACHE_KEYWORD: cache})
            ids, mask = _longer(IDS, MASK, 4)
        outs.append(_generate(model, ids, mask, **more, **{CACHE_KEYWORD: cache}).sequences)
        caches.append(cache)
    assert_equal_batches(outs[1], outs[0])
    _assert_same_cache(caches[1], caches[0], _longer(outs[0], mask, 1)[1])
    assert num_fallbacks(model) == 0


def test_a_pool_of_small_types_takes_what_it_is_given() -> None:
    model = fresh("llama")
    config = PagedConfig(k_dtype="int8", v_dtype="int8")
    first = _generate(model, IDS, MASK)
    ids, mask = _longer(first.sequences, MASK, 3)
    stock = _generate(model, ids, mask, output_logits=True)
    given = {"cache_config": config, CACHE_KEYWORD: copy.deepcopy(first[CACHE_KEYWORD])}
    paged = _generate(model, ids, mask, **PAGED, **given, output_logits=True)
    torch.testing.assert_close(paged.logits[0], stock.logits[0], rtol=0, atol=0.1)  # rounded, and nothing else
    assert not torch.equal(paged.logits[0], stock.logits[0])
    assert num_fallbacks(model) == 0


def test_one_prompt_cache_for_many_questions() -> None:
    # the recipe of Transformers' documentation: a copy of the cache for each
    model = fresh("llama")
    ids, mask = IDS[-1:], torch.ones_like(IDS[-1:])
    outs: list[list[torch.Tensor]] = []
    for more in ({}, PAGED):
        prefix = _generate(model, ids, mask, **more, max_new_tokens=1)[CACHE_KEYWORD]
        found = []
        for seed in range(3):
            question, question_mask = _longer(ids, mask, 5, seed)
            given = {CACHE_KEYWORD: copy.deepcopy(prefix)}
            found.append(_generate(model, question, question_mask, **more, **given).sequences)
        outs.append(found)
    for ours, theirs in zip(outs[1], outs[0], strict=True):
        assert_equal_batches(ours, theirs)
    assert num_fallbacks(model) == 0


def test_a_cropped_cache() -> None:
    model = fresh("llama")
    outs = []
    for more in ({}, PAGED):
        first = _generate(model, IDS, MASK, **more)
        first[CACHE_KEYWORD].crop(-4)
        ids, mask = _longer(first.sequences[:, :-6], MASK, 5)  # some new ones stand where others have been
        outs.append(_generate(model, ids, mask, **more, **{CACHE_KEYWORD: first[CACHE_KEYWORD]}).sequences)
    assert_equal_batches(outs[1], outs[0])
    assert num_fallbacks(model) == 0


def test_a_cache_of_other_tokens_is_believed_and_spoils_no_prefix() -> None:
    model = fresh("llama")
    ids, mask = _longer(IDS, MASK, 40)
    outs, others = [], IDS.clone().clamp_min(1).flip(1)
    for more in ({}, PAGED):
        first = _generate(model, others, MASK, **more, max_new_tokens=1)
        outs.append(_generate(model, ids, mask, **more, **{CACHE_KEYWORD: first[CACHE_KEYWORD]}).sequences)
    assert_equal_batches(outs[1], outs[0])
    honest = _generate(model, ids, mask)
    assert not torch.equal(honest.sequences, outs[0])  # else this test would show nothing
    for _ in range(2):
        assert_equal_batches(_generate(model, ids, mask, **PAGED).sequences, honest.sequences)
    assert num_fallbacks(model) == 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_rows_that_are_preempted_begin_from_the_cache_again(name: str) -> None:
    model = fresh(name)
    others = IDS.clone().clamp_min(1).flip(1)  # computed from the tokens, the K and V would be others
    small = PagedConfig(num_blocks=10 if name == "llama" else 5, block_size=8, max_batch_tokens=16)
    outs, caches = [], []
    for more in ({}, {**PAGED, "cache_config": small}):
        first = _generate(model, others, MASK, max_new_tokens=1)
        ids, mask = _longer(IDS, MASK, 9)
        cache = first[CACHE_KEYWORD]
        outs.append(_generate(model, ids, mask, **more, max_new_tokens=20, **{CACHE_KEYWORD: cache}).sequences)
        caches.append(cache)
    assert_equal_batches(outs[1], outs[0])
    _assert_same_cache(caches[1], caches[0], _longer(outs[0], mask, 1)[1])
    engine = get_engine(model)
    assert engine.stats()["num_preemptions"] > 0
    assert num_fallbacks(model) == 0
    engine.check()


def test_rows_that_end_early_are_fed_on_as_stock_feeds_them() -> None:
    model = fresh("llama")
    stock = _generate(model, IDS, MASK, max_new_tokens=4)
    ids, mask = _longer(stock.sequences, MASK, 2)
    plain = _generate(model, ids, mask, **{CACHE_KEYWORD: copy.deepcopy(stock[CACHE_KEYWORD])}).sequences
    eos = int(plain[0, ids.shape[1] + 2])
    outs, caches = [], []
    for more in ({}, PAGED):
        cache = copy.deepcopy(stock[CACHE_KEYWORD])
        keywords = {"eos_token_id": eos, **more, CACHE_KEYWORD: cache}
        outs.append(_generate(model, ids, mask, **keywords).sequences)
        caches.append(cache)
    assert_equal_batches(outs[1], outs[0])
    _assert_same_cache(caches[1], caches[0], _longer(outs[0], mask, 1)[1])


def test_drawn_tokens_are_stocks() -> None:
    model = fresh("llama")
    outs = []
    for more in ({}, PAGED):
        first = _generate(model, IDS, MASK, **more)
        ids, mask = _longer(first.sequences, MASK, 2)
        torch.manual_seed(3)
        given = {CACHE_KEYWORD: first[CACHE_KEYWORD], "do_sample": True, "top_k": 20}
        outs.append(_generate(model, ids, mask, **more, **given).sequences)
    assert_equal_batches(outs[1], outs[0])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beams"),
        ({"static": True}, "StaticCache"),
        pytest.param(
            {"recording": True},
            "records",
            marks=pytest.mark.skipif(
                CACHE_KEYWORD != "cache", reason="before 5.24 stock's own loop fails on a cache that records"
            ),
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_engine_can_not_go_on_from_runs_as_stock(
    options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = fresh("mistral")
    options = dict(options)
    is_static, is_recording = options.pop("static", False), options.pop("recording", False)
    outs = []
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        for more in ({}, PAGED):
            cache: Any = DynamicCache(config=model.config)
            if is_static:
                cache = StaticCache(config=model.config, max_cache_len=64)
            if is_recording:
                cache.activate_past_recording()
            outs.append(_generate(model, IDS, MASK, **options, **more, **{CACHE_KEYWORD: cache}).sequences)
    assert_equal_batches(outs[1], outs[0])
    assert num_fallbacks(model) == 1
    assert reason in caplog.text


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_the_deprecated_keyword_works_where_stock_takes_it() -> None:
    model = fresh("llama")
    first = _generate(model, IDS, MASK, **PAGED)
    ids, mask = _longer(first.sequences, MASK, 2)
    stock = _generate(model, ids, mask).sequences
    paged = _generate(model, ids, mask, **PAGED, past_key_values=first[CACHE_KEYWORD]).sequences
    assert_equal_batches(paged, stock)
    assert num_fallbacks(model) == 0
