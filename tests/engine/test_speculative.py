"""Draft tokens change the time and nothing else: the same greedy and seeded tokens, the same distribution of draws."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_paged import PagedConfig, PagedEngine, RequestOutput
from hf_paged.engine.speculative import look_up
from hf_paged.errors import RequestError
from tests import zoo
from tests.drafting import (
    FEW,
    NAMES,
    assistant_of,
    chi_square,
    exact_distribution,
    model_of_few,
    prompts_of_few,
)
from tests.oracle import assert_equal_tokens, assert_rows_equal_solo, solo
from tests.tiny_tokenizer import tiny_tokenizer

NEW = 20
PROMPTS = prompts_of_few(5, seed=2)
ROOMY: dict[str, Any] = {"block_size": 8, "num_blocks": 96}
CONFIGS: dict[str, dict[str, Any]] = {
    "roomy": ROOMY,
    "chunks of 7": {**ROOMY, "max_batch_tokens": 7},
    "a pool for one": {"block_size": 8, "num_blocks": 8, "max_batch_tokens": 24},
    "no prefixes": {**ROOMY, "enable_prefix_caching": False},
}
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 4}


def _ask(kind: str, model: PreTrainedModel) -> dict[str, Any]:
    return LOOKUP if kind == "lookup" else {"assistant_model": assistant_of(model)}


def _run(engine: PagedEngine, options: list[dict[str, Any]], prompts: list[list[int]]) -> list[RequestOutput]:
    """Steps to the end, with the invariants of all pools checked after every step."""
    ids = [engine.add_request(prompt, **option) for prompt, option in zip(prompts, options, strict=True)]
    final: dict[str, RequestOutput] = {}
    drafters = list(engine.core.speculator._drafters.values())
    while engine.has_unfinished_requests:
        for output in engine.step():
            final[output.request_id] = output
        engine.check()
        for drafter in drafters:
            drafter.check()
    for drafter in drafters:
        assert not drafter._mirrors
        assert not drafter._core.requests
        assert all(pool.num_referenced == 0 for pool in drafter._core.allocator.pools)
    return [final[request_id] for request_id in ids]


# -- drafts from the prompt --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5])
def test_lookup_finds_what_stock_finds(max_ngram: int) -> None:
    generator = torch.Generator().manual_seed(max_ngram)
    found = 0
    for length in [1, 2, 3, 4, *range(5, 60)]:
        ids = torch.randint(0, 6, (1, length), generator=generator)
        stock = PromptLookupCandidateGenerator(num_output_tokens=5, max_matching_ngram_size=max_ngram, max_length=1000)
        expected = stock.get_candidates(ids)[0][0, length:].tolist()
        assert look_up(ids[0].numpy(), 5, max_ngram) == expected
        found += bool(expected)
    assert found > 40


# -- greedy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_stock_without_drafts(name: str, kind: str, config: str) -> None:
    model = model_of_few(name)
    with PagedEngine(model, PagedConfig(**CONFIGS[config])) as engine:
        options = {"max_new_tokens": NEW, **_ask(kind, model)}
        outputs = _run(engine, [options] * len(PROMPTS), PROMPTS)
        assert_rows_equal_solo(model, PROMPTS, [output.token_ids for output in outputs], max_new_tokens=NEW)
        stats = engine.stats()
        assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
        if config == "a pool for one":
            assert stats["num_preemptions"] > 0


def test_requests_with_and_without_drafts_share_steps() -> None:
    model = model_of_few("mistral")
    assistant = assistant_of(model)
    asked: list[dict[str, Any]] = [{}, LOOKUP, {"assistant_model": assistant}, {"prompt_lookup_num_tokens": 1}, {}]
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        outputs = _run(engine, [{"max_new_tokens": NEW, **options} for options in asked], PROMPTS)
    assert_rows_equal_solo(model, PROMPTS, [output.token_ids for output in outputs], max_new_tokens=NEW)


def test_an_assistant_that_is_always_right_saves_most_steps() -> None:
    model = model_of_few("llama")
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        [output] = engine.generate(PROMPTS[:1], max_new_tokens=21, assistant_model=assistant_of(model, 0.0))
        stats = engine.stats()
    assert_equal_tokens(output.token_ids, solo(model, PROMPTS[0], max_new_tokens=21))
    # the prompt gives one token, four steps of 1 + 4 give the others
    assert (stats["num_steps"], stats["num_draft_checks"]) == (5, 4)
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"] == 16


@pytest.mark.parametrize("name", NAMES)
def test_the_model_may_assist_itself(name: str) -> None:
    model = zoo.fresh(name, vocab_size=FEW)
    model.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        outputs = _run(engine, [{"max_new_tokens": NEW, "assistant_model": model}] * len(PROMPTS), PROMPTS)
        stats = engine.stats()
    assert_rows_equal_solo(model, PROMPTS, [output.token_ids for output in outputs], max_new_tokens=NEW)
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"] > 0


def test_siblings_get_drafts_of_their_own() -> None:
    model = model_of_few("llama")
    options = {"max_new_tokens": NEW, "do_sample": True, "seed": 3, "num_return_sequences": 4}
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        plain = engine.generate(PROMPTS[:2], **options)
        outputs = _run(engine, [{**options, **LOOKUP}] * 2, PROMPTS[:2])
        assert engine.stats()["num_accepted_tokens"] > 0
    for output, expected in zip(outputs, plain, strict=True):
        for mine, other in zip(output.outputs, expected.outputs, strict=True):
            assert_equal_tokens(mine.token_ids, other.token_ids)


# -- the prefix tree ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_only_tokens_that_stood_are_indexed_and_later_requests_start_from_them(name: str, kind: str) -> None:
    model = model_of_few(name)
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        options = {"max_new_tokens": NEW, **_ask(kind, model)}
        outputs = _run(engine, [options] * len(PROMPTS), PROMPTS)
        whole = [[*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, outputs, strict=True)]
        chains = _chains(engine)
        assert chains
        for chain in chains:
            assert any(tokens[: len(chain)] == chain for tokens in whole), "tokens that nobody has are indexed"
        again = [[*tokens, 1] for tokens in whole]
        outputs = _run(engine, [options] * len(again), again)
        # all but the last token of a sequence had been computed
        expected = [(len(tokens) - 1) // 8 * 8 for tokens in whole]
        assert [output.num_cached_tokens for output in outputs] == expected
        assert_rows_equal_solo(model, again, [output.token_ids for output in outputs], max_new_tokens=NEW)


def _chains(engine: PagedEngine) -> list[list[int]]:
    """Every indexed run of tokens, from the first."""
    found: list[list[int]] = []
    below = [(node, []) for node in engine.core.allocator._index._top.children.values()]
    while below:
        node, tokens = below.pop()
        for key, child in node.children.items():
            found.append([*tokens, *key])
            below.append((child, [*tokens, *key]))
    return found


# -- processors and ends -----------------------------------------------------------------------------------------------


class _Echo(LogitsProcessor):
    """Likes what followed the last token before, and bans the one before it: a wrong history changes the next token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        tokens = input_ids[0].tolist()
        before = [index for index in range(len(tokens) - 1) if tokens[index] == tokens[-1]]
        if before:
            scores[0, tokens[before[0] + 1]] += 4
        scores[0, tokens[-2]] = -torch.inf
        return scores


