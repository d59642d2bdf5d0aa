"""Guidance and allowed prefixes: per request in the engine, per row in generate, as in stock."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from hf_paged import PagedConfig, PagedEngine, get_engine, num_fallbacks
from hf_paged.errors import RequestError
from tests.oracle import assert_equal_batches, assert_equal_tokens, left_pad, ragged_prompts
from tests.zoo import PAD_TOKEN_ID, VOCAB_SIZE, build, fresh

NEW = 16
PROMPTS = ragged_prompts(5, seed=71, shortest=2, longest=30)
IDS, MASK = left_pad(PROMPTS)
NEGATIVE = [5, 17, 44]
SMALL: dict[str, Any] = {"num_blocks": 7, "max_batch_tokens": 16}


def _engine(name: str = "llama", **config: Any) -> PagedEngine:
    return PagedEngine(build(name), PagedConfig(**{"block_size": 8, "num_blocks": 128, **config}))


def _stock(name: str, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    out = build(name).generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


def _allowed(row: int, tokens: torch.Tensor) -> list[int]:
    # depends on the row, on the last token and on the length
    last = int(tokens[-1])
    return [(last * 7 + row * 13 + step * 5 + len(tokens)) % (VOCAB_SIZE - 1) + 1 for step in range(9)]


@pytest.mark.parametrize("settings", [{}, SMALL], ids=["roomy", "small"])
@pytest.mark.parametrize(
    "options", [{}, {"negative_prompt_ids": NEGATIVE}, {"repetition_penalty": 1.4}, {"do_sample": True, "top_k": 20}]
)
def test_guided_requests_equal_stock(options: dict[str, Any], settings: dict[str, Any]) -> None:
    engine = _engine(**settings)
    seeds = {"seed": list(range(len(PROMPTS)))} if "do_sample" in options else {}
    scales = [1.5, 0.5, 3.0, 1.0, 0.0]
    if "negative_prompt_ids" in options:
        scales[3] = 2.0
    outputs = engine.generate(PROMPTS, max_new_tokens=NEW, guidance_scale=scales, **options, **seeds)
    assert (engine.stats()["num_preemptions"] > 0) == bool(settings)
    stock = dict(options)
    if "negative_prompt_ids" in stock:
        stock["negative_prompt_ids"] = torch.tensor([NEGATIVE])
    for index, (prompt, scale, output) in enumerate(zip(PROMPTS, scales, outputs, strict=True)):
        torch.manual_seed(index)
        assert_equal_tokens(output.token_ids, _stock("llama", prompt, guidance_scale=scale, **stock))


def test_guided_siblings_have_branches_of_their_own() -> None:
    options = {"guidance_scale": 2.0, "negative_prompt_ids": NEGATIVE, "max_new_tokens": NEW}
    output = _engine().generate([PROMPTS[0]], num_return_sequences=3, do_sample=True, seed=3, **options)[0]
    alone = _engine().generate([PROMPTS[0]], num_return_sequences=1, do_sample=True, seed=3, **options)[0]
    assert_equal_tokens(output.outputs[0].token_ids, alone.token_ids)
    small = _engine(num_blocks=10, max_batch_tokens=16)
    again = small.generate([PROMPTS[0]], num_return_sequences=3, do_sample=True, seed=3, **options)[0]
    for sequence, expected in zip(again.outputs, output.outputs, strict=True):
        assert_equal_tokens(sequence.token_ids, expected.token_ids)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"negative_prompt_ids": NEGATIVE}, "guidance_scale"),
        ({"negative_prompt_ids": [], "guidance_scale": 2.0}, "one or more"),
        ({"negative_prompt_ids": [VOCAB_SIZE], "guidance_scale": 2.0}, "one or more"),
        ({"negative_prompt_ids": "x", "guidance_scale": 2.0}, "token ids"),
        ({"prefix_allowed_tokens_fn": 3}, "function"),
        ({"guidance_scale": 2.0, "adapter": "__base__"}, "adapter"),
    ],
)
def test_bad_guidance_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        _engine().add_request(PROMPTS[0], **keywords)


def _of_row(row: int, _: int, tokens: torch.Tensor) -> list[int]:
    return _allowed(row, tokens)


@pytest.mark.parametrize("settings", [{}, SMALL], ids=["roomy", "small"])
def test_allowed_prefixes_of_requests_equal_stock(settings: dict[str, Any]) -> None:
    engine = _engine(**settings)
    outputs = engine.generate(PROMPTS, max_new_tokens=NEW, prefix_allowed_tokens_fn=_allowed)
    for row, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        allowed = functools.partial(_of_row, row)
        expected = _stock("llama", prompt, prefix_allowed_tokens_fn=allowed)
        assert_equal_tokens(output.token_ids, expected)
    request_id = engine.add_request(PROMPTS[1], max_new_tokens=NEW, prefix_allowed_tokens_fn=_allowed)
    last: Any = None
    while engine.has_unfinished_requests:
        last = [last, *engine.step()][-1]
    assert last.request_id == request_id
    assert_equal_tokens(last.token_ids, _stock("llama", PROMPTS[1], prefix_allowed_tokens_fn=_allowed))


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize(
    "options",
    [
        {"prefix_allowed_tokens_fn": _allowed},
        {"prefix_allowed_tokens_fn": _allowed, "cache_config": {"num_blocks": 4, "block_size": 16}},
        {"prefix_allowed_tokens_fn": _allowed, "num_return_sequences": 2, "do_sample": True},
        {"guidance_scale": 1.7},
        {"guidance_scale": 1.7, "eos_token_id": list(range(3, 40))},
        {"guidance_scale": 2.5, "cache_config": {"num_blocks": 4, "block_size": 16}},
        {
            "guidance_scale": 1.7,
            "negative_prompt_ids": IDS.roll(1, 0),
            "negative_prompt_attention_mask": MASK.roll(1, 0),
        },
        {"guidance_scale": 1.3, "do_sample": True, "num_return_sequences": 2},
    ],
    ids=lambda options: ", ".join(sorted(options)),  # a function's address differs from process to process
)
def test_generate_on_a_ragged_batch(name: str, options: dict[str, Any]) -> None:
    model = fresh(name)
    common = {"attention_mask": MASK, "max_new_tokens": NEW, "pad_token_id": PAD_TOKEN_ID, "do_sample": False}
    results = []
    for paged in (False, True):
        torch.manual_seed(2)
        own = {key: value for key, value in options.items() if paged or key != "cache_config"}
        more = {"cache_implementation": "paged"} if paged else {}
        results.append(model.generate(IDS, **{**common, **own}, **more))
    assert_equal_batches(results[1], results[0])
    assert num_fallbacks(model) == 0
    if "cache_config" in options:
        engine = get_engine(model)
        assert engine is not None
        assert engine.stats()["num_preemptions"] > 0
