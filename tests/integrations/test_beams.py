"""Beam search and beam sampling on the engine give what stock gives, and hold each shared block once."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_paged import PagedEngine, get_engine
from hf_paged.compat import CACHE_KEYWORD
from hf_paged.engine.external import ExternalRows
from hf_paged.errors import CapacityError
from hf_paged.integrations import beams
from hf_paged.integrations import generate as hook
from hf_paged.integrations.engines import num_fallbacks
from tests import families
from tests.cache import _encoder_decoders
from tests.oracle import TALLY, assert_equal_batches, left_pad, ragged_prompts, random_prompt, solo
from tests.tiny_tokenizer import tiny_tokenizer
from tests.zoo import PAD_TOKEN_ID, build, fresh

FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "qwen3")
POOL = {"num_blocks": 256, "block_size": 8}
RAGGED = ragged_prompts(3, seed=5, shortest=3, longest=40)
# several of them, so that beams end at different rounds
ENDS = [*range(3, 120, 5)]
OPTIONS: dict[str, Any] = {
    "num_beams": 4,
    "max_new_tokens": 14,
    "do_sample": False,
    "pad_token_id": PAD_TOKEN_ID,
    "eos_token_id": ENDS,
}


@pytest.fixture(autouse=True)
def _every_round_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    reorder = ExternalRows.reorder

    def checked(self: ExternalRows, *args: Any) -> None:
        reorder(self, *args)
        self._engine.check()

    monkeypatch.setattr(ExternalRows, "reorder", checked)
    monkeypatch.setattr(hook, "_said", set())


def _engine(model: PreTrainedModel) -> PagedEngine:
    engine = get_engine(model)
    assert engine is not None
    return engine


def _both(
    model: PreTrainedModel, prompts: list[list[int]], pool: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    """Stock's result and ours, from one seed; ours on the engine, which gets back every block."""
    ids, mask = left_pad(prompts)
    keywords = {**OPTIONS, "attention_mask": mask, **options}
    torch.manual_seed(11)
    stock = model.generate(ids, **copy.deepcopy(keywords))
    random_after = torch.rand(1)
    torch.manual_seed(11)
    paged = model.generate(
        ids, **copy.deepcopy(keywords), cache_implementation="paged", cache_config={**POOL, **(pool or {})}
    )
    assert torch.equal(torch.rand(1), random_after), "another number of draws than stock's"
    engine = _engine(model)
    engine.check()
    assert not engine.has_unfinished_requests
    assert all(held.num_referenced == 0 for held in engine.core.allocator.pools)
    assert engine.stats()["num_fallbacks"] == 0
    return stock, paged


def _assert_alike(paged: Any, stock: Any, name: str) -> None:
    if isinstance(stock, torch.Tensor) and stock.is_floating_point():
        assert paged.dtype == stock.dtype
        assert torch.equal(paged.isfinite(), stock.isfinite()), name
        finite = stock.isfinite()
        assert torch.allclose(paged[finite], stock[finite], atol=5e-5, rtol=1e-4), name
    elif isinstance(stock, torch.Tensor):
        assert paged.dtype == stock.dtype
        assert_equal_batches(paged, stock, name)
    else:
        assert len(paged) == len(stock), name
        for index, pair in enumerate(zip(paged, stock, strict=True)):
            _assert_alike(*pair, f"{name}[{index}]")


def _assert_equal(model: PreTrainedModel, prompts: list[list[int]], **options: Any) -> Any:
    """Compares the tokens, and in a second call everything that stock returns. Returns stock's full result."""
    stock, paged = _both(model, prompts, **options)
    assert_equal_batches(paged, stock, "tokens alone")
    everything = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    stock, paged = _both(model, prompts, **options, **everything)
    assert type(paged) is type(stock)
    assert list(paged) == list(stock)
    for key in set(stock) - {CACHE_KEYWORD}:
        _assert_alike(paged[key], stock[key], key)
    return stock


# -- equal to stock --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True], ids=["beam search", "beam sampling"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str, do_sample: bool) -> None:
    model = build(name)
    sampling = {"do_sample": True, "temperature": 1.3, "top_k": 40, "length_penalty": -1.0} if do_sample else {}
    stock = _assert_equal(model, RAGGED, **sampling, num_return_sequences=3)
    lengths = (stock.beam_indices >= 0).sum(-1).tolist()
    assert len(set(lengths)) > 1, "every beam has the same length; the test is too easy"


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", families.GATHERED[0]])
def test_states_and_gathered_keys_follow_the_beams(name: str) -> None:
    """Each prompt against stock alone, since recurrent layers of stock see the padding."""
    model = families.build(name)
    before = num_fallbacks(model)
    options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids, mask = left_pad(RAGGED)
    paged = model.generate(ids, attention_mask=mask, **options, cache_implementation="paged")
    for row, prompt in zip(paged, RAGGED, strict=True):
        alone = torch.tensor([prompt])
        stock = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert_equal_batches(row[None, ids.shape[1] :], stock[:, len(prompt) :], name)
    assert num_fallbacks(model) == before
    _engine(model).check()