PROCESSED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 3},
    {"min_new_tokens": 9, "eos_token_id": [1, 2, 3]},
    {"bad_words_ids": [[3, 4], [5]]},
    {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 4},
    {"forced_eos_token_id": 6},
    {"eos_token_id": 2},
    {"eos_token_id": [1, 5, 7]},
]


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("settings", PROCESSED, ids=str)
def test_each_checked_position_sees_its_own_history(settings: dict[str, Any], kind: str) -> None:
    model = model_of_few("llama")
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        options = {"max_new_tokens": NEW, **settings, **_ask(kind, model)}
        outputs = _run(engine, [options] * len(PROMPTS), PROMPTS)
        assert engine.stats()["num_draft_tokens"] > 0
    assert_rows_equal_solo(
        model, PROMPTS, [output.token_ids for output in outputs], max_new_tokens=NEW, pad_token_id=0, **settings
    )


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_a_processor_of_ones_own_sees_its_own_history(kind: str) -> None:
    model = zoo.build("llama")
    prompts = [[5, 9, 5, 9, 7], [3, 4, 6, 3, 4, 6, 3]]
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        options = {"max_new_tokens": NEW, "logits_processor": [_Echo()]}
        expected = engine.generate(prompts, **options)
        outputs = _run(engine, [{**options, **_ask(kind, model)}] * 2, prompts)
        assert engine.stats()["num_accepted_tokens"] > 4
    for output, other in zip(outputs, expected, strict=True):
        assert_equal_tokens(output.token_ids, other.token_ids)


