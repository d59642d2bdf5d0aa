"""Prompts given as embeddings run packed, and give the tokens that stock gives."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_paged import PagedConfig, PagedEngine, get_engine, num_fallbacks
from hf_paged.compat import CACHE_KEYWORD
from hf_paged.errors import RequestError
from tests.oracle import assert_equal_batches, assert_equal_tokens, left_pad, ragged_prompts, solo
from tests.zoo import PAD_TOKEN_ID, build, fresh

NEW = 8
PROMPTS = ragged_prompts(5, seed=81, shortest=2, longest=30)
IDS, MASK = left_pad(PROMPTS)
OPTIONS: dict[str, Any] = {
    "attention_mask": MASK,
    "max_new_tokens": NEW,
    "do_sample": False,
    "pad_token_id": PAD_TOKEN_ID,
}


def _embeds(model: Any) -> torch.Tensor:
    """Those of the prompts, moved to where no token is."""
    embeds = model.get_input_embeddings()(IDS).detach()
    return embeds + 0.3 * torch.randn(embeds.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_config": {"num_blocks": 4, "block_size": 16, "max_batch_tokens": 7}},
        {"do_sample": True, "num_return_sequences": 2},
        {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": list(range(3, 12))},
        {"num_beams": 2, "do_sample": True},
        {"num_beams": 2, "cache_config": {"num_blocks": 5, "block_size": 16}},
        {"repetition_penalty": 1.4, "eos_token_id": list(range(3, 30)), "min_new_tokens": 2},
    ],
    ids=str,
)
def test_a_batch_of_embeddings_equals_stock(name: str, options: dict[str, Any]) -> None:
    model = fresh(name)
    embeds = _embeds(model)
    stock_options = {key: value for key, value in options.items() if key != "cache_config"}
    torch.manual_seed(4)
    expected = model.generate(inputs_embeds=embeds, **{**OPTIONS, **stock_options})
    for _ in range(2):  # nothing is taken from what came before: zeros stand for these prompts
        torch.manual_seed(4)
        actual = model.generate(inputs_embeds=embeds, **{**OPTIONS, **options}, cache_implementation="paged")
        assert_equal_batches(actual, expected)
        embeds = embeds + 1.0
        torch.manual_seed(4)
        expected = model.generate(inputs_embeds=embeds, **{**OPTIONS, **stock_options})
    assert num_fallbacks(model) == 0
    engine = get_engine(model)
    assert engine is not None
    is_preempted = "cache_config" in options and "num_beams" not in options  # beams take turns instead
    assert (engine.stats()["num_preemptions"] > 0) == is_preempted
    engine.check()


def test_without_a_mask_and_with_scores() -> None:
    model = fresh("llama")
    embeds = _embeds(model)[:2, -4:]
    options = {**OPTIONS, "attention_mask": None, "return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(inputs_embeds=embeds, **options)
    actual = model.generate(inputs_embeds=embeds, **options, cache_implementation="paged")
    assert_equal_batches(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.scores), torch.stack(expected.scores), atol=5e-5, rtol=1e-4)
    assert actual[CACHE_KEYWORD].get_seq_length() == expected[CACHE_KEYWORD].get_seq_length()


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 2}, {"input_ids": IDS}], ids=["drafts", "tokens"])
def test_what_else_embeddings_come_with_runs_stocks_loop(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = fresh("llama")
    keywords = {**OPTIONS, **options, "inputs_embeds": _embeds(model)}
    if "prompt_lookup_num_tokens" in options:  # stock takes one row
        keywords.update(inputs_embeds=keywords["inputs_embeds"][:1], attention_mask=MASK[:1])
    expected = model.generate(**keywords)
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        assert_equal_batches(model.generate(**keywords, cache_implementation="paged"), expected)
    assert num_fallbacks(model) == 1


class _CountsTokens(LlamaForCausalLM):
    """Adds something to every logit of a token that it was given as one."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        inputs_embeds: Any = None,
        logits_to_keep: Any = 0,
        **kwargs: Any,
    ) -> Any:
        known = {"attention_mask": attention_mask, "position_ids": position_ids, "logits_to_keep": logits_to_keep}
        result = super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **known, **kwargs)
        if input_ids is not None:
            result.logits[..., 9] += 2.0
        return result


def test_a_model_that_does_more_with_tokens_than_to_embed_them(caplog: pytest.LogCaptureFixture) -> None:
    plain = fresh("llama")
    model = _CountsTokens(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    embeds = _embeds(model)
    expected = model.generate(inputs_embeds=embeds, **OPTIONS)
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        assert_equal_batches(model.generate(inputs_embeds=embeds, **OPTIONS, cache_implementation="paged"), expected)
    assert "more with tokens than to embed them" in caplog.text


# -- in the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 7, "max_batch_tokens": 9}], ids=["roomy", "small"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 3, "eos_token_id": list(range(3, 60))},
        {"forced_eos_token_id": 9},
    ],
    ids=str,
)
def test_requests_of_embeddings_beside_requests_of_tokens(settings: dict[str, Any], options: dict[str, Any]) -> None:
    model = build("llama")
    engine = PagedEngine(model, PagedConfig(**{"block_size": 8, "num_blocks": 64, **settings}))
    embeds = _embeds(model)
    given = [row[mask.bool()] for row, mask in zip(embeds, MASK, strict=True)]
    prompts = [*given, *PROMPTS]
    for _ in range(2):
        outputs = engine.generate(prompts, max_new_tokens=2 * NEW, **options)
        for row, output in zip(given, outputs, strict=False):
            keywords = {**OPTIONS, "attention_mask": None, "max_new_tokens": 2 * NEW, **options}
            assert_equal_tokens(output.token_ids, model.generate(inputs_embeds=row[None], **keywords)[0].tolist())
            assert output.num_cached_tokens == 0
        for prompt, output in zip(PROMPTS, outputs[len(given) :], strict=True):
            assert_equal_tokens(output.token_ids, solo(model, prompt, max_new_tokens=2 * NEW, **options))
    if "eos_token_id" not in options:
        assert (engine.stats()["num_preemptions"] > 0) == bool(settings)


@pytest.mark.parametrize(
    ("shape", "keywords", "message"),
    [
        ((3, 5), {}, r"\[tokens, 64\]"),
        ((0, 64), {}, "at least one token"),
        ((2, 3, 64), {}, r"not \(2, 3, 64\)"),
        ((3, 64), {"guidance_scale": 2.0}, "prompt of tokens"),
        ((3, 64), {"prompt_logprobs": 0}, "prompt of tokens"),
    ],
)
def test_bad_embeddings_are_refused(shape: tuple[int, ...], keywords: dict[str, Any], message: str) -> None:
    engine = PagedEngine(build("llama"), PagedConfig(num_blocks=16))
    with pytest.raises(RequestError, match=message):
        engine.add_request(torch.zeros(shape), **keywords)
