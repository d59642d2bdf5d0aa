"""`generate(..., cache_implementation="paged")` is stock's: same shapes, same values, same model afterwards."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerationMixin

import hf_paged
from hf_paged import PagedConfig
from hf_paged.errors import ConfigError
from tests import zoo
from tests.oracle import (
    Ids,
    assert_equal_batches,
    assert_equal_tokens,
    assert_rows_equal_solo,
    left_pad,
    ragged_prompts,
    random_prompt,
    solo,
)

NEW = 10
PROMPTS = ragged_prompts(5, seed=51, longest=45)
SCORE_TOLERANCE = 5e-5


def _stock(model: PreTrainedModel, prompts: Sequence[Ids], **kwargs: Any) -> Any:
    ids, mask = left_pad(prompts)
    torch.manual_seed(1234)
    return model.generate(ids, attention_mask=mask, **{"do_sample": False, "max_new_tokens": NEW, **kwargs})


def _paged(
    model: PreTrainedModel, prompts: Sequence[Ids], cache_config: PagedConfig | dict[str, Any] | None = None, **kw: Any
) -> Any:
    if cache_config is not None:
        kw["cache_config"] = cache_config
    return _stock(model, prompts, cache_implementation="paged", **kw)


def _steps(model: PreTrainedModel) -> int:
    return int(hf_paged.get_engine(model).stats()["num_steps"])


def _new_tokens(sequences: torch.Tensor, prompts: Sequence[Ids]) -> list[Ids]:
    return sequences[:, max(map(len, prompts)) :].tolist()  # type: ignore[no-any-return]


def _ends(model: PreTrainedModel) -> list[int]:
    """End ids at which the rows of PROMPTS stop at different steps, and one at its first token."""
    free_runs = [solo(model, ids, max_new_tokens=NEW) for ids in PROMPTS]
    return sorted({free_runs[0][0], free_runs[1][3], free_runs[2][6]})


CONFIGS = (
    PagedConfig(block_size=16),
    PagedConfig(block_size=8, max_batch_tokens=7),
    PagedConfig(block_size=64, max_batch_tokens=64, enable_prefix_caching=False),
)


@pytest.mark.parametrize("index", range(len(zoo.ARCHITECTURES)), ids=zoo.ARCHITECTURES)
def test_greedy_on_a_left_padded_batch(index: int) -> None:
    name = zoo.ARCHITECTURES[index]
    model = zoo.build(name)
    before = model.generation_config.to_dict()
    stock = _stock(model, PROMPTS)
    for config in (CONFIGS[index % 3], CONFIGS[(index + 1) % 3]):
        ours = _paged(model, PROMPTS, config)
        assert_equal_batches(ours, stock, f"{name} {config}")
        assert_rows_equal_solo(model, PROMPTS, _new_tokens(ours, PROMPTS), name, max_new_tokens=NEW)
    assert hf_paged.get_engine(model).stats()["num_fallbacks"] == 0
    assert model.generation_config.to_dict() == before


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_rows_that_end_at_different_steps(name: str) -> None:
    model = zoo.build(name)
    ends = _ends(model)
    stock = _stock(model, PROMPTS, eos_token_id=ends)
    ours = _paged(model, PROMPTS, PagedConfig(block_size=8), eos_token_id=ends)
    assert_equal_batches(ours, stock, name)
    rows = _new_tokens(ours, PROMPTS)
    lengths = set()
    for ids, row in zip(PROMPTS, rows, strict=True):
        expected = solo(model, ids, max_new_tokens=NEW, eos_token_id=ends)
        padding = [zoo.PAD_TOKEN_ID] * (len(row) - len(expected))
        assert_equal_tokens(row, expected + padding, name)
        lengths.add(len(expected))
    assert 1 in lengths
    assert len(lengths) > 1


def test_the_batch_ends_with_its_last_row() -> None:
    model = zoo.build("llama")
    ends = [solo(model, ids, max_new_tokens=NEW)[2] for ids in PROMPTS]
    stock = _stock(model, PROMPTS, eos_token_id=ends)
    assert stock.shape[1] < max(map(len, PROMPTS)) + NEW
    assert_equal_batches(_paged(model, PROMPTS, eos_token_id=ends), stock)


SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"do_sample": True},
    "warped": {"do_sample": True, "temperature": 1.4, "top_k": 40, "top_p": 0.9},
    "min_p": {"do_sample": True, "temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.2},
    "several_sequences": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("case", SAMPLING)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_seeded_sampling(name: str, case: str) -> None:
    model = zoo.build(name)
    options = SAMPLING[case]
    stock = _stock(model, PROMPTS, **options)
    ours = _paged(model, PROMPTS, PagedConfig(block_size=8, max_batch_tokens=512), **options)
    assert_equal_batches(ours, stock, f"{name} {case}")
    assert not torch.equal(stock[: len(PROMPTS)], _stock(model, PROMPTS)[:, : stock.shape[1]])


@pytest.mark.parametrize("name", ["mistral", "mixtral"])
def test_seeded_sampling_with_rows_that_end(name: str) -> None:
    """Rows that ended still take their draw, so that the others' draws stay stock's."""
    model = zoo.build(name)
    sampled = _new_tokens(_stock(model, PROMPTS, do_sample=True, num_return_sequences=2), PROMPTS)
    ends = sorted({sampled[0][0], sampled[3][2], sampled[5][4]})
    options = {"do_sample": True, "num_return_sequences": 2, "eos_token_id": ends}
    assert_equal_batches(_paged(model, PROMPTS, **options), _stock(model, PROMPTS, **options), name)


def _assert_equal_scores(
    ours: Sequence[torch.Tensor], stock: Sequence[torch.Tensor], is_running: torch.Tensor, what: str
) -> None:
    assert isinstance(ours, tuple)
    assert len(ours) == len(stock), f"{what}: {len(ours)} steps instead of {len(stock)}"
    for step, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        rows = is_running[:, step]  # what stock computes for a row after its end is of no sequence
        torch.testing.assert_close(a[rows], b[rows], atol=SCORE_TOLERANCE, rtol=0, msg=f"{what} of step {step}")


@pytest.mark.parametrize("with_ends", [False, True])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_scores_and_logits(name: str, with_ends: bool) -> None:
    model = zoo.build(name)
    ends = _ends(model) if with_ends else None
    options: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.1,
        "eos_token_id": ends,
    }
    stock = _stock(model, PROMPTS, **options)
    ours = _paged(model, PROMPTS, PagedConfig(block_size=8, max_batch_tokens=64), **options)
    assert type(ours) is type(stock)
    assert_equal_batches(ours.sequences, stock.sequences, name)
    new = stock.sequences[:, max(map(len, PROMPTS)) :]
    has_ended = torch.isin(new, torch.tensor(ends or [])).cumsum(1) > 0
    is_running = torch.cat([torch.ones(len(new), 1, dtype=torch.bool), ~has_ended[:, :-1]], dim=1)
    _assert_equal_scores(ours.scores, stock.scores, is_running, f"{name} scores")
    _assert_equal_scores(ours.logits, stock.logits, is_running, f"{name} logits")
    assert not torch.equal(stock.scores[0], stock.logits[0])


def test_scores_of_several_sequences() -> None:
    model = zoo.build("qwen3")
    options = {"do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    stock, ours = _stock(model, PROMPTS, **options), _paged(model, PROMPTS, **options)
    assert_equal_batches(ours.sequences, stock.sequences)
    always = torch.ones(ours.sequences.shape[0], NEW, dtype=torch.bool)
    _assert_equal_scores(ours.scores, stock.scores, always, "scores")
    assert ours.logits is None
    assert stock.logits is None


class _BanByHistory(LogitsProcessor):
    """Bans a third of the tokens, by the last one and by the padded length."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens = torch.arange(scores.shape[1])
        banned = (tokens + input_ids[:, -1:] + input_ids.shape[1]) % 3 == 0
        return scores.masked_fill(banned, float("-inf"))  # type: ignore[return-value]


