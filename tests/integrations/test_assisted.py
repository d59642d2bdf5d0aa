"""Prompt lookup and assistant models in `generate`: on the engine, the same tokens as stock without any drafts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_paged import get_engine, num_fallbacks
from hf_paged.compat import CACHE_KEYWORD
from tests import zoo
from tests.drafting import FEW, NAMES, assistant_of, prompts_of_few
from tests.oracle import assert_equal_batches, assert_equal_tokens, left_pad, solo, staggered_ends
from tests.tiny_tokenizer import tiny_tokenizer

NEW = 16
PROMPTS = prompts_of_few(4, seed=7, longest=30)
IDS, MASK = left_pad(PROMPTS)
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
PAGED = {"cache_implementation": "paged"}
LOOKUP = {"prompt_lookup_num_tokens": 4}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What was said so far, growing."""
    messages: list[str] = []

    class _Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = _Notes(logging.WARNING)
    logging.getLogger("hf_paged").addHandler(handler)
    yield messages
    logging.getLogger("hf_paged").removeHandler(handler)


def _model(name: str = "llama") -> PreTrainedModel:
    return zoo.fresh(name, vocab_size=FEW)


def _ask(kind: str, model: PreTrainedModel, noise: float = 0.1) -> dict[str, Any]:
    return dict(LOOKUP) if kind == "lookup" else {"assistant_model": assistant_of(model, noise)}


def _stats(model: PreTrainedModel) -> dict[str, Any]:
    engine = get_engine(model)
    assert engine is not None
    engine.check()
    return engine.stats()


# -- ragged batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_batch_gets_stocks_tokens(name: str, kind: str, said: list[str]) -> None:
    model = _model(name)
    stock = model.generate(IDS, attention_mask=MASK, **OPTIONS)
    paged = model.generate(IDS, attention_mask=MASK, **OPTIONS, **_ask(kind, model), **PAGED)
    assert_equal_batches(paged, stock)
    stats = _stats(model)
    assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
    assert stats["num_fallbacks"] == 0
    assert said == []


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_a_pool_too_small_for_the_batch_gives_the_same_tokens(kind: str) -> None:
    model = _model()
    stock = model.generate(IDS, attention_mask=MASK, **OPTIONS)
    config = {"num_blocks": 7, "block_size": 8, "max_batch_tokens": 11}
    paged = model.generate(IDS, attention_mask=MASK, **OPTIONS, **_ask(kind, model), **PAGED, cache_config=config)
    assert_equal_batches(paged, stock)
    stats = _stats(model)
    assert stats["num_preemptions"] > 0
    assert stats["num_accepted_tokens"] > 0


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 6, "eos_token_id": [1, 2]},
    {"no_repeat_ngram_size": 3, "bad_words_ids": [[5]]},
    {"eos_token_id": [2, 6], "pad_token_id": 3},
    {"max_length": IDS.shape[1] + 3, "max_new_tokens": None},
]


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_go_through_processors_and_ends_as_in_stock(settings: dict[str, Any], kind: str) -> None:
    model = _model()
    options = {**OPTIONS, **settings}
    stock = model.generate(IDS, attention_mask=MASK, **options)
    paged = model.generate(IDS, attention_mask=MASK, **options, **_ask(kind, model), **PAGED)
    assert_equal_batches(paged, stock)
    assert _stats(model)["num_draft_tokens"] > 0


def test_rows_that_end_one_after_another() -> None:
    model = _model()
    ends = staggered_ends(model, PROMPTS, NEW)
    for end in set(ends):
        stock = model.generate(IDS, attention_mask=MASK, **OPTIONS, eos_token_id=end)
        paged = model.generate(IDS, attention_mask=MASK, **OPTIONS, eos_token_id=end, **LOOKUP, **PAGED)
        assert_equal_batches(paged, stock)


# -- one row, which stock assists too ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_one_row_gets_what_stock_gives_with_and_without_drafts(name: str, kind: str) -> None:
    model = _model(name)
    ids = torch.tensor(PROMPTS[1:2])
    drafts = _ask(kind, model)
    plain = model.generate(ids, **OPTIONS)
    assert_equal_batches(model.generate(ids, **OPTIONS, **drafts, **PAGED), plain)
    if kind == "assistant" and name in zoo.WINDOWED and CACHE_KEYWORD == "past_key_values":
        # before 5.24 stock's own cache of a sliding assistant doesn't survive two forwards without a crop
        drafts = {"assistant_model": assistant_of(model, num_tokens=1)}
    assert_equal_batches(model.generate(ids, **OPTIONS, **drafts), plain)


class _Streamer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_a_streamer_gets_the_prompt_and_every_token_in_order(kind: str) -> None:
    model = _model()
    streamer = _Streamer()
    ids = torch.tensor(PROMPTS[:1])
    out = model.generate(ids, **OPTIONS, **_ask(kind, model), **PAGED, streamer=streamer)
    assert_equal_tokens(streamer.tokens, out[0].tolist())
    assert streamer.ended


