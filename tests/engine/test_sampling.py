"""Sampling on a ragged batch: what a request draws depends on the request alone."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import LogitsProcessor, SuppressTokensLogitsProcessor

from hf_paged import PagedConfig, PagedEngine, get_engine
from hf_paged.errors import RequestError
from tests.oracle import assert_equal_tokens, ragged_prompts, solo
from tests.tiny_tokenizer import tiny_tokenizer
from tests.zoo import VOCAB_SIZE, build

NEW = 8
PROMPTS = ragged_prompts(6, seed=31, shortest=2, longest=30)


def _engine(**config: Any) -> PagedEngine:
    return PagedEngine(build("llama"), PagedConfig(**{"block_size": 8, "num_blocks": 128, **config}))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 0, "top_p": 0.8},
    {"min_p": 0.1, "temperature": 1.3},
    {"typical_p": 0.7},
    {"epsilon_cutoff": 0.01},
    {"repetition_penalty": 1.4, "temperature": 0.9},
    {"no_repeat_ngram_size": 2},
    {"renormalize_logits": True, "top_k": 10},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_seeded_request_draws_what_stock_draws_after_that_seed(settings: dict[str, Any]) -> None:
    engine = _engine()
    seeds = list(range(len(PROMPTS)))
    outputs = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=True, seed=seeds, **settings)
    for prompt, seed, output in zip(PROMPTS, seeds, outputs, strict=True):
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        expected = build("llama").generate(ids, max_new_tokens=NEW, do_sample=True, **settings)[0, len(prompt) :]
        assert_equal_tokens(output.token_ids, expected.tolist())


@pytest.mark.parametrize("company", [0, 1, 5])
@pytest.mark.parametrize("num_blocks", [14, 128])
def test_a_seeded_request_does_not_depend_on_its_company(company: int, num_blocks: int) -> None:
    alone = _engine().generate([PROMPTS[0]], max_new_tokens=NEW, do_sample=True, seed=7)[0].token_ids
    engine = _engine(num_blocks=num_blocks, max_batch_tokens=9)
    mine = engine.add_request(PROMPTS[0], max_new_tokens=NEW, do_sample=True, seed=7)
    for index in range(company):
        sampled = {"do_sample": True} if index % 2 else {}
        engine.add_request(PROMPTS[1 + index % 5], max_new_tokens=NEW, **sampled)
    last = ()
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.request_id == mine:
                last = output.token_ids
    assert_equal_tokens(last, alone)


def test_sequences_of_one_request_differ_and_the_set_is_reproducible() -> None:
    sets = []
    for company in (0, 3):
        engine = _engine()
        for prompt in PROMPTS[1 : 1 + company]:
            engine.add_request(prompt, max_new_tokens=NEW, do_sample=True)
        output = engine.generate([PROMPTS[0]], max_new_tokens=NEW, do_sample=True, seed=5, num_return_sequences=4)[0]
        sets.append([sequence.token_ids for sequence in output.outputs])
    assert sets[0] == sets[1]
    assert len(set(sets[0])) == 4


def test_a_seed_leaves_torchs_own_generator_alone() -> None:
    engine = _engine()
    state = torch.get_rng_state()
    engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=True, seed=1)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("count", [1, 8, 32])
def test_greedy_does_not_depend_on_how_many_run(count: int) -> None:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(count)]
    for prompt, output in zip(prompts, _engine().generate(prompts, max_new_tokens=NEW), strict=True):
        assert_equal_tokens(output.token_ids, solo(build("llama"), prompt, max_new_tokens=NEW))


def test_temperature_zero_is_greedy_also_where_the_model_samples_by_default() -> None:
    model = build("llama", seed=3)
    expected = [solo(model, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.6
    engine = PagedEngine(model, PagedConfig(num_blocks=64))
    for tokens, output in zip(expected, engine.generate(PROMPTS, max_new_tokens=NEW, temperature=0), strict=True):
        assert_equal_tokens(output.token_ids, tokens)


def test_temperature_zero_stands_beside_requests_that_sample() -> None:
    engine = _engine()
    temperatures = [0, 1.3, 0.0, 0.7, 0, 1.0]
    outputs = engine.generate(
        PROMPTS, max_new_tokens=NEW, do_sample=True, temperature=temperatures, seed=list(range(len(PROMPTS)))
    )
    for prompt, temperature, output in zip(PROMPTS, temperatures, outputs, strict=True):
        if temperature == 0:
            assert_equal_tokens(output.token_ids, solo(build("llama"), prompt, max_new_tokens=NEW))
    sampled = engine.generate(PROMPTS[:2], max_new_tokens=NEW, do_sample=True, temperature=[1.3, 0], seed=[9, 9])
    assert_equal_tokens(sampled[1].token_ids, solo(build("llama"), PROMPTS[1], max_new_tokens=NEW))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.0, "do_sample": True}], ids=str)
def test_temperature_zero_in_generate_is_what_it_is_in_stock(options: dict[str, Any]) -> None:
    ids = torch.tensor([PROMPTS[0]])
    results: list[Any] = []
    for more in ({}, {"cache_implementation": "paged"}):
        try:
            results.append(build("llama").generate(ids, max_new_tokens=NEW, **options, **more).tolist())
        except ValueError as error:
            results.append(str(error))
    assert results[0] == results[1]


def test_a_temperature_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="do_sample=True"):
        _engine().add_request(PROMPTS[0], temperature=0.5)


def test_logit_bias_bans_and_forces() -> None:
    engine = _engine()
    greedy = solo(build("llama"), PROMPTS[0], max_new_tokens=NEW)
    banned = engine.generate([PROMPTS[0]], max_new_tokens=NEW, logit_bias={str(greedy[0]): -1000})[0]
    assert greedy[0] not in banned.token_ids
    forced = engine.generate([PROMPTS[0]], max_new_tokens=NEW, logit_bias={9: 1000.0})[0]
    assert forced.token_ids == (9,) * NEW
    for bad in ({VOCAB_SIZE: 1}, {"x": 1}, [1, 2]):
        with pytest.raises(RequestError, match="logit_bias"):
            engine.add_request(PROMPTS[0], logit_bias=bad)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 3, "temperature": 2.0}], ids=str)
def test_a_banned_token_never_appears_and_a_bias_is_what_is_added(sampling: dict[str, Any]) -> None:
    model, bias = build("llama"), {5: -100, "17": 4.5, 44: -2}
    outputs = _engine().generate(PROMPTS * 4, max_new_tokens=20, logit_bias=bias, **sampling)
    assert all(5 not in output.token_ids for output in outputs)
    if not sampling:
        stock = {(5,): -100.0, (17,): 4.5, (44,): -2.0}
        for prompt, output in zip(PROMPTS, outputs, strict=False):
            assert_equal_tokens(output.token_ids, solo(model, prompt, max_new_tokens=20, sequence_bias=stock))


def test_logprobs_are_the_models_own_whatever_is_sampled() -> None:
    model, prompt = build("llama"), PROMPTS[0]
    output = _engine().generate([prompt], max_new_tokens=4, do_sample=True, temperature=0.3, seed=2, logprobs=3)[0]
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == list(output.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0].log_softmax(-1)
    for step, entry in enumerate(logprobs):
        row = logits[len(prompt) - 1 + step]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        top = row.topk(3)
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_logprobs_survive_preemption_one_a_token() -> None:
    engine = _engine(num_blocks=10, max_batch_tokens=16)
    outputs = engine.generate(PROMPTS, max_new_tokens=24, logprobs=0)
    assert engine.stats()["num_preemptions"] > 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_token_ids == tuple(prompt)
        assert len(output.token_ids) == 24
        assert output.outputs[0].logprobs is not None
        assert [entry.token_id for entry in output.outputs[0].logprobs] == list(output.token_ids)
        assert_equal_tokens(output.token_ids, solo(build("llama"), prompt, max_new_tokens=24))


def test_one_value_a_prompt_is_taken_for_single_valued_fields() -> None:
    lengths = [1, 2, 3, 4, 5, 6]
    outputs = _engine().generate(PROMPTS, max_new_tokens=lengths, repetition_penalty=[1.0, 1.5, 1.0, 1.5, 1.0, 1.5])
    for prompt, length, output, penalty in zip(PROMPTS, lengths, outputs, [1.0, 1.5] * 3, strict=True):
        expected = solo(build("llama"), prompt, max_new_tokens=length, repetition_penalty=penalty)
        assert_equal_tokens(output.token_ids, expected)
    with pytest.raises(RequestError, match="2 values for 6 prompts"):
        _engine().generate(PROMPTS, max_new_tokens=[1, 2])


def test_min_length_counts_like_stock_on_that_prompt_alone() -> None:
    model = build("llama")
    prompt = PROMPTS[0]
    end = solo(model, prompt, max_new_tokens=NEW)[1]
    for keywords in ({"min_new_tokens": 5}, {"min_length": len(prompt) + 4}):
        output = _engine().generate([prompt], max_new_tokens=NEW, eos_token_id=end, **keywords)[0]
        assert_equal_tokens(output.token_ids, solo(model, prompt, max_new_tokens=NEW, eos_token_id=end, **keywords))


class _Alternates(LogitsProcessor):
    """A grammar with a state of its own: letters and digits in turn, as a grammar's matcher advances a token a call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = range(97, 123) if self.calls % 2 == 0 else range(48, 58)
        self.calls += 1
        mask = torch.full_like(scores, float("-inf"))
        mask[:, list(allowed)] = 0
        return scores + mask