@pytest.mark.parametrize("count", [2, 4])
def test_several_returned(count: int) -> None:
    _assert_equal(build("llama"), RAGGED, num_return_sequences=count)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty"), [*itertools.product([True, False, "never"], [-1, 0, 1.1])]
)
def test_early_stopping_and_length_penalty_after_a_long_prompt(
    early_stopping: bool | str, length_penalty: float
) -> None:
    """A score is divided by the generated length; with the prompt's in it, the long prompt would change the ranking."""
    options = {"early_stopping": early_stopping, "length_penalty": length_penalty, "max_new_tokens": 24}
    prompts = [random_prompt(230, seed=1), random_prompt(9, seed=2)]
    _assert_equal(build("llama"), prompts, **options, num_return_sequences=3)


def test_the_penalty_decides_in_the_test_above() -> None:
    prompts = [random_prompt(230, seed=1), random_prompt(9, seed=2)]
    found = [
        _both(build("llama"), prompts, length_penalty=penalty, early_stopping="never", max_new_tokens=24)[1].tolist()
        for penalty in (-1.0, 1.1)
    ]
    assert found[0] != found[1], "the penalty changes nothing; the test is too easy"


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 6},
    "suppress_tokens": {"suppress_tokens": [*range(40, 90)]},
    "sequence_bias": {"sequence_bias": [[[7], -4.0], [[5, 6], 3.0]]},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "guidance_scale": {"guidance_scale": 1.4},
    "top_p": {"do_sample": True, "top_p": 0.5, "top_k": 0, "temperature": 0.7},
    "one token left": {"do_sample": True, "top_k": 8, "min_new_tokens": 2, "temperature": 0.5},
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_processors(case: str) -> None:
    _assert_equal(build("qwen3"), RAGGED, **PROCESSORS[case])


def test_bad_words() -> None:
    ids, mask = left_pad(RAGGED)
    best = build("llama").generate(ids, **{**OPTIONS, "attention_mask": mask})[:, ids.shape[1] :].tolist()
    _assert_equal(build("llama"), RAGGED, bad_words_ids=[[best[0][0]], best[1][:2]])


