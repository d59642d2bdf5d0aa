"""Every field of GenerationConfig, tried: equal to stock on the engine or in stock's loop, or refused as stock does.

`docs/generate.md` is made by this file: `pytest tests/integrations/test_generation_fields.py --update-docs`, once on
each version that the page shows.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CompileConfig, GenerationConfig
from transformers.generation import WatermarkingConfig

from hf_paged import get_engine
from hf_paged.compat import CACHE_KEYWORD
from tests.oracle import TALLY, left_pad, ragged_prompts, solo
from tests.tiny_tokenizer import tiny_tokenizer
from tests.zoo import PAD_TOKEN_ID, build

DOCS = Path(__file__).parents[2] / "docs"
VERSION = transformers.__version__
NEW = 8
PROMPTS = ragged_prompts(3, seed=41, shortest=4, longest=14)
SAMPLED = {"do_sample": True}


def _greedy(row: int = 0) -> list[int]:
    return solo(build("llama"), PROMPTS[row], max_new_tokens=NEW)


def _cases() -> dict[str, dict[str, Any] | str]:
    """What each field is tried with; a sentence where a field can't change what one call of `generate` returns."""
    end = _greedy()[2]
    beams = {"num_beams": 3}
    scores = {"return_dict_in_generate": True}
    return {
        "assistant_confidence_threshold": "read by an assistant model while it drafts",
        "assistant_early_exit": {"assistant_early_exit": 1},
        "assistant_ensemble_weight": "read by an assistant model while it drafts",
        "assistant_lookbehind": "read by an assistant model of another vocabulary",
        "bad_words_ids": {"bad_words_ids": [[_greedy()[0]], _greedy()[1:3]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [_greedy()[0], 5]},
        "bos_token_id": {"bos_token_id": 3},
        "cache_config": "how the pool is made: PagedConfig's page",
        "cache_implementation": "this is what asks for the engine",
        "compile_config": {"compile_config": CompileConfig()},
        "constraints": {"constraints": [[5]]},
        "continuous_batching_config": "read by stock's generate_batch only",
        "decoder_start_token_id": {"decoder_start_token_id": 3},
        "disable_compile": {"disable_compile": True},
        "diversity_penalty": {"diversity_penalty": 0.5, "num_beams": 4, "num_beam_groups": 2},
        "do_sample": SAMPLED,
        "dola_layers": {"dola_layers": "low"},
        "early_stopping": {"early_stopping": True, **beams},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
        "eos_token_id": {"eos_token_id": [end, 5]},
        "epsilon_cutoff": {"epsilon_cutoff": 0.01, **SAMPLED},
        "eta_cutoff": {"eta_cutoff": 0.01, **SAMPLED},
        "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 2.0), "eos_token_id": end},
        "force_words_ids": {"force_words_ids": [[5]], **beams},
        "forced_bos_token_id": {"forced_bos_token_id": 7},
        "forced_eos_token_id": {"forced_eos_token_id": 9},
        "guidance_scale": {"guidance_scale": 1.5},
        "is_assistant": "set by stock on the config of an assistant model",
        "length_penalty": {"length_penalty": 2.0, "eos_token_id": end, **beams},
        "low_memory": {"low_memory": True},
        "max_cache_len": {"max_cache_len": 64},
        "max_length": {"max_length": 20, "max_new_tokens": None},
        "max_matching_ngram_size": {"max_matching_ngram_size": 2, "prompt_lookup_num_tokens": 3, "one row": True},
        "max_new_tokens": {"max_new_tokens": 3},
        "max_time": {"max_time": 1000.0},
        "min_length": {"min_length": 19, "eos_token_id": end},
        "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": end},
        "min_p": {"min_p": 0.1, **SAMPLED},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "num_assistant_tokens": "read by an assistant model while it drafts",
        "num_assistant_tokens_schedule": "read by an assistant model while it drafts",
        "num_beam_groups": {"num_beam_groups": 2, "num_beams": 4},
        "num_beams": beams,
        "num_return_sequences": {"num_return_sequences": 2, **SAMPLED},
        "output_attentions": {"output_attentions": True, **scores},
        "output_hidden_states": {"output_hidden_states": True, **scores},
        "output_logits": {"output_logits": True, **scores},
        "output_scores": {"output_scores": True, **scores},
        "pad_token_id": {"pad_token_id": 11, "eos_token_id": end},
        "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
        "prefill_chunk_size": {"prefill_chunk_size": 4},
        "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3, "one row": True},
        "remove_invalid_values": {"remove_invalid_values": True},
        "renormalize_logits": {"renormalize_logits": True, "output_scores": True, **scores},
        "repetition_penalty": {"repetition_penalty": 1.6},
        "return_dict_in_generate": scores,
        "sequence_bias": {"sequence_bias": [[[_greedy()[0]], -5.0], [[5, 6], 3.0]]},
        "speculation_type": {"speculation_type": "mtp", "one row": True},
        "stop_strings": {"stop_strings": tiny_tokenizer().decode(_greedy()[2:4]), "tokenizer": tiny_tokenizer()},
        "suppress_tokens": {"suppress_tokens": _greedy()[:3]},
        "target_lookbehind": "read by an assistant model of another vocabulary",
        "temperature": {"temperature": 0.6, **SAMPLED},
        "token_healing": {"token_healing": True, "tokenizer": tiny_tokenizer(), "bos_token_id": 1},
        "top_h": {"top_h": 0.5, **SAMPLED},
        "top_k": {"top_k": 4, **SAMPLED},
        "top_p": {"top_p": 0.6, "top_k": 0, **SAMPLED},
        "transformers_version": "a note of who wrote the config",
        "typical_p": {"typical_p": 0.6, **SAMPLED},
        "use_cache": {"use_cache": False},
        "use_mtp": {"use_mtp": True, "one row": True},
        "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    }


CASES = _cases()
FIELDS = sorted(name for name in vars(GenerationConfig()) if not name.startswith("_"))


def test_every_field_of_this_version_has_a_case() -> None:
    assert [name for name in FIELDS if name not in CASES] == []


def _call(model: Any, options: dict[str, Any], **more: Any) -> Any:
    options = dict(options)
    prompts = PROMPTS[:1] if options.pop("one row", False) else PROMPTS
    ids, mask = left_pad(prompts)
    torch.manual_seed(17)
    keywords = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD_TOKEN_ID, **options}
    try:
        return model.generate(ids, attention_mask=mask, **keywords, **more)
    except Exception as error:
        return error


