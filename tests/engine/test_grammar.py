"""Grammars: what a request asks for in a regular expression, a JSON schema or EBNF is what it gets."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from hf_paged import GrammarProcessor, PagedConfig, PagedEngine, get_engine
from hf_paged.errors import GenerationFailedError, RequestError
from tests.oracle import assert_equal_batches, assert_equal_tokens, left_pad, ragged_prompts, solo
from tests.tiny_tokenizer import tiny_tokenizer
from tests.zoo import PAD_TOKEN_ID, build, fresh

pytest.importorskip("xgrammar", reason="xgrammar is not installed on this platform")

PROMPTS = ragged_prompts(6, seed=31, shortest=2, longest=30)
REGEX = r"([a-z][0-9]){8,12}!"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}
EBNF = 'root ::= item ("," item)*\nitem ::= "yes" | "no" | "(" root ")"\n'


def _engine(**config: Any) -> PagedEngine:
    settings = PagedConfig(**{"block_size": 8, "num_blocks": 128, **config})
    return PagedEngine(build("llama"), settings, tokenizer=tiny_tokenizer())


def _text(token_ids: Any) -> str:
    return str(tiny_tokenizer().decode(token_ids, skip_special_tokens=True))


def _run(engine: PagedEngine) -> dict[str, Any]:
    final: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        final.update({output.request_id: output for output in engine.step()})
        engine.check()
    return final


@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 1.5, "seed": 4}, {"repetition_penalty": 2.0}]
)
def test_a_request_matches_its_grammar_and_ends_with_it(sampling: dict[str, Any]) -> None:
    engine = _engine()
    matching, as_json = (
        engine.generate(PROMPTS, max_new_tokens=60, **sampling, **rule)
        for rule in ({"regex": REGEX}, {"json_schema": SCHEMA})
    )
    for output in matching:
        assert re.fullmatch(REGEX, _text(output.token_ids))
        assert output.finish_reason == "stop"
    for output in as_json:
        found = json.loads(_text(output.token_ids))
        assert set(found) == {"name", "age"}
        assert isinstance(found["name"], str)
        assert 0 <= found["age"] <= 99


def test_every_kind_of_grammar_beside_requests_without_one() -> None:
    engine = _engine()
    kinds: list[dict[str, Any]] = [
        {"regex": "[0-9]{3}"},
        {"json_schema": json.dumps(SCHEMA)},
        {"ebnf": EBNF},
        {},
        {"regex": "be+ta"},
    ]
    ids = [engine.add_request(PROMPTS[i], max_new_tokens=40, **kind) for i, kind in enumerate(kinds)]
    final = _run(engine)
    texts = [_text(final[request_id].token_ids) for request_id in ids]
    assert re.fullmatch("[0-9]{3}", texts[0])
    assert json.loads(texts[1])["age"] < 100
    assert re.match(r"[(]*(yes|no)", texts[2])
    assert_equal_tokens(final[ids[3]].token_ids, solo(build("llama"), PROMPTS[3], max_new_tokens=40))
    assert re.fullmatch("be+ta", texts[4])


def test_one_grammar_a_prompt() -> None:
    rules = [f"{letter}{{5}}" for letter in "abcdef"]
    outputs = _engine().generate(PROMPTS, max_new_tokens=20, regex=rules)
    assert [_text(output.token_ids) for output in outputs] == [letter * 5 for letter in "abcdef"]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 3}])
def test_a_grammar_goes_on_after_preemption(sampling: dict[str, Any]) -> None:
    roomy, small = _engine(), _engine(num_blocks=8, max_batch_tokens=16)
    rules = [{"regex": REGEX}, {"json_schema": SCHEMA}] * 3
    texts = []
    for engine in (roomy, small):
        ids = [
            engine.add_request(prompt, max_new_tokens=32, **sampling, **rule)
            for prompt, rule in zip(PROMPTS, rules, strict=True)
        ]
        final = _run(engine)
        texts.append([_text(final[request_id].token_ids) for request_id in ids])
    assert roomy.stats()["num_preemptions"] == 0
    assert small.stats()["num_preemptions"] > 0
    assert texts[0] == texts[1]
    for text, rule in zip(texts[1], rules, strict=True):
        assert re.fullmatch(REGEX, text) if "regex" in rule else json.loads(text)["name"] is not None


def test_every_sequence_of_a_request_matches() -> None:
    engine = _engine(num_blocks=12)
    output = engine.generate(
        [PROMPTS[1]], max_new_tokens=30, regex=REGEX, do_sample=True, seed=1, num_return_sequences=5
    )[0]
    texts = [_text(sequence.token_ids) for sequence in output.outputs]
    assert len(set(texts)) == 5
    assert all(re.fullmatch(REGEX, text) for text in texts)


def test_the_models_own_end_tokens_end_the_text() -> None:
    model = fresh("llama")
    model.generation_config.eos_token_id = [2, 11]
    engine = PagedEngine(model, PagedConfig(num_blocks=64), tokenizer=tiny_tokenizer())
    for output in engine.generate(PROMPTS, max_new_tokens=20, regex="[a-c]{2,4}"):
        assert output.outputs[0].stop_reason in (2, 11)
        assert re.fullmatch("[a-c]{2,4}", _text(output.token_ids[:-1]))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"regex": "[0-9"}, "regex.*Unclosed"),
        ({"regex": 5}, "regex must be a string"),
        ({"json_schema": {"type": "nope"}}, "json_schema.*nope"),
        ({"json_schema": '{"typ'}, "json_schema.*JSON"),
        ({"json_schema": {"a": {1}}}, "json_schema"),
        ({"ebnf": "root ::= foo"}, "ebnf.*foo"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf and regex|regex and ebnf"),
    ],
)
def test_a_bad_grammar_is_refused_when_it_is_added(keywords: dict[str, Any], message: str) -> None:
    engine = _engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request(PROMPTS[0], **keywords)
    assert not engine.has_unfinished_requests


def test_a_grammar_needs_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        PagedEngine(build("llama"), PagedConfig(num_blocks=16)).add_request(PROMPTS[0], regex="a")


def test_without_xgrammar_a_grammar_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"hf-paged\[grammar\]"):
        _engine().add_request(PROMPTS[0], regex="a")
    assert len(_engine().generate([PROMPTS[0]], max_new_tokens=3)[0].token_ids) == 3


class _Forces(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(scores, float("-inf"))
        out[:, 65] = 0
        return out


@pytest.mark.parametrize(
    ("keywords", "message"),
    [({"logits_processor": [_Forces()], "regex": "b+"}, "Token 65"), ({"regex": "bé"}, "no token")],
)
def test_a_request_that_can_not_follow_its_grammar_fails_alone(keywords: dict[str, Any], message: str) -> None:
    engine = _engine()
    lost = engine.add_request(PROMPTS[0], max_new_tokens=8, **keywords)
    others = [engine.add_request(prompt, max_new_tokens=8) for prompt in PROMPTS[1:3]]
    final = _run(engine)
    assert final[lost].finish_reason == "error"
    assert re.search(message, str(final[lost].error))
    for prompt, request_id in zip(PROMPTS[1:3], others, strict=True):
        assert_equal_tokens(final[request_id].token_ids, solo(build("llama"), prompt, max_new_tokens=8))
    with pytest.raises(GenerationFailedError, match=message):
        engine.generate([PROMPTS[0]], max_new_tokens=8, **keywords)


# -- in generate -----------------------------------------------------------------------------------------------------

IDS, MASK = left_pad(PROMPTS)
OPTIONS: dict[str, Any] = {
    "attention_mask": MASK,
    "max_new_tokens": 30,
    "pad_token_id": PAD_TOKEN_ID,
    "eos_token_id": 2,
    "do_sample": False,
}


def _both(model: Any, ids: torch.Tensor = IDS, **options: Any) -> tuple[Any, Any]:
    results = []
    for more in ({}, {"cache_implementation": "paged"}):
        torch.manual_seed(5)
        processor = GrammarProcessor(tiny_tokenizer(), regex=REGEX)
        results.append(model.generate(ids, **{**OPTIONS, **options}, **more, logits_processor=[processor]))
    return results[0], results[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "num_return_sequences": 2},
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True},
        {"cache_config": {"num_blocks": 6, "block_size": 16}},
        {"cache_config": {"num_blocks": 6, "block_size": 16}, "do_sample": True},
    ],
    ids=str,
)
def test_generate_keeps_all_rows_in_the_grammar(options: dict[str, Any]) -> None:
    model = fresh("llama")
    config = {key: options.pop(key) for key in ("cache_config",) if key in options}
    stock, _ = _both(model, **options)
    torch.manual_seed(5)
    paged = model.generate(
        IDS,
        **{**OPTIONS, **options},
        **config,
        cache_implementation="paged",
        logits_processor=[GrammarProcessor(tiny_tokenizer(), regex=REGEX)],
    )
    for row in paged[:, IDS.shape[1] :].tolist():
        assert re.fullmatch(REGEX, _text(row))
    if not (config and options):  # rows that come and go draw from generators of their own
        assert_equal_batches(paged, stock)
    if config:
        engine = get_engine(model)
        assert engine is not None
        assert engine.stats()["num_preemptions"] > 0


def test_prompt_lookup_stays_in_the_grammar() -> None:
    stock, paged = _both(fresh("llama"), IDS[:1], prompt_lookup_num_tokens=3, attention_mask=MASK[:1])
    assert re.fullmatch(REGEX, _text(paged[0, IDS.shape[1] :].tolist()))
    assert_equal_batches(paged, stock)


@pytest.mark.parametrize("num_blocks", [128, 14])
def test_drafts_from_the_text_itself_stay_in_the_grammar(num_blocks: int) -> None:
    rule = {"regex": r"(ab[0-9]){9,14}!", "max_new_tokens": 60}  # repeats itself, so that drafts are found and stand
    expected = _engine().generate(PROMPTS, **rule)
    engine = _engine(num_blocks=num_blocks)
    found = engine.generate(PROMPTS, prompt_lookup_num_tokens=4, max_matching_ngram_size=2, **rule)
    for output, alone in zip(found, expected, strict=True):
        assert_equal_tokens(output.token_ids, alone.token_ids)
        assert re.fullmatch(rule["regex"], _text(output.token_ids))  # type: ignore[call-overload]
    assert engine.stats()["num_accepted_tokens"] > 0
    assert (engine.stats()["num_preemptions"] > 0) == (num_blocks == 14)
    engine.check()


def test_a_processor_may_be_used_again() -> None:
    model, processor = fresh("llama"), GrammarProcessor(tiny_tokenizer(), regex=REGEX)
    for more in ({}, {"cache_implementation": "paged"}):
        for ids in (IDS, IDS[:, -5:], IDS):
            mask = torch.ones_like(ids)
            out = model.generate(ids, **{**OPTIONS, "attention_mask": mask}, **more, logits_processor=[processor])
            assert all(re.fullmatch(REGEX, _text(row)) for row in out[:, ids.shape[1] :].tolist())