@pytest.mark.parametrize("limit", range(1, 9))
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_the_limit_of_new_tokens_is_met_and_never_passed(kind: str, limit: int) -> None:
    model = model_of_few("llama")
    engine = PagedEngine(model, PagedConfig(block_size=8, num_blocks=96))
    drafts = LOOKUP if kind == "lookup" else {"assistant_model": assistant_of(model, 0.0)}
    outputs = _run(engine, [{"max_new_tokens": limit, **drafts}] * len(PROMPTS), PROMPTS)
    assert_rows_equal_solo(model, PROMPTS, [output.token_ids for output in outputs], max_new_tokens=limit)
    assert {output.finish_reason for output in outputs} == {"length"}


def test_an_end_inside_the_drafts_ends_there() -> None:
    model = model_of_few("llama")
    free = solo(model, PROMPTS[0], max_new_tokens=NEW)
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        for end in set(free):
            asked = {"max_new_tokens": NEW, "eos_token_id": end, "assistant_model": assistant_of(model, 0.0, 8)}
            [output] = _run(engine, [asked], PROMPTS[:1])
            expected = free[: free.index(end) + 1]
            assert_equal_tokens(output.token_ids, expected)
            assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", end)


def test_stop_strings_and_criteria_of_ones_own_end_inside_the_drafts() -> None:
    model, tokenizer = zoo.build("llama"), tiny_tokenizer()
    prompt = tokenizer("beta Paris", add_special_tokens=False)["input_ids"]
    free = solo(model, prompt, max_new_tokens=NEW)
    stop = tokenizer.decode(free[6:8])

    class Eleven(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((1,), input_ids.shape[1] == len(prompt) + 11)

    drafts = {"max_new_tokens": NEW, "assistant_model": assistant_of(model, 0.0, 6)}
    with PagedEngine(model, PagedConfig(**ROOMY), tokenizer=tokenizer) as engine:
        stopped, counted = _run(
            engine, [{**drafts, "stop_strings": [stop]}, {**drafts, "stopping_criteria": [Eleven()]}], [prompt] * 2
        )
    expected = solo(model, prompt, max_new_tokens=NEW, stop_strings=[stop], tokenizer=tokenizer)
    assert_equal_tokens(stopped.token_ids, expected)
    assert stopped.outputs[0].stop_reason == stop
    assert_equal_tokens(counted.token_ids, free[:11])


# -- what leaves the engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_logprobs_are_those_without_drafts(kind: str) -> None:
    model = model_of_few("gemma2")
    asked = {"max_new_tokens": NEW, "logprobs": 3, "prompt_logprobs": 1}
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        plain = engine.generate(PROMPTS, **asked)
        drafted = _run(engine, [{**asked, **_ask(kind, model)}] * len(PROMPTS), PROMPTS)
    for mine, other in zip(drafted, plain, strict=True):
        assert len(mine.outputs[0].logprobs) == len(mine.token_ids) == NEW
        for entry, expected in zip(mine.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert entry.token_id == expected.token_id
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in expected.top]
        for entry, expected in zip(mine.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_a_stream_gets_several_tokens_at_once_in_order() -> None:
    model = model_of_few("llama")
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        asked = {"max_new_tokens": NEW, "assistant_model": assistant_of(model, 0.0)}
        seen = [output.token_ids for output in engine.stream(PROMPTS[1], **asked)]
    assert len(seen) < NEW
    for shorter, longer in itertools.pairwise(seen):
        assert longer[: len(shorter)] == shorter
    assert_equal_tokens(seen[-1], solo(model, PROMPTS[1], max_new_tokens=NEW))


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["roomy", "chunks of 7", "a pool for one"])
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("name", NAMES)
def test_a_seeded_request_draws_the_same_tokens_with_drafts(name: str, kind: str, config: str) -> None:
    model = model_of_few(name)
    options = [
        {"max_new_tokens": NEW, "do_sample": True, "seed": index, "temperature": 0.8, "top_k": 5}
        for index in range(len(PROMPTS))
    ]
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        plain = _run(engine, options, PROMPTS)
    with PagedEngine(model, PagedConfig(**CONFIGS[config])) as engine:
        drafts = _ask(kind, model)
        drafted = _run(engine, [{**option, **drafts} for option in options], PROMPTS)
        assert 0 < engine.stats()["num_accepted_tokens"] < engine.stats()["num_draft_tokens"]
    for mine, other in zip(drafted, plain, strict=True):
        assert_equal_tokens(mine.token_ids, other.token_ids)


DRAWN, DEPTH = 1000, 4
ALL_AT_ONCE: dict[str, Any] = {
    "block_size": 8,
    "num_blocks": 4 * DRAWN,
    "max_batch_tokens": 8 * DRAWN,
    "max_requests_per_batch": 2 * DRAWN,
}
REPEATED = [1, 2, 3, 1, 2, 0, 1, 2, 3, 0, 3]  # every token stood before, so every draw is followed by a draft
WARPERS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({"temperature": 1.5, "top_k": 0}, [TemperatureLogitsWarper(1.5)]),
    "top_k": ({"temperature": 2.5, "top_k": 3}, [TemperatureLogitsWarper(2.5), TopKLogitsWarper(3)]),
    "penalty": (
        {"repetition_penalty": 1.5, "temperature": 2.0, "top_k": 0},
        [RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(2.0)],
    ),
}