def test_a_grammar_with_a_state_survives_preemption() -> None:
    engine = _engine(num_blocks=10, max_batch_tokens=16)
    for prompt in PROMPTS:
        engine.add_request(prompt, max_new_tokens=24, logits_processor=[_Alternates()])
    final: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        final.update({output.request_id: output for output in engine.step()})
        engine.check()
    assert engine.stats()["num_preemptions"] > 0
    for output in final.values():
        assert re.fullmatch("([a-z][0-9]){12}", tiny_tokenizer().decode(output.token_ids))


def test_a_repetition_penalty_counts_prompt_and_output_as_computed_by_hand() -> None:
    model, prompt, penalty = build("llama"), PROMPTS[1], 1.5
    tokens = list(prompt)
    for _ in range(4):
        with torch.no_grad():
            scores = model(torch.tensor([tokens])).logits[0, -1]
        for token in set(tokens):
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        tokens.append(int(scores.argmax()))
    output = _engine().generate([prompt], max_new_tokens=4, repetition_penalty=penalty)[0]
    assert_equal_tokens(output.token_ids, tokens[len(prompt) :])


def test_bad_words_are_banned_with_and_without_a_space_and_bring_no_special_tokens() -> None:
    model, tokenizer = build("llama"), copy.deepcopy(tiny_tokenizer())
    tokenizer.add_bos_token = True
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    assert tokenizer("be")["input_ids"] == [1, 7]
    engine = PagedEngine(model, PagedConfig(num_blocks=64), tokenizer=tokenizer)
    greedy = engine.generate([PROMPTS[0]], max_new_tokens=NEW)[0].token_ids
    letter = next(token for token in greedy if 33 <= token < 127)
    banned = engine.generate([PROMPTS[0]], max_new_tokens=NEW, bad_words=[chr(letter)])[0].token_ids
    assert letter not in banned
    expected = solo(model, PROMPTS[0], max_new_tokens=NEW, bad_words_ids=[[letter], [32, letter]])
    assert_equal_tokens(banned, expected)
    with pytest.raises(RequestError, match="tokenizer"):
        _engine().add_request(PROMPTS[0], bad_words=["x"])