class _StopAtEvenTotal(StoppingCriteria):
    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return (input_ids[:, -3:].sum(1) % 2) == 0  # type: ignore[return-value]


def _options(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    free = [solo(model, ids, max_new_tokens=NEW) for ids in PROMPTS]
    longest = max(map(len, PROMPTS))
    return {
        "max_length": {"max_length": longest + 6, "max_new_tokens": None},
        "one_token": {"max_new_tokens": 1},
        "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": _ends(model)},
        "min_length": {"min_length": longest + 4, "eos_token_id": _ends(model)},
        "repetition_penalty": {"repetition_penalty": 1.7},
        "no_repeat_ngram": {"no_repeat_ngram_size": 2},
        "no_repeat_token": {"no_repeat_ngram_size": 1},
        "bad_words": {"bad_words_ids": [[free[0][0]], [free[1][1], free[1][2]], [free[2][3]]]},
        "suppress_tokens": {"suppress_tokens": [free[0][1], free[3][0]], "begin_suppress_tokens": [free[2][0]]},
        "forced_end": {"forced_eos_token_id": 3, "eos_token_id": 3},
        "sequence_bias": {"sequence_bias": [[[free[0][0]], -8.0], [[free[1][0], 5], 9.0]]},
        "length_penalty": {"exponential_decay_length_penalty": (2, 1.4), "eos_token_id": free[0][5]},
        "logits_processor": {"logits_processor": [_BanByHistory()]},
        # Without an end id stock doesn't pad: a row that was stopped goes on until the last one is.
        "stopping_criteria": {"stopping_criteria": [_StopAtEvenTotal()]},
        "stopping_criteria_and_ends": {"stopping_criteria": [_StopAtEvenTotal()], "eos_token_id": free[4][1]},
        "prefix_allowed": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row, zoo.VOCAB_SIZE, 3))},
    }


