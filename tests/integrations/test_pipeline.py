"""A paged pipeline returns what stock's does, item by item, and gives results as they come."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import logging
import threading
import time
from collections import UserList, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    TextGenerationPipeline,
    TextStreamer,
    pipeline,
)
from transformers.pipelines.pt_utils import KeyDataset

import hf_paged
from hf_paged import PagedConfig, PagedTextGenerationPipeline, get_engine, num_fallbacks, paged_pipeline
from hf_paged.engine import in_flight
from hf_paged.errors import CapacityError, ConfigError, EngineClosedError, PagedError
from hf_paged.integrations.pipeline_iterator import say_once
from tests.oracle import TALLY, assert_equal_tokens
from tests.tiny_tokenizer import tiny_tokenizer
from tests.zoo import PAD_TOKEN_ID, VOCAB_SIZE, build, fresh

NEW = 9
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if not (loop.last and continue_final_message) %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = [
    "Paris",
    "a" * 41,
    "the quick brown fox",
    "b",
    "the quick brown fox jumps over the lazy dog, and over the next one as well",
    "beta",
    "the quick brown cat",
]
CHATS = [
    [{"role": "user", "content": "Who are you?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Paris, and why?"}],
    [{"role": "user", "content": "beta"}, {"role": "assistant", "content": "It is"}],
]


@functools.cache
def _tokenizer() -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _settled(model: PreTrainedModel, **settings: Any) -> PreTrainedModel:
    model.generation_config = GenerationConfig(
        **{"do_sample": False, "pad_token_id": PAD_TOKEN_ID, "max_new_tokens": NEW, **settings}
    )
    return model


@functools.cache
def _model(name: str = "llama") -> PreTrainedModel:
    return _settled(fresh(name))


def _stock(model: PreTrainedModel | None = None, **settings: Any) -> Any:
    return pipeline("text-generation", model=model or _model(), tokenizer=_tokenizer(), device="cpu", **settings)


def _both(model: PreTrainedModel | None = None, **settings: Any) -> tuple[Any, Any]:
    stock = _stock(model, **settings)
    return stock, paged_pipeline(stock)


def _assert_equal(actual: Any, expected: Any, what: str = "") -> None:
    # two results of one pipeline call, counted as tokens where they hold some
    assert type(actual) is type(expected), what
    if isinstance(expected, list) and expected and isinstance(expected[0], int):
        assert_equal_tokens(actual, expected, what)
    elif isinstance(expected, list):
        assert len(actual) == len(expected), what
        for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
            _assert_equal(a, b, f"{what}[{index}]")
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), what
        for key in expected:
            _assert_equal(actual[key], expected[key], f"{what}[{key!r}]")
    elif isinstance(expected, str):
        TALLY.add(len(expected), 0 if actual == expected else 1)  # the tiny tokenizer's tokens are characters
        assert actual == expected, what
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=1e-4, nan_ok=True), what
    else:
        assert actual == expected, what


def _at_rest(model: PreTrainedModel) -> None:
    engine = get_engine(model)
    assert engine is not None
    engine.check()
    stats = engine.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert not engine.core.requests
    assert stats["free_blocks"] == stats["num_blocks"]
    assert not engine._queues
    assert not engine._unclaimed


@pytest.fixture(autouse=True)
def _say_again_one_by_one() -> None:
    say_once.cache_clear()


# -- equal to stock --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "qwen3"])
def test_mixed_lengths_are_equal_to_stock(name: str) -> None:
    stock, ours = _both(_model(name))
    _assert_equal(ours(PROMPTS, return_tensors=True), stock(PROMPTS, return_tensors=True), name)
    _assert_equal(ours(PROMPTS), stock(PROMPTS), name)
    assert num_fallbacks(_model(name)) == 0
    _at_rest(_model(name))


def test_the_class_can_be_named_where_the_pipeline_is_made() -> None:
    stock = _stock()
    ours = _stock(pipeline_class=PagedTextGenerationPipeline)
    assert isinstance(ours, PagedTextGenerationPipeline)
    _assert_equal(ours(PROMPTS), stock(PROMPTS))
    _assert_equal(ours(PROMPTS[0]), stock(PROMPTS[0]))


def test_a_list_runs_together() -> None:
    model = _settled(fresh("llama"))
    ours = paged_pipeline(_stock(model))
    ours(PROMPTS)
    engine = get_engine(model)
    assert engine is not None
    # the prompts fit into one step, and each step gives each of them a token
    assert engine.stats()["num_steps"] == NEW


CALLS: dict[str, dict[str, Any]] = {
    "new text": {"return_full_text": False},
    "full text": {"return_full_text": True},
    "return_text": {"return_text": True},
    "tensors": {"return_tensors": True},
    "prefix": {"prefix": "Once upon "},
    "prefix and max_length": {"prefix": "Once upon ", "max_length": 90, "max_new_tokens": None},
    "stop_sequence": {"stop_sequence": "i"},
    "stop_strings": {"stop_strings": ["e", "xY"], "tokenizer": tiny_tokenizer()},
    "max_new_tokens": {"max_new_tokens": 3},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": [101, 5]},
    "an end token": {"eos_token_id": [101, 50, 54, 62, 117]},
    "special tokens kept": {"skip_special_tokens": False},
    "clean_up_tokenization_spaces": {"clean_up_tokenization_spaces": True},
    "add_special_tokens": {"add_special_tokens": False},
    "truncation": {"tokenizer_encode_kwargs": {"truncation": True, "max_length": 12}},
    "padded prompts": {
        "tokenizer_encode_kwargs": {"padding": "max_length", "max_length": 90},
        "repetition_penalty": 1.4,
    },
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[67], [54], [119, 101]]},
    "suppress_tokens": {"suppress_tokens": [54, 62]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [40 + len(ids) % 7, 90 + row]},
    "guidance_scale": {"guidance_scale": 1.7},
    "renormalize_logits": {"renormalize_logits": True, "remove_invalid_values": True},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "beams": {"num_beams": 3},
    "beams returned": {"num_beams": 3, "num_return_sequences": 2},
    "beams and an end token": {"num_beams": 3, "eos_token_id": [101, 50, 54, 62, 117], "early_stopping": True},
    "beams and lengths": {"num_beams": 2, "eos_token_id": [101, 50, 54], "length_penalty": -1.0},
    "beams and processors": {"num_beams": 3, "repetition_penalty": 1.6, "no_repeat_ngram_size": 2, "min_length": 30},
    "beams and max_length": {"num_beams": 3, "max_length": 90, "max_new_tokens": None},
    "beams and stop strings": {"num_beams": 2, "stop_strings": ["e", "xY"], "tokenizer": tiny_tokenizer()},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "prompt lookup and an end token": {"prompt_lookup_num_tokens": 2, "eos_token_id": [101, 50, 54]},
    "assistant": {"assistant_model": fresh("llama")},
    "another assistant": {"assistant_model": fresh("mistral"), "repetition_penalty": 1.6},
    "generation_config": {"generation_config": GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_many_runs_together_and_is_equal_to_stock(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = _settled(fresh("llama"))
    stock, ours = _both(model)
    expected = stock(PROMPTS, **CALLS[name])
    with caplog.at_level(logging.WARNING, "hf_paged"):
        _assert_equal(ours(PROMPTS, **CALLS[name]), expected, name)
    assert not [record for record in caplog.records if record.name == "hf_paged"]
    assert num_fallbacks(model) == 0
    engine = get_engine(model)
    assert engine is not None
    # one after another they would need seven times as many
    assert engine.stats()["num_steps"] <= CALLS[name].get("max_length", NEW) + 3
    _at_rest(model)


class _Favour(LogitsProcessor):
    """Remembers how often it was asked, as a processor may."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, 40 + self.calls % 60] += 5.0
        return scores