class _OwnState(LogitsProcessor):
    """Of a class that nobody knows: counts its calls, and treats each row by its number in the batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.calls += 1
        rows = torch.arange(len(scores))
        scores = scores.clone()
        scores[rows, (input_ids.sum(-1) + rows * 7 + self.calls) % scores.shape[-1]] += 3.0
        return scores + scores.mean(dim=0, keepdim=True) * 0.01  # and looks from one row at another


def test_a_processor_with_a_state_that_looks_across_the_batch() -> None:
    _assert_equal(build("llama"), RAGGED, logits_processor=LogitsProcessorList([_OwnState()]))


class _AfterAnyOf(StoppingCriteria):
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return torch.isin(input_ids[:, -2], self.tokens)


@pytest.mark.parametrize("ends", [None, ENDS], ids=["", "and ends"])
def test_criteria_of_ones_own(ends: list[int] | None) -> None:
    criteria = StoppingCriteriaList([_AfterAnyOf([*range(64)])])
    _assert_equal(build("llama"), RAGGED, stopping_criteria=criteria, eos_token_id=ends)


def test_allowed_tokens_by_prompt() -> None:
    def allowed(prompt: int, tokens: torch.Tensor) -> list[int]:
        last = int(tokens[-1])
        # only of tokens that it allowed itself, or of the prompt's
        assert last % 3 == prompt or tokens.tolist()[-len(RAGGED[prompt]) :] == RAGGED[prompt]
        return [token for token in range(1, 128) if token % 3 == prompt]

    _assert_equal(build("llama"), RAGGED, prefix_allowed_tokens_fn=allowed, early_stopping=True)


def test_stop_strings() -> None:
    model = build("llama")
    tokens = solo(model, RAGGED[0], max_new_tokens=8, pad_token_id=PAD_TOKEN_ID)
    stop = [tiny_tokenizer().decode(tokens[2:4]), "a", "M"]
    stock = _assert_equal(model, RAGGED, stop_strings=stop, tokenizer=tiny_tokenizer(), eos_token_id=None)
    assert (stock.beam_indices >= 0).sum(-1).min() < OPTIONS["max_new_tokens"], "no string was met"


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 8, "num_return_sequences": 8},
        {"eos_token_id": None},
        {"eos_token_id": 5, "pad_token_id": 5},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"early_stopping": True, "eos_token_id": [*range(1, 100)]},
        {"early_stopping": True, "eos_token_id": [*range(1, 100)], "do_sample": True},
        {"eos_token_id": [*range(1, 100)], "length_penalty": -2.0},
    ],
    ids=str,
)
def test_borders(options: dict[str, Any]) -> None:
    _assert_equal(build("llama"), RAGGED, **options)


def test_one_prompt_and_equal_prompts() -> None:
    _assert_equal(build("llama"), RAGGED[:1])
    _assert_equal(build("llama"), [RAGGED[0], RAGGED[0], RAGGED[0]])


@pytest.mark.parametrize("seed", range(12))
def test_settings_drawn_at_random(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    num_beams = pick(2, 3, 5)
    options = {
        "num_beams": num_beams,
        "num_return_sequences": pick(1, 2),
        "do_sample": pick(False, True),
        "top_k": pick(0, 6, 50),
        "early_stopping": pick(True, False, "never"),
        "length_penalty": pick(-1.0, 0.0, 0.6, 1.0, 2.0),
        "eos_token_id": pick(None, [7], [*range(20, 50)], [*range(10, 90)]),
        "repetition_penalty": pick(1.0, 1.3),
        "max_new_tokens": pick(5, 18),
    }
    pool = {"num_blocks": pick(12, 40, 200), "block_size": 8, "enable_prefix_caching": pick(True, False)}
    prompts = ragged_prompts(pick(1, 2, 4), seed=seed, shortest=2, longest=30)
    stock, paged = _both(build(pick("llama", "mistral")), prompts, pool=pool, **options)
    assert_equal_batches(paged, stock, str(options))


# -- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["beam search", "beam sampling"])
def test_a_pool_too_small_for_all_beams_preempts(name: str, do_sample: bool) -> None:
    model = fresh(name)
    pool = {"num_blocks": 8, "block_size": 8}  # the longest beam alone takes 7
    stock, paged = _both(model, RAGGED, pool=pool, do_sample=do_sample, eos_token_id=None)
    assert_equal_batches(paged, stock)
    assert _engine(model).stats()["num_preemptions"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": None},
        {"num_return_sequences": 3, "repetition_penalty": 1.4},
        {"early_stopping": True, "pad_token_id": 5},
        {"early_stopping": "never", "length_penalty": -1.0, "num_return_sequences": 2},
        {"eos_token_id": [*range(1, 120)], "num_return_sequences": 4},
    ],
    ids=str,
)
def test_a_pool_that_holds_some_of_the_prompts_takes_some_at_a_time(options: dict[str, Any]) -> None:
    model = fresh("llama")
    prompts = [*RAGGED, *ragged_prompts(3, seed=9, shortest=3, longest=40)]
    pool = {"num_blocks": 24, "block_size": 8}  # 13 for the longest prompt and its beams
    stock, paged = _both(model, prompts, pool=pool, **options)
    assert_equal_batches(paged, stock)
    assert _engine(model).stats()["num_preemptions"] == 0


def test_prompts_that_would_go_on_for_each_others_sake_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few tokens allowed, all beams of a prompt end and its search stops before it has enough finished ones."""
    model = fresh("llama")
    allowed = [5, 6]
    options = {"suppress_tokens": [token for token in range(128) if token not in allowed], "eos_token_id": allowed}
    prompts = [*RAGGED, *ragged_prompts(3, seed=9, shortest=3, longest=40)]
    pool = {"num_blocks": 24, "block_size": 8}
    sizes, search = [], beams._search

    def counted(original: Any, model: Any, engine: Any, batch: beams.Batch, **keywords: Any) -> Any:
        sizes.append(len(batch.input_ids))
        return search(original, model, engine, batch, **keywords)

    monkeypatch.setattr(beams, "_search", counted)
    stock, paged = _both(model, prompts, pool=pool, **options, num_return_sequences=4)
    assert_equal_batches(paged, stock)
    assert sizes[0] < sizes[-1] == 4 * len(prompts), "no part stopped short; the test is too easy"


