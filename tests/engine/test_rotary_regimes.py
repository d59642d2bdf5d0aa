"""Models whose rotary frequencies depend on length: every row gets those that it would get alone."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PhimoeConfig, PhimoeForCausalLM

from hf_paged import PagedConfig, PagedEngine, get_engine, num_fallbacks
from hf_paged.compat import CACHE_KEYWORD
from hf_paged.engine.rotary_regimes import Crossing, find_regimes
from hf_paged.errors import CapacityError
from hf_paged.integrations import generate
from tests.oracle import (
    assert_equal_batches,
    assert_equal_tokens,
    assert_rows_equal_solo,
    left_pad,
    random_prompt,
    solo,
)
from tests.zoo import PAD_TOKEN_ID, VOCAB_SIZE, WINDOWED, draw_weights, fresh

LIMIT = 32
NEW = 20
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD_TOKEN_ID}
# none, all, and some of the tokens are beyond the limit; and prompts that end around it
LENGTHS = (5, 11, 20, 31, 32, 33, 50, 70)
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0, 1.5, 6.0, 2.0, 8.0, 3.0, 5.0, 7.0],
        "original_max_position_embeddings": LIMIT,
        "factor": 4.0,
    },
    "dynamic": {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": LIMIT,
    },
}
DROPS_ITS_CACHE = {"phi3", "phimoe"}
RESTARTS = CACHE_KEYWORD == "cache"  # before 5.24 those models lose the context where they pass the limit


def _phimoe() -> Any:
    # its rotary module scales by the length, too
    rope = {**ROPES["longrope"], "short_mscale": 1.2, "long_mscale": 1.5}
    config = PhimoeConfig(**_SHARED, rope_parameters=rope, original_max_position_embeddings=LIMIT, num_local_experts=4)
    return _drawn(PhimoeForCausalLM(config))


def _gemma3() -> Any:
    # one rotary module for both kinds of layers, and only one of them is longrope
    config = Gemma3TextConfig(
        **_SHARED,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": ROPES["longrope"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )
    return _drawn(Gemma3ForCausalLM(config))


def _drawn(model: Any) -> Any:
    draw_weights(model, "llama", 0)
    return model.eval()


def _model(kind: str) -> Any:
    if kind == "phimoe":
        return _phimoe()
    if kind == "gemma3":
        return _gemma3()
    if kind == "dynamic":
        return fresh("llama", rope_parameters=ROPES[kind], max_position_embeddings=LIMIT)
    changes: dict[str, Any] = {"rope_parameters": dict(ROPES["longrope"]), "max_position_embeddings": 256}
    if kind == "minicpm3":
        changes["rope_parameters"] |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 1.5, 6.0, 2.0]}
    if kind == "phi3":
        changes["rope_parameters"]["partial_rotary_factor"] = 1.0
        changes["original_max_position_embeddings"] = LIMIT
    return fresh(kind, **changes)


def _prompts(kind: str, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Those that stock can go on from."""
    crosses = kind not in DROPS_ITS_CACHE or RESTARTS
    return [random_prompt(length, 83) for length in lengths if crosses or length > LIMIT or length + NEW <= LIMIT]


LONGROPE = ("llama", "mistral", "gemma2", "phi3")


def test_what_a_model_does_where_frequencies_change() -> None:
    assert find_regimes(fresh("llama")).limit is None
    for kind in LONGROPE:
        regimes = find_regimes(_model(kind))
        drops = Crossing.RESTARTS if RESTARTS else Crossing.FORGETS
        assert (regimes.limit, regimes.crossing) == (LIMIT, drops if kind == "phi3" else Crossing.KEEPS)
    assert find_regimes(_model("dynamic")).crossing is Crossing.UNKNOWN


@pytest.mark.parametrize(
    "kind",
    [
        *LONGROPE,
        "minicpm3",
        "phimoe",
        pytest.param("gemma3", marks=pytest.mark.skipif(not RESTARTS, reason="before 5.24 it fails in stock")),
    ],
)
def test_a_batch_on_both_sides_of_the_limit(kind: str) -> None:
    model = _model(kind)
    prompts = _prompts(kind)
    if kind in DROPS_ITS_CACHE and not RESTARTS:  # a short row might go on to where stock's loop is needed
        prompts = [prompt for prompt in prompts if len(prompt) > LIMIT]
    ids, mask = left_pad(prompts)
    for _ in range(2):  # the second time from cached prefixes
        out = model.generate(ids, attention_mask=mask, **GREEDY, cache_implementation="paged")
        assert_rows_equal_solo(model, prompts, out[:, ids.shape[1] :].tolist(), **GREEDY)
    assert num_fallbacks(model) == 0
    get_engine(model).check()


@pytest.mark.parametrize(("kind", "chunk"), [("llama", 1), *((kind, chunk) for kind in LONGROPE for chunk in (7, 64))])
def test_chunks_preemptions_and_arrivals_in_any_order(kind: str, chunk: int) -> None:
    model = _model(kind)
    prompts = _prompts(kind)
    engine = PagedEngine(model, PagedConfig(num_blocks=12, block_size=8, max_batch_tokens=chunk))
    outputs = engine.generate([*prompts, *reversed(prompts)], max_new_tokens=NEW)
    found = [output.token_ids for output in outputs]
    assert_rows_equal_solo(model, [*prompts, *reversed(prompts)], found, **GREEDY)
    assert chunk == 1 or kind in WINDOWED or engine.stats()["num_preemptions"] > 0
    engine.check()