@pytest.mark.parametrize("case", _options(zoo.build("llama")))
def test_options_of_generate(case: str) -> None:
    model = zoo.build("llama")
    options = _options(model)[case]
    stock = _stock(model, PROMPTS, **options)
    roomy = PagedConfig(block_size=8, max_batch_tokens=32)
    tight = PagedConfig(block_size=8, max_batch_tokens=32, num_blocks=8)  # not all rows fit at once
    for config in (roomy, tight):
        assert_equal_batches(_paged(model, PROMPTS, config, **options), stock, f"{case} {config.num_blocks}")
    plain = _stock(model, PROMPTS)
    assert stock.shape != plain.shape or not torch.equal(stock, plain), "the option changes nothing"


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("case", ["max_length", "repetition_penalty", "bad_words"])
def test_options_of_generate_on_other_models(name: str, case: str) -> None:
    model = zoo.build(name)
    options = _options(model)[case]
    assert_equal_batches(_paged(model, PROMPTS, **options), _stock(model, PROMPTS, **options), f"{name} {case}")


class _Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_sees_what_stock_shows_it() -> None:
    model = zoo.build("llama")
    ends = [solo(model, PROMPTS[0], max_new_tokens=NEW)[4]]
    stock, ours = _Recorder(), _Recorder()
    _stock(model, PROMPTS[:1], streamer=stock, eos_token_id=ends)
    _paged(model, PROMPTS[:1], streamer=ours, eos_token_id=ends)
    assert len(stock.seen) > 1
    assert ours.seen == stock.seen
    assert ours.ended == stock.ended == 1


# --- inputs


def test_the_mask_says_what_padding_is() -> None:
    """A prompt may hold the padding id, and padding may hold any other id."""
    model = zoo.build("qwen3")
    prompts = [[5, 0, 9, 0, 7], [0, 0, 3], random_prompt(9, 3)]
    ids, mask = left_pad(prompts, pad_id=77)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    ours = model.generate(ids, cache_implementation="paged", **options)
    assert_equal_batches(ours, model.generate(ids, **options))
    assert_rows_equal_solo(model, prompts, ours[:, ids.shape[1] :].tolist(), max_new_tokens=NEW)


def test_a_mask_with_holes() -> None:
    """What the mask hides inside a prompt is no part of it, and takes no position."""
    model = zoo.build("llama")
    ids, mask = left_pad(PROMPTS)
    mask[:, -4] = 0
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    ours = model.generate(ids, cache_implementation="paged", **options)
    assert_equal_batches(ours, model.generate(ids, **options))


def test_without_a_mask_padding_is_found_as_stock_finds_it() -> None:
    model = zoo.build("llama")
    ids, _ = left_pad(PROMPTS)
    options = {"max_new_tokens": NEW, "do_sample": False}
    ours = model.generate(ids, cache_implementation="paged", **options)
    assert_equal_batches(ours, model.generate(ids, **options))


def test_equal_prompts_and_prefixes_of_one_another_in_a_batch() -> None:
    model = zoo.build("mistral")
    base = random_prompt(33, 4)
    prompts = [base, base, base[:16], base[:17], base[:1], [*base, 3]]
    for config in (PagedConfig(block_size=8), PagedConfig(block_size=16, max_batch_tokens=20)):
        assert_equal_batches(_paged(model, prompts, config), _stock(model, prompts))