def _draws(model: PreTrainedModel, **asked: Any) -> tuple[Counter[tuple[int, ...]], dict[str, Any]]:
    with PagedEngine(model, PagedConfig(**ALL_AT_ONCE)) as engine:
        [output] = engine.generate(
            [REPEATED], max_new_tokens=DEPTH, do_sample=True, num_return_sequences=DRAWN, **asked
        )
        return Counter(each.token_ids for each in output.outputs), engine.stats()


@pytest.fixture(scope="module")
def few() -> PreTrainedModel:
    """A model of four tokens: 256 continuations of four, whose probabilities can be computed."""
    return zoo.fresh("llama", vocab_size=4, hidden_size=32, num_hidden_layers=2, seed=4)


@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_draws_with_drafts_are_distributed_as_without(few: PreTrainedModel, kind: str, warpers: str) -> None:
    asked, processors = WARPERS[warpers]
    expected = exact_distribution(few, REPEATED, DEPTH, LogitsProcessorList(processors))
    torch.manual_seed(11)
    drafts = {"prompt_lookup_num_tokens": 3} if kind == "lookup" else {"assistant_model": assistant_of(few, 0.3, 3)}
    counts, stats = _draws(few, **asked, **drafts)
    statistic, bound = chi_square(counts, expected)
    assert statistic < bound, f"chi-square {statistic:.1f} passes {bound:.1f}"
    assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
    assert stats["num_draft_checks"] >= DRAWN * 0.9