@pytest.mark.parametrize("kind", LONGROPE)
def test_prefixes_are_shared_by_rows_of_one_kind_only(kind: str) -> None:
    model = _model(kind)
    engine = PagedEngine(model, PagedConfig(num_blocks=32, block_size=8))
    base = random_prompt(60, 84)
    is_shared = []
    for length in (70, 12, 60, 48, 10):  # of one text: beyond the limit, or not to begin with
        prompt = (base + random_prompt(10, 85))[:length]
        new = NEW if length > LIMIT or kind not in DROPS_ITS_CACHE or RESTARTS else 8
        (output,) = engine.generate([prompt], max_new_tokens=new)
        assert_equal_tokens(output.token_ids, solo(model, prompt, **{**GREEDY, "max_new_tokens": new}))
        is_shared.append(output.num_cached_tokens > 0)
    assert is_shared == [False, False, True, True, True]


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_a_resumed_text_is_computed_as_a_prompt_of_its_length(kind: str) -> None:
    # what was generated across the limit, given as a prompt: its first blocks would be those of the short frequencies
    model = _model(kind)
    engine = PagedEngine(model, PagedConfig(num_blocks=32, block_size=8))
    prompt = _prompts(kind, (20, 33))[0]
    (first,) = engine.generate([prompt], max_new_tokens=NEW)
    longer = [*prompt, *first.token_ids]
    (second,) = engine.generate([longer], max_new_tokens=NEW)
    assert_equal_tokens(second.token_ids, solo(model, longer, **GREEDY))


@pytest.mark.parametrize(
    "kind",
    [
        *(kind for kind in LONGROPE if kind not in DROPS_ITS_CACHE),
        pytest.param("phi3", marks=pytest.mark.skipif(not RESTARTS, reason="there it can't pass the limit")),
    ],
)
def test_drafts_across_the_limit(kind: str) -> None:
    model = _model(kind)
    engine = PagedEngine(model, PagedConfig(num_blocks=32, block_size=8))
    prompts = [prompt * 2 for prompt in _prompts(kind, (12, 14, 15, 20))]
    outputs = engine.generate(prompts, max_new_tokens=NEW, prompt_lookup_num_tokens=5)
    assert_rows_equal_solo(model, prompts, [output.token_ids for output in outputs], **GREEDY)
    assert engine.stats()["num_draft_tokens"] > 0
    engine.check()


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_siblings_and_beams(kind: str) -> None:
    model = _model(kind)
    for prompt in _prompts(kind, (20, 40)):
        ids = torch.tensor([prompt])
        keywords = {**GREEDY, "attention_mask": torch.ones_like(ids), "num_beams": 3, "num_return_sequences": 2}
        paged = model.generate(ids, **keywords, cache_implementation="paged")
        assert_equal_batches(paged, model.generate(ids, **keywords))
    assert num_fallbacks(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_given_cache_keeps_what_it_was_rotated_with() -> None:
    model = _model("llama")
    outs = []
    ids = torch.tensor([random_prompt(20, 86)])
    for more in ({}, {"cache_implementation": "paged"}):
        keywords = {**GREEDY, **more, "max_new_tokens": 6}
        first = model.generate(ids, attention_mask=torch.ones_like(ids), **keywords, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, torch.tensor([random_prompt(9, 87)])], -1)  # 35 tokens, of which 25 short
        given = {CACHE_KEYWORD: copy.deepcopy(first[CACHE_KEYWORD])}
        outs.append(model.generate(longer, attention_mask=torch.ones_like(longer), **keywords, **given))
    assert_equal_batches(outs[1], outs[0])
    assert num_fallbacks(model) == 0


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("dynamic", {}, "past position"),
        ("llama", {"prefill_chunk_size": 8}, "prefill_chunk_size"),
        ("llama", {"prompt_lookup_num_tokens": 3}, "assistant"),
        pytest.param(
            "phi3",
            {},
            "drops its cache",
            marks=pytest.mark.skipif(RESTARTS, reason="from 5.24 on it computes its tokens again, and so do we"),
        ),
    ],
)
def test_what_the_engine_can_not_follow_runs_as_stock(
    kind: str, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    generate._said.clear()
    model = _model(kind)
    ids = torch.tensor([random_prompt(20, 81)])
    for new, fallbacks in ((12, 0), (20, 1)):
        keywords = {**GREEDY, "attention_mask": torch.ones_like(ids), "max_new_tokens": new, **options}
        with caplog.at_level(logging.WARNING, logger="hf_paged"):
            paged = model.generate(ids, **keywords, cache_implementation="paged")
        assert_equal_batches(paged, model.generate(ids, **keywords))
        assert num_fallbacks(model) == fallbacks
    assert reason in caplog.text


def test_an_engine_refuses_what_it_can_not_follow() -> None:
    model = _model("dynamic")
    engine = PagedEngine(model, PagedConfig(num_blocks=16, max_batch_tokens=7))
    prompt = random_prompt(20, 82)
    with pytest.raises(CapacityError, match="rotary"):
        engine.add_request(prompt, max_new_tokens=13)
    with torch.no_grad():
        expected = solo(model, prompt, max_new_tokens=12)
    assert_equal_tokens(engine.generate([prompt], max_new_tokens=12)[0].token_ids, expected)