def test_a_beam_that_can_never_fit_says_so() -> None:
    model = fresh("llama")
    ids, mask = left_pad([RAGGED[0], random_prompt(20, seed=3)])
    options = {**OPTIONS, "eos_token_id": None, "max_new_tokens": 20, "attention_mask": mask}
    with pytest.raises(CapacityError, match="num_blocks"):
        model.generate(ids, **options, cache_implementation="paged", cache_config={"num_blocks": 4, "block_size": 8})
    engine = _engine(model)
    engine.check()
    assert not engine.has_unfinished_requests
    assert engine.core.allocator.pools[0].num_referenced == 0


def test_a_prompt_is_computed_once_and_found_again() -> None:
    model = fresh("llama")
    prompt = random_prompt(40, seed=4)
    _both(model, [prompt], max_new_tokens=1)
    first = _engine(model).stats()
    assert first["num_packed_tokens"] == 40
    assert first["peak_blocks"] == 5
    stock, paged = _both(model, [prompt])
    assert_equal_batches(paged, stock)
    assert _engine(model).stats()["prefix_hit_tokens"] == 32  # a prompt's last token is always computed


def test_beams_share_what_they_have_in_common() -> None:
    model = fresh("llama")
    prompt = random_prompt(64, seed=4)
    _both(model, [prompt], num_beams=6, max_new_tokens=17, eos_token_id=None)
    # eight blocks of prompt once and two of each beam's own at most; six times ten if each had its own copy
    assert 10 <= _engine(model).stats()["peak_blocks"] <= 8 + 6 * 2


def test_the_pool_grows_with_beams_that_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beams, "_HORIZON", 4)
    model = fresh("llama")
    ids, mask = left_pad(RAGGED)
    options = {**OPTIONS, "eos_token_id": None, "max_new_tokens": 40, "attention_mask": mask}
    stock = model.generate(ids, **options)
    assert_equal_batches(model.generate(ids, **options, cache_implementation="paged"), stock)
    assert _engine(model).stats()["num_preemptions"] == 0
    _engine(model).check()


# -- prompts whose search has settled --------------------------------------------------------------------------------


def _tokens_computed(model: PreTrainedModel, **options: Any) -> int:
    before = _engine(model).stats()["num_packed_tokens"] if get_engine(model) is not None else 0
    stock, paged = _both(model, RAGGED, {"enable_prefix_caching": False}, **options)
    if not isinstance(stock, torch.Tensor):
        stock, paged = stock.sequences, paged.sequences
    assert_equal_batches(paged, stock)
    return int(_engine(model).stats()["num_packed_tokens"]) - before


@pytest.mark.parametrize(
    "options",
    [{"early_stopping": True}, {"early_stopping": False}, {"early_stopping": False, "do_sample": True, "top_k": 60}],
    ids=str,
)
def test_a_settled_prompt_costs_nothing_more(options: dict[str, Any]) -> None:
    model = fresh("llama")
    options = {**options, "max_new_tokens": 30, "eos_token_id": [*range(60, 70)], "num_beams": 3}
    less = _tokens_computed(model, **options)
    # who may look at the rows of settled prompts gets them computed
    assert less < _tokens_computed(model, **options, return_dict_in_generate=True)
    TALLY.notes.append(f"beams, {options}: {less} tokens computed")


def test_where_a_processor_may_look_at_other_rows_they_are_computed() -> None:
    model = fresh("llama")
    options = {"max_new_tokens": 30, "eos_token_id": [*range(60, 70)], "num_beams": 3, "early_stopping": True}
    options["logits_processor"] = LogitsProcessorList([_OwnState()])
    assert _tokens_computed(model, **options) == _tokens_computed(model, **options, return_dict_in_generate=True)


# -- what comes back, and who else runs ------------------------------------------------------------------------------


def test_the_returned_cache_is_stocks() -> None:
    model = fresh("llama")
    stock, paged = _both(model, [random_prompt(21, seed=6), random_prompt(21, seed=7)], return_dict_in_generate=True)
    ours, theirs = paged[CACHE_KEYWORD], stock[CACHE_KEYWORD]
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.allclose(mine.keys, other.keys, atol=1e-5)
        assert torch.allclose(mine.values, other.values, atol=1e-5)


def test_continuing_from_the_returned_cache() -> None:
    model = fresh("llama")
    prompts = [random_prompt(21, seed=6), random_prompt(21, seed=7)]
    results = []
    for first in _both(model, prompts, return_dict_in_generate=True, eos_token_id=None, num_return_sequences=4):
        # the cache is of the beams that would run on: any tokens go behind it, alike in both
        length = first[CACHE_KEYWORD].get_seq_length()
        ids = torch.cat([first.sequences[:, :length], torch.full((8, 3), 9)], dim=-1)
        keywords = {CACHE_KEYWORD: first[CACHE_KEYWORD], "attention_mask": torch.ones_like(ids)}
        results.append(model.generate(ids, **keywords, max_new_tokens=6, do_sample=False, pad_token_id=PAD_TOKEN_ID))
    assert_equal_batches(results[1], results[0])