@pytest.mark.parametrize(
    ("forced", "stop", "text"),
    [
        ("beta gamma and", "beta gamma", "beta gamma"),
        ("in Paris now", "Pari", "in Paris"),
        ("abcdef", "cd", "abcd"),
    ],
)
def test_a_stop_string_is_found_across_and_inside_tokens(forced: str, stop: str, text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(forced, add_special_tokens=False)["input_ids"]

    class Forces(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            out = torch.full_like(scores, float("-inf"))
            out[:, ids[input_ids.shape[1] - len(PROMPTS[0])]] = 0
            return out

    engine = PagedEngine(build("llama"), PagedConfig(num_blocks=64), tokenizer=tokenizer)
    output = engine.generate(
        [PROMPTS[0]], max_new_tokens=len(ids), stop_strings=[stop, "never"], logits_processor=[Forces()]
    )[0]
    assert tokenizer.decode(output.token_ids) == text
    assert output.finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop


def test_a_toy_model_takes_a_toy_pool() -> None:
    model = copy.deepcopy(build("llama"))
    model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW, cache_implementation="paged")
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["pool_bytes"] < 2**20


def test_processors_that_a_request_brings_are_its_own() -> None:
    engine = _engine()
    greedy = solo(build("llama"), PROMPTS[0], max_new_tokens=NEW)
    banned = [greedy[0], greedy[1]]
    ids = [
        engine.add_request(PROMPTS[0], max_new_tokens=NEW, logits_processor=[SuppressTokensLogitsProcessor([token])])
        for token in banned
    ]
    final: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        final.update({output.request_id: output for output in engine.step()})
    for token, request_id in zip(banned, ids, strict=True):
        expected = solo(build("llama"), PROMPTS[0], max_new_tokens=NEW, suppress_tokens=[token])
        assert_equal_tokens(final[request_id].token_ids, expected)


def test_steps_in_and_out_of_inference_mode_mix() -> None:
    engine = _engine()
    request_id = engine.add_request(PROMPTS[0], max_new_tokens=20, repetition_penalty=1.3, min_new_tokens=2)
    tokens: tuple[int, ...] = ()
    turn = 0
    while engine.has_unfinished_requests:
        turn += 1
        with torch.inference_mode(turn % 2 == 1):
            tokens = next(output.token_ids for output in engine.step() if output.request_id == request_id)
    assert_equal_tokens(tokens, solo(build("llama"), PROMPTS[0], max_new_tokens=20, repetition_penalty=1.3))


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    prompt = [*PROMPTS[1], *PROMPTS[2], *PROMPTS[3]][:30]
    engine = _engine(num_blocks=9, max_batch_tokens=8, enable_prefix_caching=False)
    for other in PROMPTS[:2]:
        engine.add_request([*other, 1, 2, 3][:12], max_new_tokens=20)
    engine.step()
    engine.step()
    request_id = engine.add_request(prompt, max_new_tokens=2, prompt_logprobs=0)
    final: dict[str, Any] = {}
    preempted = 0
    for step in range(400):
        final.update({output.request_id: output for output in engine.step()})
        running = [s for s in engine.core.scheduler.running if s.request.request_id == request_id]
        if running and 0 < running[0].num_computed_tokens < 28 and step % 3 == 0 and preempted < 3:
            engine.core.scheduler.preempt(running[0])
            preempted += 1
        engine.check()
        if not engine.has_unfinished_requests:
            break
    assert preempted == 3
    with torch.no_grad():
        expected = build("llama")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    logprobs = final[request_id].prompt_logprobs
    assert [None if entry is None else entry.token_id for entry in logprobs] == [None, *prompt[1:]]
    for position, entry in enumerate(logprobs[1:], start=1):
        assert entry.logprob == pytest.approx(expected[position - 1, prompt[position]].item(), abs=1e-4)


def test_presence_and_frequency_penalties_count_the_output_alone_as_computed_by_hand() -> None:
    model = build("llama")
    prompt = [*PROMPTS[1], *solo(model, PROMPTS[1], max_new_tokens=3)]  # its next tokens are in the prompt already
    for presence, frequency in ((2.0, 0.0), (0.0, 1.5), (1.0, 1.0), (-1.0, 0.5)):
        tokens: list[int] = []
        for _ in range(NEW):
            with torch.no_grad():
                scores = model(torch.tensor([prompt + tokens])).logits[0, -1]
            for token in set(tokens):
                scores[token] -= presence + frequency * tokens.count(token)
            tokens.append(int(scores.argmax()))
        output = _engine().generate(
            [prompt], max_new_tokens=NEW, presence_penalty=presence, frequency_penalty=frequency
        )[0]
        assert_equal_tokens(output.token_ids, tokens)
    with pytest.raises(RequestError, match="presence_penalty must be"):
        _engine().add_request(prompt, presence_penalty=3)