def test_the_bound_tells_the_assistants_distribution_from_the_models(few: PreTrainedModel) -> None:
    asked, processors = WARPERS["temperature"]
    expected = exact_distribution(few, REPEATED, DEPTH, LogitsProcessorList(processors))
    torch.manual_seed(11)
    for model, passes in ((assistant_of(few, 0.3), True), (few, False)):
        statistic, bound = chi_square(_draws(model, **asked)[0], expected)
        assert (statistic > bound) is passes


def test_draws_of_requests_with_drafts_leave_their_neighbours_distribution_alone(few: PreTrainedModel) -> None:
    asked, processors = WARPERS["temperature"]
    expected = exact_distribution(few, REPEATED, DEPTH, LogitsProcessorList(processors))
    torch.manual_seed(12)
    each: list[Counter[tuple[int, ...]]] = [Counter(), Counter(), Counter()]
    drafts = [{}, {"prompt_lookup_num_tokens": 2}, {"assistant_model": assistant_of(few, 0.3, 3)}]
    with PagedEngine(few, PagedConfig(**ALL_AT_ONCE)) as engine:
        options = {"max_new_tokens": DEPTH, "do_sample": True, "num_return_sequences": DRAWN // 2, **asked}
        ids = [engine.add_request(REPEATED, **options, **draft) for draft in drafts]
        final = {}
        while engine.has_unfinished_requests:
            final.update({output.request_id: output for output in engine.step()})
        for counter, request_id in zip(each, ids, strict=True):
            counter.update(sequence.token_ids for sequence in final[request_id].outputs)
    for counts in each:
        statistic, bound = chi_square(counts, expected)
        assert statistic < bound


# -- how many drafts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "kept"), [("heuristic", True), ("heuristic_transient", False), ("constant", False)]
)
def test_the_number_of_drafts_follows_the_assistants_schedule(schedule: str, kept: bool) -> None:
    model = model_of_few("llama")
    assistant = assistant_of(model, 0.0, 2, num_assistant_tokens_schedule=schedule)
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        [output] = engine.generate(PROMPTS[:1], max_new_tokens=16, assistant_model=assistant)
        stats = engine.stats()
    assert_equal_tokens(output.token_ids, solo(model, PROMPTS[0], max_new_tokens=16))
    # 1 for the prompt; then 2, 4 and 6 drafts and one more token each, or always 2 and one
    assert stats["num_draft_checks"] == (3 if schedule != "constant" else 5)
    assert assistant.generation_config.num_assistant_tokens == (8 if kept else 2)


def test_an_assistant_that_is_unsure_drafts_no_further() -> None:
    model = model_of_few("llama")
    assistant = assistant_of(model, 0.0, 6, assistant_confidence_threshold=1.1)
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        [output] = engine.generate(PROMPTS[:1], max_new_tokens=9, assistant_model=assistant)
        assert engine.stats()["num_draft_tokens"] == engine.stats()["num_draft_checks"] == 4
    assert_equal_tokens(output.token_ids, solo(model, PROMPTS[0], max_new_tokens=9))