def test_no_cache_comes_back_after_a_preemption_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = fresh("llama")
    pool = {"num_blocks": 12, "block_size": 8}
    stock, paged = _both(model, RAGGED, pool=pool, return_dict_in_generate=True, eos_token_id=None)
    assert_equal_batches(paged.sequences, stock.sequences)
    assert CACHE_KEYWORD not in paged
    assert "num_blocks" in caplog.text


def test_beams_beside_other_requests_of_the_engine() -> None:
    model = fresh("llama")
    ids, mask = left_pad(RAGGED)
    options = {**OPTIONS, "attention_mask": mask}
    plain = {**options, "num_beams": 1, "max_new_tokens": 30, "eos_token_id": None}
    expected = [model.generate(ids, **options), model.generate(ids, **plain)]
    paged = {"cache_implementation": "paged", "cache_config": POOL}
    model.generate(ids, **plain, **paged)  # makes the engine that both share
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def run(which: int) -> None:
        for _ in range(3):
            found[which].append(model.generate(ids, **(options, plain)[which], **paged))

    threads = [threading.Thread(target=run, args=(which,)) for which in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, results in found.items():
        assert len(results) == 3
        for result in results:
            assert_equal_batches(result, expected[which])
    _engine(model).check()


class _Raises(LogitsProcessor):
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] > 45:
            raise RuntimeError("a processor of someone's own")
        return scores


def test_an_error_gives_every_block_back() -> None:
    model = fresh("llama")
    with pytest.raises(RuntimeError, match="someone's own"):
        _both(model, RAGGED, {}, logits_processor=LogitsProcessorList([_Raises()]))
    ids, mask = left_pad(RAGGED)
    options = {**OPTIONS, "attention_mask": mask, "cache_implementation": "paged", "cache_config": POOL}
    with pytest.raises(RuntimeError, match="someone's own"):
        model.generate(ids, **options, logits_processor=LogitsProcessorList([_Raises()]))
    engine = _engine(model)
    engine.check()
    assert engine.core.allocator.pools[0].num_referenced == 0


# -- what stays with stock's loop ------------------------------------------------------------------------------------


def _stock_only() -> Iterator[Any]:
    yield pytest.param({"use_cache": False}, "use_cache=False", id="use_cache")
    yield pytest.param({"output_attentions": True, "return_dict_in_generate": True}, "attentions", id="attentions")


@pytest.mark.parametrize(("options", "reason"), _stock_only())
def test_what_cannot_run_on_the_engine_runs_stocks_loop_and_says_so_once(
    options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = fresh("llama")
    ids, mask = left_pad(RAGGED)
    results = [
        model.generate(ids, **{**OPTIONS, "attention_mask": mask, **options}, **more)
        for more in ({}, {"cache_implementation": "paged"}, {"cache_implementation": "paged"})
    ]
    tokens = [result if isinstance(result, torch.Tensor) else result.sequences for result in results]
    assert_equal_batches(tokens[1], tokens[0])
    assert_equal_batches(tokens[2], tokens[0])
    said = [record.getMessage() for record in caplog.records if record.name == "hf_paged"]
    assert len(said) == 1
    assert reason in said[0]


def test_a_model_that_reorders_its_cache_itself_runs_stocks_loop(caplog: pytest.LogCaptureFixture) -> None:
    model = fresh("llama")
    calls = []

    def reorder(cache: Any, beam_idx: torch.Tensor) -> Any:
        calls.append(1)
        cache.reorder_cache(beam_idx)
        return cache

    model._reorder_cache = reorder
    ids, mask = left_pad(RAGGED)
    options = {**OPTIONS, "attention_mask": mask}
    stock = model.generate(ids, **options)
    before = len(calls)
    assert_equal_batches(model.generate(ids, **options, cache_implementation="paged"), stock)
    assert len(calls) == 2 * before
    assert "reorders its cache" in caplog.text


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoders_run_stocks_loop(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = _encoder_decoders.build(name)
    ids, mask = left_pad(RAGGED)
    options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    stock = model.generate(ids, **options)
    assert_equal_batches(model.generate(ids, **options, cache_implementation="paged"), stock)
    assert "encoder-decoder" in caplog.text