def test_one_prompt_without_padding() -> None:
    for name in ("llama", "gpt2"):
        model = zoo.build(name)
        prompts = [random_prompt(17, 5)]
        assert_equal_batches(_paged(model, prompts), _stock(model, prompts), name)


# --- pool and scheduler under the hook


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_preemption_inside_generate(name: str) -> None:
    model = zoo.fresh(name)
    prompts = [random_prompt(length, 6) for length in (9, 15, 7, 14, 6, 16)]
    config = PagedConfig(block_size=8, num_blocks=7, max_batch_tokens=64, enable_prefix_caching=False)
    ours = _paged(model, prompts, config, max_new_tokens=20)
    assert hf_paged.get_engine(model).stats()["num_preemptions"] > 0
    assert_equal_batches(ours, _stock(model, prompts, max_new_tokens=20), name)
    hf_paged.get_engine(model).check()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_preemption_while_the_batch_draws_and_scores_together(name: str) -> None:
    """Rows that don't fit at once still see stock's draws and scores."""
    model = zoo.fresh(name)
    prompts = [random_prompt(length, 6) for length in (9, 15, 7, 14, 6, 16)]
    config = PagedConfig(block_size=8, num_blocks=7, max_batch_tokens=64)
    options = {"do_sample": True, "return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 20}
    stock, ours = _stock(model, prompts, **options), _paged(model, prompts, config, **options)
    engine = hf_paged.get_engine(model)
    assert engine is not None
    assert engine.stats()["num_preemptions"] > 0
    assert_equal_batches(ours.sequences, stock.sequences, name)
    _assert_equal_scores(ours.scores, stock.scores, torch.ones(len(prompts), 20, dtype=torch.bool), f"{name} scores")
    engine.check()


def test_fewer_run_at_once_than_the_batch_has_rows() -> None:
    model = zoo.build("llama")
    config = PagedConfig(max_requests_per_batch=2, block_size=8)
    assert_equal_batches(_paged(model, PROMPTS, config), _stock(model, PROMPTS))


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_a_second_call_hits_the_prefixes_of_the_first(name: str) -> None:
    model = zoo.fresh(name)
    prompts = [random_prompt(length, 7) for length in (40, 33, 5)]
    stock = _stock(model, prompts)
    config = PagedConfig(block_size=8)
    cold = _paged(model, prompts, config)
    engine = hf_paged.get_engine(model)
    assert engine.stats()["prefix_hit_tokens"] == 0
    warm = _paged(model, prompts, config)
    assert hf_paged.get_engine(model) is engine
    assert engine.stats()["prefix_hit_tokens"] >= 32 + 32
    engine.check()
    assert_equal_batches(cold, stock, name)
    assert_equal_batches(warm, stock, name)


def test_a_later_call_may_need_a_larger_pool() -> None:
    model = zoo.fresh("llama")
    for prompts, new in (([[3, 4]], 4), (PROMPTS, NEW), ([random_prompt(150, 8), random_prompt(90, 8)] * 4, 30)):
        assert_equal_batches(
            _paged(model, prompts, max_new_tokens=new), _stock(model, prompts, max_new_tokens=new), str(new)
        )
        hf_paged.get_engine(model).check()


def test_changed_settings_apply_to_the_next_call() -> None:
    model = zoo.fresh("gemma2")
    stock = _stock(model, PROMPTS)
    for config in (PagedConfig(block_size=8), PagedConfig(block_size=64), PagedConfig(block_size=8)):
        assert_equal_batches(_paged(model, PROMPTS, config), stock)
        assert hf_paged.get_engine(model).config.block_size == config.block_size


# --- weights, types and modes that change between calls


def test_changed_weights_give_the_changed_tokens() -> None:
    """Nothing that old weights left in the prefix index is used."""
    model, other = zoo.fresh("llama"), zoo.build("llama", seed=1)
    prompts = [random_prompt(40, 9), random_prompt(25, 9)]
    first = _paged(model, prompts)
    model.load_state_dict(other.state_dict())
    assert_equal_batches(_paged(model, prompts), _stock(other, prompts), "after load_state_dict")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    changed = _paged(model, prompts)
    assert_equal_batches(changed, _stock(model, prompts), "after an update in place")
    assert not torch.equal(first, changed)


def test_another_dtype_between_calls() -> None:
    model = zoo.fresh("qwen3")
    assert_equal_batches(_paged(model, PROMPTS), _stock(model, PROMPTS), "float32")
    model.double()
    assert_equal_batches(_paged(model, PROMPTS), _stock(model, PROMPTS), "float64")
    model.float()
    assert_equal_batches(_paged(model, PROMPTS), _stock(model, PROMPTS), "float32 again")


def test_any_gradient_mode() -> None:
    """A pool that was made under one mode is written to under the others."""
    model = zoo.fresh("llama")
    stock = _stock(model, PROMPTS)
    modes: list[Callable[[], Any]] = [torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode]
    for mode in modes:
        with mode():
            ours = _paged(model, PROMPTS, PagedConfig(block_size=8))
        assert_equal_batches(ours.clone(), stock, str(mode))


# --- where "paged" may be said


def test_said_by_keyword_config_or_model() -> None:
    model = zoo.fresh("llama")
    stock = _stock(model, PROMPTS)
    assert_equal_batches(_paged(model, PROMPTS), stock, "keyword")
    steps = _steps(model)
    assert steps > 0

    config = GenerationConfig(cache_implementation="paged", max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    before = config.to_dict()
    ids, mask = left_pad(PROMPTS)
    ours = model.generate(ids, attention_mask=mask, generation_config=config)
    assert_equal_batches(ours, stock, "generation_config")
    assert _steps(model) > steps
    assert config.to_dict() == before
    steps = _steps(model)

    model.generation_config.cache_implementation = "paged"
    assert_equal_batches(_stock(model, PROMPTS), stock, "model.generation_config")
    assert _steps(model) > steps
    assert model.generation_config.cache_implementation == "paged"
    steps = _steps(model)

    model.generation_config.cache_implementation = None
    assert_equal_batches(_stock(model, PROMPTS), stock, "not at all")
    assert _steps(model) == steps


def test_the_keyword_wins_over_the_model() -> None:
    model = zoo.fresh("llama")
    model.generation_config.cache_implementation = "paged"
    stock = _stock(zoo.build("llama"), PROMPTS)
    assert_equal_batches(_stock(model, PROMPTS, cache_implementation="dynamic"), stock)
    assert hf_paged.get_engine(model) is None


def test_cache_config_as_a_dict() -> None:
    model = zoo.fresh("llama")
    ours = _paged(model, PROMPTS, {"block_size": 8, "max_batch_tokens": 33})
    assert_equal_batches(ours, _stock(model, PROMPTS))
    assert hf_paged.get_engine(model).config == PagedConfig(block_size=8, max_batch_tokens=33)


def test_an_unknown_setting_is_refused_before_anything_runs() -> None:
    model = zoo.fresh("llama")
    with pytest.raises(ConfigError, match="block_size"):
        _paged(model, PROMPTS, {"blocksize": 8})
    assert_equal_batches(_paged(model, PROMPTS), _stock(model, PROMPTS))


# --- the model comes back as it was given


def _state(model: PreTrainedModel) -> tuple[Any, ...]:
    return (
        [module.training for module in model.modules()],
        model.config._attn_implementation,
        model.config.to_dict(),
        model.generation_config.to_dict(),
        sorted(vars(model)),
        type(model),
        model.forward.__func__,  # type: ignore[attr-defined]
    )


class _Boom(LogitsProcessor):
    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.calls -= 1
        if self.calls < 0:
            raise ZeroDivisionError("boom")
        return scores


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_the_model_comes_back_as_it_was_given(name: str) -> None:
    model = zoo.fresh(name)
    stock = _stock(model, PROMPTS)
    model.train()
    next(module for path, module in model.named_modules() if path.endswith("mlp")).eval()  # a mixed pattern stays mixed
    before = _state(model)
    assert_equal_batches(_paged(model, PROMPTS), stock, name)
    assert _state(model) == before


@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_the_model_comes_back_after_an_exception(name: str, calls: int) -> None:
    model = zoo.fresh(name)
    stock = _stock(model, PROMPTS)
    model.train()
    before = _state(model)
    with pytest.raises(ZeroDivisionError, match="boom"):
        _paged(model, PROMPTS, logits_processor=[_Boom(calls)])
    assert _state(model) == before
    engine = hf_paged.get_engine(model)
    engine.check()
    assert engine.stats()["num_running"] == engine.stats()["num_waiting"] == 0
    assert_equal_batches(_paged(model, PROMPTS), stock, "after the exception")


def test_the_callers_tensors_are_left_alone() -> None:
    model = zoo.build("llama")
    ids, mask = left_pad(PROMPTS)
    ids_before, mask_before = ids.clone(), mask.clone()
    model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, cache_implementation="paged")
    assert torch.equal(ids, ids_before)
    assert torch.equal(mask, mask_before)


# --- the engine and the model's life


def test_copies_have_engines_of_their_own() -> None:
    model = zoo.fresh("llama")
    stock = _stock(model, PROMPTS)
    plain = io.BytesIO()
    pickle.dump(model, plain)
    _paged(model, PROMPTS)
    engine = hf_paged.get_engine(model)

    buffer = io.BytesIO()
    pickle.dump(model, buffer)
    assert buffer.tell() == plain.tell()  # nothing came along
    buffer.seek(0)
    for twin in (copy.deepcopy(model), pickle.load(buffer)):
        assert_equal_batches(_paged(twin, PROMPTS), stock, "a copy")
        assert hf_paged.get_engine(twin) is not engine
        assert hf_paged.get_engine(twin).stats()["prefix_hit_tokens"] == 0
    assert hf_paged.get_engine(model) is engine


def test_the_engine_does_not_keep_its_model_alive() -> None:
    model = zoo.fresh("llama")
    _paged(model, PROMPTS)
    dead_model = weakref.ref(model)
    dead_engine = weakref.ref(hf_paged.get_engine(model))
    del model
    gc.collect()
    assert dead_model() is None
    assert dead_engine() is None


def test_release_drops_the_engine() -> None:
    model = zoo.fresh("llama")
    stock = _stock(model, PROMPTS)
    _paged(model, PROMPTS)
    dead_engine = weakref.ref(hf_paged.get_engine(model))
    hf_paged.release(model)
    gc.collect()
    assert dead_engine() is None
    assert_equal_batches(_paged(model, PROMPTS), stock, "with a new engine")


def test_uninstall_puts_stock_back_and_install_ours() -> None:
    model = zoo.build("llama")
    stock = _stock(model, PROMPTS)
    ours = {name: getattr(GenerationMixin, name) for name in ("generate", "_sample")}
    try:
        hf_paged.uninstall()
        hf_paged.uninstall()  # once more changes nothing
        for name, wrapped in ours.items():
            method = getattr(GenerationMixin, name)
            assert method is not wrapped
            assert method.__module__ == "transformers.generation.utils"
            assert "hf_paged" not in method.__code__.co_filename
        assert_equal_batches(_stock(model, PROMPTS), stock, "uninstalled")
    finally:
        hf_paged.install()
        hf_paged.install()
    steps = _steps(model)
    assert_equal_batches(_paged(model, PROMPTS), stock, "installed again")
    assert _steps(model) > steps
    hf_paged.uninstall()
    assert GenerationMixin.generate.__module__ == "transformers.generation.utils"  # install twice wraps once
    hf_paged.install()


def test_uninstall_leaves_a_later_patch_alone() -> None:
    model = zoo.build("llama")
    stock = _stock(model, PROMPTS)
    wrapped = GenerationMixin.generate
    calls = []

    def later(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return wrapped(self, *args, **kwargs)

    try:
        GenerationMixin.generate = later  # type: ignore[method-assign]
        hf_paged.uninstall()
        assert GenerationMixin.generate is later
        assert_equal_batches(_stock(model, PROMPTS), stock, "under a later patch")
        assert calls
    finally:
        GenerationMixin.generate = wrapped  # type: ignore[method-assign]
        hf_paged.uninstall()
        hf_paged.install()
    assert_equal_batches(_paged(model, PROMPTS), stock)


@pytest.mark.grid
@pytest.mark.parametrize("budget", [1, 2, 7, 64, 512])
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_greedy_on_the_whole_grid(name: str, block_size: int, budget: int) -> None:
    model = zoo.build(name)
    ends = _ends(model)
    config = PagedConfig(block_size=block_size, max_batch_tokens=budget)
    assert_equal_batches(_paged(model, PROMPTS, config, eos_token_id=ends), _stock(model, PROMPTS, eos_token_id=ends))