class _EndsAfterTwo(StoppingCriteria):
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.Tensor:
        return (input_ids[:, -1] % 2 == 0) & torch.ones(len(input_ids), dtype=torch.bool)


class _Heard(TextStreamer):
    def __init__(self) -> None:
        super().__init__(_tokenizer())
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


ONE_BY_ONE: dict[str, Callable[[], dict[str, Any]]] = {
    "LogitsProcessor": lambda: {"logits_processor": LogitsProcessorList([_Favour()])},
    "stopping_criteria": lambda: {"stopping_criteria": [_EndsAfterTwo()]},
    "streamer": lambda: {"streamer": _Heard()},
    "return_dict_in_generate": lambda: {"return_dict_in_generate": True, "output_scores": True},
    "MaxTimeCriteria": lambda: {"max_time": 1000.0},
    "output_attentions": lambda: {"output_attentions": True, "return_dict_in_generate": True},
    "use_cache": lambda: {"use_cache": False},
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_must_run_alone_does_and_is_equal_to_stock(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = _settled(fresh("llama"))
    stock, ours = _both(model)
    stocks, own = ONE_BY_ONE[name](), ONE_BY_ONE[name]()
    expected = stock(PROMPTS, **stocks)
    with caplog.at_level(logging.WARNING, "hf_paged"):
        _assert_equal(ours(PROMPTS, **own), expected, name)
    said = [record for record in caplog.records if record.name == "hf_paged"]
    assert len(said) <= 1, "said once, or nothing where the engine has the mode"
    if "streamer" in own:
        assert own["streamer"].heard == stocks["streamer"].heard


def test_a_call_that_runs_alone_gives_its_first_result_before_it_takes_the_third() -> None:
    taken: list[int] = []

    def prompts() -> Iterator[str]:
        for index in range(50):
            taken.append(index)
            yield f"prompt {index}"

    results = paged_pipeline(_stock())(prompts(), return_dict_in_generate=True, max_new_tokens=2)
    next(results)
    assert len(taken) <= 2


def test_one_input_draws_from_torchs_own_generator_as_stock_does() -> None:
    stock, ours = _both()
    for inputs in (PROMPTS[2], CHATS[1]):
        torch.manual_seed(3)
        expected = stock(inputs, do_sample=True, num_return_sequences=3)
        torch.manual_seed(3)
        _assert_equal(ours(inputs, do_sample=True, num_return_sequences=3), expected)
        assert isinstance(expected, list)
        assert len(expected) == 3


def test_the_defaults_of_stocks_pipeline_hold() -> None:
    model = fresh("llama")
    model.generation_config = GenerationConfig(pad_token_id=PAD_TOKEN_ID)
    stock, ours = _both(model)
    outputs = ours(PROMPTS[:1], return_tensors=True, seed=4)
    torch.manual_seed(4)
    _assert_equal(outputs[0], stock(PROMPTS[0], return_tensors=True))
    assert len(outputs[0][0]["generated_token_ids"]) > 256


def test_settings_given_where_the_pipeline_was_made_hold() -> None:
    settings: dict[str, Any] = {
        "max_new_tokens": 4,
        "return_full_text": False,
        "repetition_penalty": 1.5,
        "prefix": "A",
    }
    stock, ours = _both(**settings)
    expected = stock(PROMPTS)
    _assert_equal(ours(PROMPTS), expected)
    _assert_equal(_stock(pipeline_class=PagedTextGenerationPipeline, **settings)(PROMPTS), expected)
    _assert_equal(stock(PROMPTS), expected)  # and the pipeline it was made from is as it was


def test_a_hole_is_cut_into_long_prompts() -> None:
    tokenizer = copy.deepcopy(_tokenizer())
    tokenizer.model_max_length = 40
    stock = pipeline("text-generation", model=_model(), tokenizer=tokenizer, device="cpu")
    options: dict[str, Any] = {"handle_long_generation": "hole", "max_new_tokens": NEW, "return_tensors": True}
    expected = stock(PROMPTS, **options)
    assert max(len(item[0]["generated_token_ids"]) for item in expected) == 40
    _assert_equal(paged_pipeline(stock)(PROMPTS, **options), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_empty_prompt_is_the_bos_token_or_an_error_as_in_stock(name: str) -> None:
    model = _settled(fresh(name))
    stock, ours = _both(model)
    with pytest.raises(ValueError, match="bos_token_id") as expected:
        stock(["a", ""])
    with pytest.raises(ValueError, match="bos_token_id") as actual:
        ours(["a", ""])
    assert str(actual.value) == str(expected.value)
    _at_rest(model)
    prompts = ["Paris", "", "b"]
    _assert_equal(ours(prompts, bos_token_id=1), stock(prompts, bos_token_id=1))


def test_quiet_preemption_in_a_small_pool() -> None:
    model = _settled(fresh("llama"))
    stock = _stock(model)
    ours = paged_pipeline(stock, PagedConfig(num_blocks=12, block_size=8, max_batch_tokens=24))
    _assert_equal(ours(PROMPTS, max_new_tokens=20), stock(PROMPTS, max_new_tokens=20))
    engine = get_engine(model)
    assert engine is not None
    assert engine.config.num_blocks == 12
    assert engine.stats()["num_preemptions"] > 0
    _at_rest(model)


def test_a_pool_grows_with_answers_that_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "_HORIZON", 8)
    monkeypatch.setattr(in_flight, "_STEPS_BETWEEN_LOOKS", 4)
    model = _settled(fresh("llama"))
    stock, ours = _both(model)
    _assert_equal(ours(PROMPTS, max_new_tokens=60), stock(PROMPTS, max_new_tokens=60))
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["num_preemptions"] == 0
    assert engine.stats()["num_blocks"] > 35
    _at_rest(model)


@pytest.mark.parametrize("where", ["paged_pipeline", "call", "pipeline"])
def test_a_config_reaches_the_engine(where: str) -> None:
    model = _settled(fresh("llama"))
    config = PagedConfig(block_size=32, num_blocks=40)
    if where == "paged_pipeline":
        paged_pipeline(_stock(model), config)(PROMPTS)
    elif where == "call":
        paged_pipeline(_stock(model))(PROMPTS, cache_config=config)
    else:
        _stock(model, pipeline_class=PagedTextGenerationPipeline, cache_config=config)(PROMPTS)
    engine = get_engine(model)
    assert engine is not None
    assert engine.config == config


# -- sampling --------------------------------------------------------------------------------------------------------


def test_item_i_is_stocks_after_manual_seed_of_seed_plus_i() -> None:
    stock, ours = _both()
    outputs = ours(PROMPTS, do_sample=True, temperature=1.3, top_k=20, seed=11, return_tensors=True)
    for index, prompt in enumerate(PROMPTS):
        torch.manual_seed(11 + index)
        expected = stock(prompt, do_sample=True, temperature=1.3, top_k=20, return_tensors=True)
        _assert_equal(outputs[index], expected, f"item {index}")
    _assert_equal(ours(PROMPTS[0], do_sample=True, temperature=1.3, top_k=20, seed=11, return_tensors=True), outputs[0])


def test_sampled_beams_draw_from_their_items_generator() -> None:
    stock, ours = _both()
    before = torch.get_rng_state()
    outputs = ours(PROMPTS[:3], do_sample=True, num_beams=2, seed=11)
    assert torch.equal(torch.get_rng_state(), before)
    for index, prompt in enumerate(PROMPTS[:3]):
        torch.manual_seed(11 + index)
        _assert_equal(outputs[index], stock(prompt, do_sample=True, num_beams=2))


def test_beams_take_turns_where_the_pool_is_small() -> None:
    model = _settled(fresh("llama"))
    stock = _stock(model)
    ours = paged_pipeline(stock, PagedConfig(num_blocks=16, block_size=8))
    options = {"num_beams": 3, "num_return_sequences": 2, "return_tensors": True}
    _assert_equal(ours(PROMPTS, **options), stock(PROMPTS, **options))
    engine = get_engine(model)
    assert engine is not None
    assert NEW < engine.stats()["num_steps"] < NEW * len(PROMPTS)
    assert engine.stats()["num_preemptions"] == 0
    _at_rest(model)


def test_beams_of_an_iterator_come_as_they_end_and_are_given_up_when_it_is_left() -> None:
    model = _settled(fresh("llama"))
    stock, ours = _both(model)
    threads = threading.active_count()
    options = {"num_beams": 2, "eos_token_id": [101, 50, 54, 62, 117], "early_stopping": True, "max_new_tokens": 40}
    with ours(itertools.cycle(PROMPTS), **options) as results:
        for prompt in PROMPTS[:3]:
            _assert_equal(next(results), stock(prompt, **options))
        assert threading.active_count() > threads  # others are in their middle
    _at_rest(model)
    for _ in ours(_long_ones(100), num_beams=2):
        break
    gc.collect()
    _at_rest(model)
    for _ in range(100):
        if threading.active_count() == threads:
            break
        time.sleep(0.05)
    assert threading.active_count() == threads


def test_what_raises_in_one_beam_search_is_that_items_error() -> None:
    model = _settled(fresh("llama"))
    stock, ours = _both(model)

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        if len(ids) == len(PROMPTS[2]) + 3:
            raise ValueError("no such place")
        return list(range(40, 90))

    results = ours(iter(PROMPTS), num_beams=2, prefix_allowed_tokens_fn=allowed)
    for index, prompt in enumerate(PROMPTS):
        if len(prompt) == len(PROMPTS[2]):
            with pytest.raises(ValueError, match="no such place"):
                next(results)
        else:
            _assert_equal(next(results), stock(prompt, num_beams=2, prefix_allowed_tokens_fn=allowed), f"item {index}")
    assert list(results) == []
    _at_rest(model)


def test_torchs_seed_decides_whatever_runs_beside() -> None:
    ours = paged_pipeline(_stock())
    small = paged_pipeline(_stock(_settled(fresh("llama"))), PagedConfig(max_requests_per_batch=2, max_batch_tokens=16))
    results = []
    for pipe in (ours, small, ours):
        torch.manual_seed(5)
        results.append(pipe(PROMPTS, do_sample=True, return_tensors=True))
    assert results[0] == results[1] == results[2]
    assert ours(PROMPTS, do_sample=True, return_tensors=True) != results[0]


def test_siblings_differ_and_ragged_ones_are_padded() -> None:
    ours = paged_pipeline(_stock())
    ends = [int(token) for token in range(40, 100, 5)]
    outputs = ours(PROMPTS, do_sample=True, num_return_sequences=4, eos_token_id=ends, seed=2, return_tensors=True)
    stock = _stock()(PROMPTS, do_sample=True, num_return_sequences=4, eos_token_id=ends, return_tensors=True)
    assert [len(item) for item in outputs] == [len(item) for item in stock] == [4] * len(PROMPTS)
    lengths = set()
    for prompt, item in zip(PROMPTS, outputs, strict=True):
        prompt_ids = tiny_tokenizer()(prompt)["input_ids"]
        rows = [record["generated_token_ids"] for record in item]
        assert len({len(row) for row in rows}) == 1
        for row in rows:
            assert row[: len(prompt_ids)] == prompt_ids
            new = row[len(prompt_ids) :]
            end = next((index for index, token in enumerate(new) if token in ends), len(new) - 1)
            assert all(token == PAD_TOKEN_ID for token in new[end + 1 :])
            lengths.add(end)
    assert len(lengths) > 1
    assert any(item[0] != item[1] for item in outputs)


@pytest.mark.parametrize("seed", [-1, 1.5, "1", True, 2**64])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed must be an integer"):
        paged_pipeline(_stock())(PROMPTS, seed=seed)


# -- chats -----------------------------------------------------------------------------------------------------------


class _Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@pytest.mark.parametrize("options", [{}, {"return_full_text": False}, {"continue_final_message": False}], ids=str)
def test_chats_are_equal_to_stock(options: dict[str, Any]) -> None:
    stock, ours = _both()
    expected = [stock(chat, **options) for chat in CHATS]
    assert ("role" in str(expected)) == (options != {"return_full_text": False})
    _assert_equal([ours(chat, **options) for chat in CHATS], expected)
    _assert_equal(ours(CHATS, **options), expected)
    _assert_equal(list(ours((chat for chat in CHATS), **options)), expected)
    _assert_equal(list(ours(KeyDataset(_Rows([{"chat": chat} for chat in CHATS]), "chat"), **options)), expected)


def test_the_last_message_is_continued() -> None:
    stock, ours = _both()
    outputs = ours(CHATS[2:], continue_final_message=True)
    _assert_equal(outputs, stock(CHATS[2:], continue_final_message=True))
    last = outputs[0][0]["generated_text"][-1]
    assert last["role"] == "assistant"
    assert last["content"].startswith("It is")


# -- lazily ----------------------------------------------------------------------------------------------------------


def _long_ones(count: int) -> Iterator[str]:
    for index in range(count):
        yield f"prompt {index} " + "x" * (index % 9)


def test_the_first_result_of_a_thousand_comes_long_before_the_last_is_computed() -> None:
    model = _settled(fresh("llama"))
    taken = itertools.count()
    results = paged_pipeline(_stock(model))((next(taken), text)[1] for text in _long_ones(1000))
    first = next(results)
    engine = get_engine(model)
    assert engine is not None
    steps, num_taken = engine.stats()["num_steps"], next(taken)
    _assert_equal(first, _stock(model)("prompt 0 "))
    assert num_taken < 300
    assert steps < 60  # all thousand need some hundred steps
    results.close()
    _at_rest(model)


def test_an_endless_generator_is_read_only_a_little_ahead() -> None:
    model = _settled(fresh("llama"))
    taken: list[int] = []

    def endless() -> Iterator[str]:
        for index in itertools.count():
            taken.append(index)
            yield f"prompt {index}"

    stock = _stock(model)
    ours = paged_pipeline(stock, PagedConfig(max_requests_per_batch=4))
    results = ours(endless())
    for index in range(12):
        _assert_equal(next(results), stock(f"prompt {index}"))
        assert len(taken) <= index + 1 + 4 * 4
    del results
    _at_rest(model)


def test_a_slow_first_item_does_not_keep_the_others_from_running() -> None:
    model = _settled(fresh("llama"), eos_token_id=[54])
    lengths = [len(out[0]["generated_token_ids"]) for out in _stock(model)(PROMPTS, return_tensors=True)]
    assert len(set(lengths)) > 1
    stock = _stock(model)
    ours = paged_pipeline(stock, PagedConfig(max_requests_per_batch=2))
    _assert_equal(list(ours(iter(PROMPTS * 3))), stock(PROMPTS * 3))


def test_a_list_returns_a_list_and_other_inputs_an_iterator() -> None:
    stock, ours = _both()
    expected = stock(PROMPTS)
    assert isinstance(ours(PROMPTS), list)
    _assert_equal(list(ours(text for text in PROMPTS)), expected)
    _assert_equal(list(ours(iter(PROMPTS))), expected)  # stock takes no iterator but a generator
    _assert_equal(list(ours(map(str, PROMPTS))), expected)
    _assert_equal(list(ours(deque(PROMPTS))), expected)  # any other sequence, such as a column of `datasets`
    assert len(ours(UserList(PROMPTS))) == len(PROMPTS)
    _assert_equal(list(ours(UserList(PROMPTS))), expected)
    results = ours(_Rows(PROMPTS))
    assert len(results) == len(PROMPTS)
    _assert_equal(list(results), expected)
    _assert_equal(list(results), expected)  # a dataset can be read again
    _assert_equal(list(ours(KeyDataset(_Rows([{"text": text} for text in PROMPTS]), "text"))), expected)
    assert ours([]) == []
    assert list(ours(text for text in ())) == []
    assert list(ours(_Rows([]))) == []


class _Stream(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter(PROMPTS)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("inputs", [_Rows(PROMPTS), _Stream()], ids=["sized", "iterable"])
def test_datasets_with_and_without_workers(inputs: Any, num_workers: int) -> None:
    stock, ours = _both()
    results = ours(inputs, num_workers=num_workers)
    _assert_equal(list(results), stock(PROMPTS))
    _assert_equal(list(results), stock(PROMPTS))


def test_a_pipelines_results_are_another_ones_inputs() -> None:
    stock, ours = _both()
    first = ours((text for text in PROMPTS), max_new_tokens=3)
    second = ours((item[0]["generated_text"] for item in first), max_new_tokens=4)
    texts = [item[0]["generated_text"] for item in stock(PROMPTS, max_new_tokens=3)]
    _assert_equal(list(second), stock(texts, max_new_tokens=4))
    _at_rest(_model())


# -- leaving and sharing ---------------------------------------------------------------------------------------------


def test_leaving_early_aborts_the_rest() -> None:
    model = _settled(fresh("llama"))
    ours = paged_pipeline(_stock(model))
    for _ in ours(_long_ones(100)):
        break
    _at_rest(model)
    with ours(_long_ones(100)) as results:
        next(results)
        engine = get_engine(model)
        assert engine is not None
        engine.check()
    _at_rest(model)
    assert list(results) == []
    assert engine.stats()["num_aborted"] > 50


def test_errors_that_wait_for_their_turn_do_not_keep_a_dropped_iterator() -> None:
    def breaks() -> Iterator[Any]:
        yield PROMPTS[0]
        yield PROMPTS[1]
        yield 17

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        if len(ids) > 40:
            raise RuntimeError("no way on from here")
        return [40, 41]

    model = _settled(fresh("llama"))
    ours = paged_pipeline(_stock(model), PagedConfig(max_requests_per_batch=3))
    gc.disable()
    try:
        for _ in ours(breaks()):
            break
        _at_rest(model)
        for _ in ours(iter([PROMPTS[0], *PROMPTS]), prefix_allowed_tokens_fn=allowed):
            break
        _at_rest(model)
    finally:
        gc.enable()
    results = ours(breaks())
    next(results)
    next(results)
    with pytest.raises(TypeError) as error:
        next(results)
    assert "in preprocess" in str(error.value.__cause__)  # where it happened is told


def test_a_generator_goes_on_where_its_loop_was_left() -> None:
    stock, ours = _both()
    results = ours(text for text in PROMPTS)
    found = []
    for item in results:
        found.append(item)
        if len(found) == 3:
            break
    found += list(results)
    _assert_equal(found, stock(PROMPTS))


def test_two_pipelines_share_the_models_engine() -> None:
    model = _settled(fresh("llama"))
    stock = _stock(model)
    one, two = paged_pipeline(stock), _stock(model, pipeline_class=PagedTextGenerationPipeline)
    mine, yours = one(iter(PROMPTS)), two(iter(PROMPTS[::-1]), max_new_tokens=5)
    pairs = list(zip(mine, yours, strict=True))
    _assert_equal([pair[0] for pair in pairs], stock(PROMPTS))
    _assert_equal([pair[1] for pair in pairs], stock(PROMPTS[::-1], max_new_tokens=5))
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["num_finished"] == 2 * len(PROMPTS)
    _at_rest(model)


def test_threads_share_it_too() -> None:
    model = _settled(fresh("llama"))
    stock = _stock(model)
    ours = paged_pipeline(stock)
    found: dict[int, Any] = {}

    def work(new: int) -> None:
        found[new] = ours(PROMPTS, max_new_tokens=new)

    threads = [threading.Thread(target=work, args=(new,)) for new in (3, 6, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for new in (3, 6, 9):
        _assert_equal(found[new], stock(PROMPTS, max_new_tokens=new))
    _at_rest(model)


def test_weights_changed_between_two_results_count_for_those_that_join_later() -> None:
    model = _settled(fresh("llama"), max_new_tokens=4)
    other = _settled(fresh("llama", seed=1), max_new_tokens=4)
    prompt = "the very same prompt, longer than one block of the pool is"
    results = paged_pipeline(_stock(model), PagedConfig(max_requests_per_batch=1))(itertools.repeat(prompt))
    _assert_equal(next(results), _stock(_settled(fresh("llama"), max_new_tokens=4))(prompt))
    model.load_state_dict(other.state_dict())
    found = [next(results) for _ in range(3)]
    _assert_equal(found[-1], _stock(other)(prompt))


# -- errors ----------------------------------------------------------------------------------------------------------


def test_a_bad_item_raises_in_its_place_and_harms_no_other() -> None:
    model = _settled(fresh("llama"))
    stock, ours = _both(model)
    inputs: list[Any] = [PROMPTS[0], PROMPTS[1], 17, PROMPTS[2], PROMPTS[3]]
    with pytest.raises(TypeError) as expected:
        list(stock(_Rows(inputs)))
    for make in (lambda: _Rows(inputs), lambda: iter(inputs)):
        results = iter(ours(make()))
        _assert_equal([next(results), next(results)], stock(PROMPTS[:2]))
        with pytest.raises(TypeError) as actual:
            next(results)
        assert str(actual.value) == str(expected.value)
        _assert_equal([next(results), next(results)], stock(PROMPTS[2:4]))
        with pytest.raises(StopIteration):
            next(results)
        _at_rest(model)
    with pytest.raises(TypeError):
        ours(inputs)
    _at_rest(model)


def test_an_error_of_the_generator_comes_after_the_results_before_it() -> None:
    def breaks() -> Iterator[str]:
        yield PROMPTS[0]
        yield PROMPTS[1]
        raise RuntimeError("the file ended in the middle")

    stock, ours = _both()
    results = ours(breaks())
    _assert_equal([next(results), next(results)], stock(PROMPTS[:2]))
    with pytest.raises(RuntimeError, match="ended in the middle"):
        next(results)
    assert list(results) == []
    _at_rest(_model())


def test_a_prompt_with_more_tokens_than_positions_says_so() -> None:
    model = _settled(fresh("gpt2", n_positions=48))
    stock, ours = _both(model)
    prompts = [PROMPTS[0], "x" * 60, PROMPTS[2], "y" * 44]
    results = ours(iter(prompts))
    _assert_equal(next(results), stock(prompts[0]))
    with pytest.raises(CapacityError, match=r"A prompt of 60 tokens passes the model's 48 positions; shorten it"):
        next(results)
    _assert_equal(next(results), stock(prompts[2]))
    with pytest.raises(CapacityError, match=r"44 tokens and 9 new ones .* set max_new_tokens to at most 5"):
        next(results)
    _at_rest(model)
    with pytest.raises(IndexError):
        stock(prompts[3])
    # one that ends in time never needs the positions that it asked for
    ids = stock(prompts[3], max_new_tokens=5, return_tensors=True)[0]["generated_token_ids"]
    options: dict[str, Any] = {"eos_token_id": ids[46], "return_tensors": True}
    _assert_equal(ours(prompts[2:], **options), stock(prompts[2:], **options))


def test_a_token_that_the_model_has_not_is_one_items_error() -> None:
    model = _settled(fresh("llama", vocab_size=120))
    results = paged_pipeline(_stock(model))(iter(["abc", "{|}~", "bcd"]))
    stock = _stock(model)
    _assert_equal(next(results), stock("abc"))
    with pytest.raises(PagedError, match=r"token id 123; the model's ids go from 0 to 119"):
        next(results)
    _assert_equal(next(results), stock("bcd"))
    assert VOCAB_SIZE > 120


def test_an_engine_that_is_closed_meanwhile_says_so() -> None:
    model = _settled(fresh("llama"))
    results = paged_pipeline(_stock(model))(_long_ones(600))
    next(results)
    hf_paged.release(model)
    with pytest.raises(PagedError, match=r"closed|aborted"):
        list(results)
    with pytest.raises((EngineClosedError, PagedError)):
        next(results)


def test_what_raises_inside_a_step_is_that_items_error() -> None:
    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        if len(ids) == 23:
            raise RuntimeError("no way on from here")
        return [40, 41]

    stock, ours = _both()
    results = ours(iter(PROMPTS), prefix_allowed_tokens_fn=allowed)
    expected = [None if 23 - NEW < len(tiny_tokenizer()(text)["input_ids"]) <= 23 else text for text in PROMPTS]
    assert None in expected
    for text in expected:
        if text is None:
            with pytest.raises(RuntimeError, match="no way on"):
                next(results)
        else:
            _assert_equal(next(results), stock(text, prefix_allowed_tokens_fn=allowed))
    _at_rest(_model())


def test_other_pipelines_are_refused_with_what_works() -> None:
    other = pipeline("feature-extraction", model=build("llama").model, tokenizer=_tokenizer(), device="cpu")
    with pytest.raises(TypeError, match=r"takes a text-generation pipeline, not FeatureExtractionPipeline.*generate"):
        paged_pipeline(other)
    with pytest.raises(ConfigError, match=r"runs the task 'text-generation', not 'image-text-to-text'"):
        PagedTextGenerationPipeline(model=_model(), tokenizer=_tokenizer(), device="cpu", task="image-text-to-text")


def test_without_the_hook_it_says_what_to_call() -> None:
    ours = paged_pipeline(_stock())
    hf_paged.uninstall()
    try:
        with pytest.raises(PagedError, match=r"hf_paged.install\(\)"):
            ours(PROMPTS)
        with pytest.raises(PagedError, match=r"hf_paged.install\(\)"):
            ours(PROMPTS[0])
    finally:
        hf_paged.install()


# -- pipelines of one's own ------------------------------------------------------------------------------------------


class _Shouting(TextGenerationPipeline):
    def postprocess(self, model_outputs: Any, **params: Any) -> Any:
        return [record["generated_text"].upper() for record in super().postprocess(model_outputs, **params)]


class _Counting(TextGenerationPipeline):
    def _forward(self, model_inputs: Any, **keywords: Any) -> Any:
        outputs = super()._forward(model_inputs, **keywords)
        return {**outputs, "prompt_text": f"{outputs['generated_sequence'].shape[-1]}: "}


@pytest.mark.parametrize("cls", [_Shouting, _Counting])
def test_a_derived_pipeline_keeps_its_own_steps(cls: type, caplog: pytest.LogCaptureFixture) -> None:
    stock = _stock(pipeline_class=cls)
    ours = paged_pipeline(stock)
    assert isinstance(ours, cls)
    with caplog.at_level(logging.WARNING, "hf_paged"):
        _assert_equal(ours(PROMPTS), stock(PROMPTS))
    said = [record.getMessage() for record in caplog.records if record.name == "hf_paged"]
    assert len(said) == (cls is _Counting)
    assert paged_pipeline(ours)(PROMPTS) == ours(PROMPTS)


def test_an_adapters_model_runs_as_its_own_generate_does() -> None:
    import peft

    model = _settled(fresh("llama"))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    stock = pipeline("text-generation", model=wrapped, tokenizer=_tokenizer(), device="cpu")
    _assert_equal(paged_pipeline(stock)(PROMPTS), stock(PROMPTS))


def test_the_pipeline_it_was_made_from_stays_as_it_is() -> None:
    stock = _stock()
    before = dict(vars(stock))
    ours = paged_pipeline(stock, PagedConfig(), progress=True)
    ours(PROMPTS[:2])
    after = dict(vars(stock))
    assert after == before
    assert type(stock) is TextGenerationPipeline


# -- small things ----------------------------------------------------------------------------------------------------


def test_batch_size_is_said_to_be_needless_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    stock, ours = _both()
    with caplog.at_level(logging.WARNING, "hf_paged"):
        for _ in range(2):
            _assert_equal(ours(PROMPTS, batch_size=3), stock(PROMPTS))
        _assert_equal(
            list(_stock(pipeline_class=PagedTextGenerationPipeline, batch_size=2)(iter(PROMPTS))), stock(PROMPTS)
        )
    said = [record.getMessage() for record in caplog.records if record.name == "hf_paged"]
    assert said == ["A paged pipeline runs as many prompts together as fit; it needs no batch_size."]


def test_a_bar_counts_prompts_and_tokens_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    ours = paged_pipeline(_stock(), progress=True)
    ours(PROMPTS)
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    ours(PROMPTS)
    shown = capsys.readouterr().err
    assert f"{len(PROMPTS)}/{len(PROMPTS)}" in shown
    assert f"{len(PROMPTS) * NEW} tokens" in shown
    assert "running" in shown
    ours(PROMPTS, progress=False)
    paged_pipeline(_stock())(PROMPTS)
    assert capsys.readouterr().err == ""
    list(ours(iter(PROMPTS[:3]), num_beams=2))
    assert f"{3 * NEW} tokens" in capsys.readouterr().err