class _NotTwice(LogitsProcessor):
    """Bans the last token: it has to see it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class _UntilLength(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] == self.length)


def test_one_rows_own_processors_and_criteria_see_each_position() -> None:
    model = _model()
    ids = torch.tensor(PROMPTS[:1])
    own = {
        "logits_processor": [_NotTwice()],
        "stopping_criteria": StoppingCriteriaList([_UntilLength(ids.shape[1] + 9)]),
    }
    plain = model.generate(ids, **OPTIONS, **own)
    assert plain.shape[1] == ids.shape[1] + 9
    for kind in ("lookup", "assistant"):
        assert_equal_batches(model.generate(ids, **OPTIONS, **own, **_ask(kind, model), **PAGED), plain)
    assert _stats(model)["num_accepted_tokens"] > 0


def test_a_stop_string_inside_the_drafts_ends_there() -> None:
    model, tokenizer = zoo.fresh("llama"), tiny_tokenizer()
    ids = tokenizer("beta Paris", return_tensors="pt", add_special_tokens=False)["input_ids"]
    free = model.generate(ids, **OPTIONS)[0, ids.shape[1] :]
    options = {**OPTIONS, "stop_strings": tokenizer.decode(free[4:6]), "tokenizer": tokenizer}
    plain = model.generate(ids, **options)
    assert plain.shape[1] < ids.shape[1] + NEW
    assert_equal_batches(model.generate(ids, **options, **_ask("assistant", model, 0.0), **PAGED), plain)


def test_what_a_processor_raises_is_raised() -> None:
    class Raises(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise LookupError("a processor of one's own")

    model = _model()
    with pytest.raises(LookupError, match="a processor of one's own"):
        model.generate(torch.tensor(PROMPTS[:1]), **OPTIONS, **LOOKUP, **PAGED, logits_processor=[Raises()])
    assert _stats(model)["num_running"] == 0


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_sampled_rows_repeat_after_a_seed(kind: str) -> None:
    model = _model()
    drafts = _ask(kind, model)
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        sampled = {**OPTIONS, "do_sample": True, "temperature": 0.7}
        outs.append(model.generate(IDS, attention_mask=MASK, **sampled, **drafts, **PAGED))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert _stats(model)["num_accepted_tokens"] > 0


# -- what has to run otherwise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"logits_processor": [_NotTwice()]}, "_NotTwice"),
        ({"return_dict_in_generate": True, "output_scores": True}, "more than tokens"),
        ({"stopping_criteria": StoppingCriteriaList([_UntilLength(IDS.shape[1] + 5)])}, "_UntilLength"),
    ],
    ids=["processor", "scores", "criterion"],
)
def test_several_rows_that_must_be_seen_together_run_without_drafts_and_say_so(
    more: dict[str, Any], reason: str, said: list[str]
) -> None:
    model = _model()
    stock = model.generate(IDS, attention_mask=MASK, **OPTIONS, **more)
    for _ in range(2):
        paged = model.generate(IDS, attention_mask=MASK, **OPTIONS, **more, **LOOKUP, **PAGED)
        if isinstance(stock, torch.Tensor):
            assert_equal_batches(paged, stock)
        else:
            assert_equal_batches(paged.sequences, stock.sequences)
            assert len(paged.scores) == len(stock.scores)
    assert len(said) == 1
    assert reason in said[0]
    stats = _stats(model)
    assert (stats["num_draft_tokens"], stats["num_fallbacks"]) == (0, 0)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"return_dict_in_generate": True, **LOOKUP}, "more than tokens"),
        ({"use_cache": True, "guidance_scale": 1.5, **LOOKUP}, "remembers"),
    ],
    ids=["return_dict", "guidance"],
)
def test_one_row_that_needs_stocks_loop_gets_it_and_says_so(more: dict[str, Any], reason: str, said: list[str]) -> None:
    model = _model()
    ids = torch.tensor(PROMPTS[:1])
    stock = model.generate(ids, **OPTIONS, **more)
    paged = model.generate(ids, **OPTIONS, **more, **PAGED)
    if not isinstance(stock, torch.Tensor):
        assert set(paged) == set(stock)
        stock, paged = stock.sequences, paged.sequences
    assert_equal_batches(paged, stock)
    assert len(said) == 1
    assert reason in said[0]
    assert num_fallbacks(model) == 1


def test_a_call_that_may_pass_the_models_positions_runs_without_drafts(said: list[str]) -> None:
    model = zoo.fresh("gpt2", n_positions=64)
    ids = torch.tensor([PROMPTS[0][:3]])
    options = {**OPTIONS, "max_new_tokens": 80, "eos_token_id": solo(model, PROMPTS[0][:3], max_new_tokens=20)[9]}
    assert_equal_batches(model.generate(ids, **options, **LOOKUP, **PAGED), model.generate(ids, **options))
    assert "64 positions" in said[0]


def test_the_heuristic_schedule_is_left_in_the_assistants_config_as_by_stock() -> None:
    numbers = []
    for more in ({}, PAGED):
        model = _model()
        assistant = assistant_of(model, 0.0, 2, num_assistant_tokens_schedule="heuristic")
        model.generate(torch.tensor(PROMPTS[:1]), **OPTIONS, **more, assistant_model=assistant)
        numbers.append(assistant.generation_config.num_assistant_tokens)
    assert min(numbers) > 2
