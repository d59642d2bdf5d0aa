"""What one request does ends that request alone, once, with a reason; the others' tokens are those of solo runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from hf_paged import PagedConfig, PagedEngine, RequestOutput
from hf_paged.engine import core
from hf_paged.errors import CapacityError, EngineClosedError, GenerationFailedError, RequestError, UnknownRequestError
from tests.oracle import assert_equal_tokens, ragged_prompts, random_prompt, solo
from tests.zoo import VOCAB_SIZE, build

NEW = 8
PROMPTS = ragged_prompts(4, seed=11, shortest=3, longest=20)


def _engine(**config: Any) -> PagedEngine:
    return PagedEngine(build("llama"), PagedConfig(**{"block_size": 8, "num_blocks": 64, **config}))


def _run(engine: PagedEngine) -> dict[str, list[RequestOutput]]:
    """Drives the engine until idle; every output of every request, in order."""
    seen: dict[str, list[RequestOutput]] = {}
    for _ in range(2_000):
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)
        engine.check()
        if not engine.has_unfinished_requests:
            return seen
    raise AssertionError("the engine did not come to rest")


def _add_all(engine: PagedEngine) -> list[str]:
    return [engine.add_request(prompt, max_new_tokens=NEW) for prompt in PROMPTS]


def _assert_others_right(engine: PagedEngine, ids: list[str], seen: dict[str, list[RequestOutput]]) -> None:
    for prompt, request_id in zip(PROMPTS, ids, strict=True):
        assert_equal_tokens(seen[request_id][-1].token_ids, solo(build("llama"), prompt, max_new_tokens=NEW))
    engine.check()
    stats = engine.stats()
    assert stats["free_blocks"] == stats["num_blocks"]
    assert stats["num_running"] == stats["num_waiting"] == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "cannot be empty"),
        ([VOCAB_SIZE], f"0 to {VOCAB_SIZE - 1}"),
        ([3, -1], f"0 to {VOCAB_SIZE - 1}"),
        (torch.ones(2, 3, dtype=torch.int64), "one row of token ids"),
        ("text", "needs a tokenizer"),
    ],
)
def test_a_malformed_prompt_is_refused_and_harms_nobody(prompt: Any, message: str) -> None:
    engine = _engine()
    ids = _add_all(engine)
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, max_new_tokens=NEW)
    _assert_others_right(engine, ids, _run(engine))


def test_a_malformed_prompt_stops_a_call_before_any_of_it_runs() -> None:
    engine = _engine()
    with pytest.raises(RequestError, match="cannot be empty"):
        engine.generate([PROMPTS[0], []], max_new_tokens=NEW)
    assert engine.stats()["num_steps"] == 0
    assert not engine.has_unfinished_requests


def test_a_prompt_that_can_never_fit_is_refused_with_what_would() -> None:
    engine = _engine(num_blocks=4)  # 32 tokens
    with pytest.raises(CapacityError, match="at most 13 new tokens fit"):
        engine.add_request(random_prompt(20, 1), max_new_tokens=14)
    assert_equal_tokens(
        engine.generate([random_prompt(20, 1)], max_new_tokens=13)[0].token_ids,
        solo(build("llama"), random_prompt(20, 1), max_new_tokens=13),
    )


def test_a_large_request_waits_for_room_and_is_right() -> None:
    engine = _engine(num_blocks=8)
    large = random_prompt(50, 2)
    ids = [engine.add_request(large, max_new_tokens=NEW), *_add_all(engine)]
    seen = _run(engine)
    assert_equal_tokens(seen[ids[0]][-1].token_ids, solo(build("llama"), large, max_new_tokens=NEW))
    _assert_others_right(engine, ids[1:], seen)


def test_positions_past_the_models_table_are_refused() -> None:
    model = build("gpt2")
    limit = model.config.n_positions
    engine = PagedEngine(model, PagedConfig(num_blocks=2 * limit // 16))
    with pytest.raises(CapacityError, match="positions; at most 5 new tokens"):
        engine.add_request(random_prompt(limit - 4, 3), max_new_tokens=6)
    prompt = random_prompt(limit - 4, 3)
    output = engine.generate([prompt], max_new_tokens=5)[0]
    assert_equal_tokens(output.token_ids, solo(model, prompt, max_new_tokens=5))


def test_a_full_queue_refuses_the_next_request() -> None:
    engine = _engine(max_queue_size=4)
    ids = _add_all(engine)
    with pytest.raises(CapacityError, match="max_queue_size"):
        engine.add_request([1, 2], max_new_tokens=1)
    _assert_others_right(engine, ids, _run(engine))


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = _engine()
    engine.add_request(PROMPTS[0], max_new_tokens=NEW, request_id="mine")
    with pytest.raises(RequestError, match="'mine'"):
        engine.add_request(PROMPTS[1], max_new_tokens=NEW, request_id="mine")
    assert len(_run(engine)["mine"]) == NEW
    assert engine.add_request(PROMPTS[1], max_new_tokens=1, request_id="mine") == "mine"


class _Raises(LogitsProcessor):
    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.after -= 1
        if self.after < 0:
            raise LookupError("a processor of one's own")
        return scores


class _RaisingCriterion(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        raise LookupError("a criterion of one's own")


class _AllMinusInfinity(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, float("nan"))


@pytest.mark.parametrize(
    ("keywords", "error", "num_tokens"),
    [
        ({"logits_processor": [_Raises(after=0)]}, LookupError, 0),
        ({"logits_processor": [_Raises(after=3)]}, LookupError, 3),
        ({"stopping_criteria": [_RaisingCriterion()]}, LookupError, 1),
        ({"logits_processor": [_AllMinusInfinity()], "do_sample": True, "seed": 1}, ArithmeticError, 0),
    ],
    ids=["processor at once", "processor later", "criterion", "no probability left"],
)
def test_what_a_request_brings_and_raises_ends_that_request(
    keywords: dict[str, Any], error: type[Exception], num_tokens: int
) -> None:
    engine = _engine()
    ids = _add_all(engine)
    bad = engine.add_request(PROMPTS[1], max_new_tokens=NEW, **keywords)
    seen = _run(engine)
    final = [output for output in seen[bad] if output.finished]
    assert len(final) == 1
    assert final[0].finish_reason == "error"
    assert isinstance(final[0].error, error)
    assert len(final[0].token_ids) == num_tokens
    _assert_others_right(engine, ids, seen)


def test_a_call_with_a_failing_request_raises_and_holds_everyones_output() -> None:
    engine = _engine()
    with pytest.raises(GenerationFailedError, match="LookupError") as caught:
        engine.generate(PROMPTS[:2], max_new_tokens=NEW, stopping_criteria=[_RaisingCriterion()])
    assert [output.finish_reason for output in caught.value.outputs] == ["error", "error"]
    assert isinstance(caught.value.__cause__, LookupError)
    assert_equal_tokens(
        engine.generate(PROMPTS[:1], max_new_tokens=NEW)[0].token_ids,
        solo(build("llama"), PROMPTS[0], max_new_tokens=NEW),
    )


class _FailsFor:
    """A forward hook that fails, or spoils the logits, whenever a marked token is among the inputs."""

    def __init__(self, token: int, error: Exception | None) -> None:
        self.token, self.error = token, error

    def before(self, module: Any, args: Any, kwargs: Any) -> None:
        if self.error is not None and bool((kwargs["input_ids"] == self.token).any()):
            raise self.error

    def after(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        # the marked request's rows only: its prompt is one token long, the token itself
        if self.error is None and kwargs["input_ids"].shape[1] > 1:
            ids = kwargs["input_ids"][0]
            rows = ids[kwargs["logits_to_keep"]] == self.token
            output.logits[0, rows] = float("nan")
        return output


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("a bad kernel")])
def test_a_forward_that_fails_for_one_request_spares_the_others(error: Exception) -> None:
    model = build("llama", seed=5)
    marked = VOCAB_SIZE - 1
    engine = PagedEngine(model, PagedConfig(block_size=8, num_blocks=64))
    prompts = [[token for token in prompt if token != marked] for prompt in PROMPTS]
    expected = [solo(model, prompt, max_new_tokens=NEW) for prompt in prompts]
    assert all(marked not in tokens for tokens in expected), "choose another marked token"
    hook = _FailsFor(marked, error)
    handle = model.register_forward_pre_hook(hook.before, with_kwargs=True)
    try:
        ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in prompts]
        bad = engine.add_request([5, marked, 6], max_new_tokens=NEW)
        seen = _run(engine)
    finally:
        handle.remove()
    assert [output.finish_reason for output in seen[bad]] == ["error"]
    assert seen[bad][0].error is error
    for tokens, request_id in zip(expected, ids, strict=True):
        assert_equal_tokens(seen[request_id][-1].token_ids, tokens)
    assert engine.stats()["free_blocks"] == 64


def test_nan_logits_end_their_request_alone() -> None:
    model = build("llama", seed=6)
    marked = VOCAB_SIZE - 1
    engine = PagedEngine(model, PagedConfig(block_size=8, num_blocks=64))
    prompts = [[*[token for token in prompt if token != marked], 7] for prompt in PROMPTS]
    expected = [solo(model, prompt, max_new_tokens=NEW) for prompt in prompts]
    assert all(marked not in tokens for tokens in expected), "choose another marked token"
    handle = model.register_forward_hook(_FailsFor(marked, None).after, with_kwargs=True)
    try:
        ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in prompts]
        bad = engine.add_request([marked], max_new_tokens=NEW)
        seen = _run(engine)
    finally:
        handle.remove()
    assert [output.finish_reason for output in seen[bad]] == ["error"]
    assert "NaN" in str(seen[bad][0].error)
    for tokens, request_id in zip(expected, ids, strict=True):
        assert_equal_tokens(seen[request_id][-1].token_ids, tokens)


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_an_abort_at_any_moment_gives_one_final_output_and_the_blocks_back(steps_before: int) -> None:
    engine = _engine(max_batch_tokens=8)
    ids = _add_all(engine)
    leaving = engine.add_request(random_prompt(30, 4), max_new_tokens=20, num_return_sequences=2, do_sample=True)
    seen: dict[str, list[RequestOutput]] = {}
    for _ in range(steps_before):
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)
    engine.abort(leaving)
    engine.check()
    for request_id, outputs in _run(engine).items():
        seen.setdefault(request_id, []).extend(outputs)
    final = [output for output in seen[leaving] if output.finished]
    assert len(final) == 1
    assert {sequence.finish_reason for sequence in final[0].outputs} == {"abort"}
    with pytest.raises(UnknownRequestError, match=leaving):
        engine.abort(leaving)
    _assert_others_right(engine, ids, seen)


def test_leaving_a_stream_aborts_its_request() -> None:
    engine = _engine()
    stream = engine.stream(PROMPTS[0], max_new_tokens=50)
    assert len(next(stream).token_ids) == 1
    stream.close()
    stats = engine.stats()
    assert not engine.has_unfinished_requests
    assert (stats["num_running"], stats["free_blocks"]) == (0, 64)
    engine.check()


def test_an_abort_from_inside_a_processor_is_served() -> None:
    engine = _engine()
    ids = _add_all(engine)

    class AbortsItself(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 5:
                engine.abort("suicidal")
            return scores

    engine.add_request([1, 2, 3], max_new_tokens=NEW, request_id="suicidal", logits_processor=[AbortsItself()])
    seen = _run(engine)
    assert seen["suicidal"][-1].finish_reason == "abort"
    assert len(seen["suicidal"][-1].token_ids) == 2
    _assert_others_right(engine, ids, seen)


def test_an_interrupted_step_is_done_again() -> None:
    model = build("llama", seed=7)
    engine = PagedEngine(model, PagedConfig(block_size=8, num_blocks=64))
    expected = [solo(model, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    engine.step()
    engine.step()

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    handle.remove()
    engine.check()
    assert model.config._attn_implementation == "sdpa"
    seen = _run(engine)
    for tokens, request_id in zip(expected, ids, strict=True):
        assert_equal_tokens(seen[request_id][-1].token_ids, tokens)


def test_a_closed_engine_refuses_and_ends_what_ran() -> None:
    engine = _engine()
    outputs: list[RequestOutput] = []
    errors: list[BaseException] = []
    started = threading.Event()

    def consume() -> None:
        try:
            for output in engine.stream(PROMPTS[0], max_new_tokens=200):
                outputs.append(output)
                started.set()
        except EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    assert started.wait(20)
    engine.close()
    thread.join(20)
    assert not thread.is_alive()
    assert outputs[-1].finish_reason == "abort" or errors
    for call in (lambda: engine.add_request([1]), engine.step, lambda: engine.generate([[1]])):
        with pytest.raises(EngineClosedError, match="make a new"):
            call()
    engine.close()


def test_two_calls_on_one_engine_both_complete() -> None:
    engine = _engine()
    for _ in range(2):
        outputs = engine.generate(PROMPTS, max_new_tokens=NEW)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert_equal_tokens(output.token_ids, solo(build("llama"), prompt, max_new_tokens=NEW))
    assert engine.generate([], max_new_tokens=NEW) == []


def test_parameters_belong_to_their_request() -> None:
    engine = _engine()
    cold = engine.add_request(PROMPTS[0], max_new_tokens=NEW, temperature=0)
    hot = engine.add_request(PROMPTS[0], max_new_tokens=NEW, do_sample=True, temperature=1.5, seed=3)
    other = engine.add_request(PROMPTS[0], max_new_tokens=NEW, do_sample=True, temperature=1.5, seed=4)
    penalised = engine.add_request(PROMPTS[0], max_new_tokens=NEW, repetition_penalty=1.7)
    seen = _run(engine)
    model = build("llama")
    assert_equal_tokens(seen[cold][-1].token_ids, solo(model, PROMPTS[0], max_new_tokens=NEW))
    assert_equal_tokens(
        seen[penalised][-1].token_ids, solo(model, PROMPTS[0], max_new_tokens=NEW, repetition_penalty=1.7)
    )
    assert seen[hot][-1].token_ids != seen[other][-1].token_ids


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_breaks_while_tokens_are_chosen_is_done_again(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine()
    ids = _add_all(engine)
    twins = engine.add_request(PROMPTS[0], max_new_tokens=NEW, do_sample=True, seed=1, num_return_sequences=2)
    real = core.choose
    calls = 0

    def breaks_once(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:  # where the twins have just been born
            raise error
        return real(*args)

    monkeypatch.setattr(core, "choose", breaks_once)
    with pytest.raises(error):
        engine.step()
    engine.check()
    seen = _run(engine)
    assert [len(sequence.token_ids) for sequence in seen[twins][-1].outputs] == [NEW, NEW]
    _assert_others_right(engine, ids, seen)


@pytest.mark.parametrize(
    "keywords",
    [{"cache_salt": ["x"]}, {"priority": "high"}, {"priority": 1.5}, {"max_new_tokens": 2.5}, {"max_new_tokens": True}],
    ids=str,
)
def test_a_keyword_of_the_wrong_type_is_refused_and_harms_nobody(keywords: dict[str, Any]) -> None:
    engine = _engine()
    ids = _add_all(engine)
    with pytest.raises(RequestError, match=f"{next(iter(keywords))} must be"):
        engine.add_request(PROMPTS[0], **{"max_new_tokens": NEW, **keywords})
    _assert_others_right(engine, ids, _run(engine))


@pytest.mark.parametrize("prompt", [[1.5, 2.5], [True, False], None, ["a"], {}, [[1], [2, 3]]], ids=str)
def test_a_prompt_that_is_no_list_of_integers_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError):
        _engine().add_request(prompt, max_new_tokens=NEW)


def test_outputs_wait_for_the_caller_of_step_while_others_drive_the_loop() -> None:
    engine = _engine()
    mine = engine.add_request(PROMPTS[0], max_new_tokens=2)
    engine.generate([PROMPTS[1]], max_new_tokens=NEW)
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs[mine].finished
    assert_equal_tokens(outputs[mine].token_ids, solo(build("llama"), PROMPTS[0], max_new_tokens=2))
    assert engine.step() == []


def test_ids_of_ones_own_never_collide_with_made_ones() -> None:
    engine = _engine()
    own = engine.add_request(PROMPTS[0], max_new_tokens=NEW, request_id="request-0")
    made = engine.add_request(PROMPTS[1], max_new_tokens=NEW)
    assert own != made
    assert set(_run(engine)) == {own, made}


def test_a_stream_that_is_left_inside_a_step_ends_with_that_step() -> None:
    engine = _engine()
    ids = _add_all(engine)
    stream = engine.stream(random_prompt(9, 8), max_new_tokens=50)
    next(stream)

    class LeavesTheStream(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            stream.close()
            return scores

    last = engine.add_request([1, 2, 3], max_new_tokens=NEW, logits_processor=[LeavesTheStream()])
    seen = _run(engine)
    assert len(seen[last][-1].token_ids) == NEW
    assert engine.stats()["num_aborted"] == 1
    _assert_others_right(engine, ids, seen)