def test_a_requests_own_number_of_assistant_tokens_counts() -> None:
    model = model_of_few("llama")
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        engine.generate(
            PROMPTS[:1], max_new_tokens=13, assistant_model=assistant_of(model, 0.0), num_assistant_tokens=3
        )
        assert engine.stats()["num_draft_tokens"] == 3 * engine.stats()["num_draft_checks"] == 9


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_an_assistant_that_fails_is_left_out_and_said_once_a_request(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of_few("llama")
    assistant = assistant_of(model)
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        engine.generate(PROMPTS[:1], max_new_tokens=4, assistant_model=assistant)

        def fails(*args: Any, **kwargs: Any) -> None:
            raise FloatingPointError("the assistant is broken")

        handle = assistant.register_forward_pre_hook(fails)
        with caplog.at_level(logging.WARNING, logger="hf_paged"):
            asked = {"max_new_tokens": NEW, "assistant_model": assistant}
            outputs = _run(engine, [asked] * 2, PROMPTS[:2])
        assert_rows_equal_solo(model, PROMPTS[:2], [output.token_ids for output in outputs], max_new_tokens=NEW)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 2
        assert "FloatingPointError: the assistant is broken" in said[0]
        handle.remove()
        before = engine.stats()["num_accepted_tokens"]
        _run(engine, [asked], PROMPTS[:1])
        assert engine.stats()["num_accepted_tokens"] > before


def test_a_processor_that_raises_behind_a_wrong_draft_did_not_happen() -> None:
    model = model_of_few("llama")
    free = solo(model, PROMPTS[0], max_new_tokens=NEW)

    class Refuses(LogitsProcessor):
        """Raises for histories that aren't the right one."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            tokens = input_ids[0].tolist()
            if tokens != [*PROMPTS[0], *free][: len(tokens)]:
                raise LookupError("a history that will never be")
            return scores

    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        for kind in ("lookup", "assistant"):
            asked = {"max_new_tokens": NEW, "logits_processor": [Refuses()], **_ask(kind, model)}
            [output] = _run(engine, [asked], PROMPTS[:1])
            assert output.error is None
            assert_equal_tokens(output.token_ids, free)


def test_a_processor_that_raises_at_a_token_that_stands_ends_the_request_there() -> None:
    model = model_of_few("llama")
    free = solo(model, PROMPTS[0], max_new_tokens=NEW)

    class Raises(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] >= len(PROMPTS[0]) + 7:
                raise LookupError("the eighth token")
            return scores

    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        bad = {"max_new_tokens": NEW, "logits_processor": [Raises()], "assistant_model": assistant_of(model, 0.0)}
        failed, fine = _run(engine, [bad, {"max_new_tokens": NEW, **LOOKUP}], PROMPTS[:2])
    assert isinstance(failed.error, LookupError)
    assert_equal_tokens(failed.token_ids, free[:7])
    assert_equal_tokens(fine.token_ids, solo(model, PROMPTS[1], max_new_tokens=NEW))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"assistant_model": zoo.build("llama")}, "another vocabulary"),
        ({**LOOKUP, "assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
        ({"prompt_lookup_num_tokens": 0}, "at least 1"),
        ({"prompt_lookup_num_tokens": 2.5}, "integer"),
        ({"assistant_early_exit": 1}, "assistant_early_exit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_drafts_in_another_way_is_refused(asked: dict[str, Any], reason: str) -> None:
    if not hasattr(model_of_few("llama").generation_config, next(reversed(asked))) and "model" not in str(asked):
        pytest.skip(f"this version has no {next(reversed(asked))}")
    engine = PagedEngine(model_of_few("llama"), PagedConfig(**ROOMY))
    with pytest.raises(RequestError, match=reason):
        engine.add_request(PROMPTS[0], max_new_tokens=4, **asked)
    assert not engine.has_unfinished_requests


def test_aborting_gives_the_assistants_blocks_back() -> None:
    model = model_of_few("mistral")
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        asked = {"max_new_tokens": NEW, "assistant_model": assistant_of(model)}
        left, stays = (engine.add_request(prompt, **asked) for prompt in PROMPTS[:2])
        for _ in range(3):
            engine.step()
        engine.abort(left)
        [drafter] = engine.core.speculator._drafters.values()
        assert [mirror.request.request_id for mirror in drafter._mirrors] == [stays]
        drafter.check()
        engine.check()


def test_an_assistant_is_not_kept_alive() -> None:
    model = model_of_few("llama")
    assistant = copy.deepcopy(assistant_of(model))
    with PagedEngine(model, PagedConfig(**ROOMY)) as engine:
        engine.generate(PROMPTS[:1], max_new_tokens=4, assistant_model=assistant)
        assert len(engine.core.speculator._drafters) == 1
        del assistant
        gc.collect()  # models hold cycles
        assert len(engine.core.speculator._drafters) == 0


def test_lookup_works_on_arrays_of_one_token() -> None:
    assert look_up(np.array([3]), 4, 2) == []