def _assert_alike(paged: Any, stock: Any, name: str) -> None:
    if isinstance(stock, torch.Tensor):
        assert paged.shape == stock.shape, f"{name}: {tuple(paged.shape)} instead of {tuple(stock.shape)}"
        if stock.is_floating_point():
            finite = stock.isfinite()
            assert torch.equal(finite, paged.isfinite()), name
            assert torch.allclose(paged[finite], stock[finite], atol=5e-5, rtol=1e-4), name
        else:
            differing = int((paged != stock).sum())
            TALLY.add(stock.numel(), differing)
            assert not differing, f"{name}: ours {paged.tolist()}, stock {stock.tolist()}"
    elif isinstance(stock, tuple):
        assert len(paged) == len(stock), f"{name}: {len(paged)} instead of {len(stock)}"
        for index, pair in enumerate(zip(paged, stock, strict=True)):
            _assert_alike(*pair, f"{name}[{index}]")
    else:
        assert type(paged) is type(stock), f"{name}: {type(paged).__name__} instead of {type(stock).__name__}"


def _outcome(field: str) -> str:
    case = CASES[field]
    if isinstance(case, str):
        return f"no effect: {case}"
    model = copy.deepcopy(build("llama"))
    stock, paged = _call(model, case), _call(model, case, cache_implementation="paged")
    if isinstance(stock, Exception):
        assert type(paged) is type(stock), f"stock raises {stock!r}, ours gives {paged!r}"
        return f"refused, as by stock: {type(stock).__name__}"
    assert not isinstance(paged, Exception), f"stock answers, ours raises {paged!r}"
    if isinstance(stock, torch.Tensor):
        _assert_alike(paged, stock, field)
    else:
        assert set(paged) == set(stock)
        for key in set(stock) - {CACHE_KEYWORD}:
            _assert_alike(paged[key], stock[key], f"{field}.{key}")
    engine = get_engine(model)
    on_engine = engine is not None and engine.stats()["num_fallbacks"] == 0
    return "equal" if on_engine else "equal, in stock's loop"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return {}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_means_what_it_means_in_stock(field: str, outcomes: dict[str, str]) -> None:
    outcomes[field] = _outcome(field)


def test_the_page_about_generate_says_what_was_found(outcomes: dict[str, str], request: pytest.FixtureRequest) -> None:
    if set(outcomes) != set(FIELDS):
        pytest.skip("only some of the fields were run")
    data = DOCS / "generate.json"
    known = json.loads(data.read_text()) if data.exists() else {}
    if request.config.getoption("--update-docs"):
        known[VERSION] = outcomes
        data.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        (DOCS / "generate.md").write_text(_page(known))
    if VERSION not in known:
        pytest.skip(f"the page shows {', '.join(known)}, not {VERSION}")
    assert known[VERSION] == outcomes
    assert (DOCS / "generate.md").read_text() == _page(known)


def _page(known: dict[str, dict[str, str]]) -> str:
    versions = sorted(known, key=lambda version: tuple(map(int, version.split("."))))
    fields = sorted({field for found in known.values() for field in found})
    lines = [
        '# Every field of GenerationConfig under `cache_implementation="paged"`',
        "",
        "Made by `pytest tests/integrations/test_generation_fields.py --update-docs` from calls of both, on a",
        "left-padded batch of a tiny model: tokens, scores and shapes compared. *equal*: it ran on the engine;",
        "*equal, in stock's loop*: it ran stock's own loop, on a PagedKVCache where that can be.",
        "",
        f"| field | tried with | {' | '.join(versions)} |",
        f"|---|---|{'---|' * len(versions)}",
    ]
    for field in fields:
        tried = CASES.get(field, "")
        shown = (
            "" if isinstance(tried, str) else ", ".join(f"{k}={_short(v)}" for k, v in tried.items() if k != "one row")
        )
        found = " | ".join(known[version].get(field, "no such field") for version in versions)
        lines.append(f"| `{field}` | {f'`{shown}`' if shown else ''} | {found} |")
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | str | list | tuple) else type(value).__name__
