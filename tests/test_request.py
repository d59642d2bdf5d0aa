"""Requests, sequences and their snapshots."""

from __future__ import annotations

import dataclasses

import pytest

from hf_paged.request import Request, RequestOutput, Sequence, SequenceState, TokenLogprobs


def _request(**options: object) -> Request:
    return Request("r", [1, 2, 3], 4, **options)  # type: ignore[arg-type]


def test_a_new_request_has_one_sequence_with_the_prompt() -> None:
    request = _request(num_sequences=3)
    [sequence] = request.sequences
    assert sequence.token_ids == [1, 2, 3]
    assert (sequence.num_tokens, sequence.num_computed_tokens, sequence.num_uncomputed_tokens) == (3, 0, 3)
    assert sequence.num_generated_tokens == 0
    assert sequence.state is SequenceState.WAITING
    assert not request.is_finished


def test_the_prompt_is_the_requests_own() -> None:
    ids = [1, 2, 3]
    request = Request("r", ids, 4)
    ids.append(9)
    request.sequences[0].token_ids.append(8)
    assert request.prompt_token_ids == (1, 2, 3)


def test_the_last_generated_token_is_never_computed() -> None:
    assert _request().max_computed_tokens == 6
    assert Request("r", [1, 2, 3], 1).max_computed_tokens == 3


def test_order_is_priority_then_arrival_then_index() -> None:
    first, second, urgent = _request(), _request(), _request(priority=-1)
    child = Sequence(first, 1, [1])
    by_order = sorted([child, *second.sequences, *first.sequences, *urgent.sequences], key=lambda each: each.order)
    assert by_order == [urgent.sequences[0], first.sequences[0], child, second.sequences[0]]


def test_a_snapshot_does_not_change_while_the_sequence_grows() -> None:
    request = _request(wants_logprobs=True, wants_prompt_logprobs=True)
    [sequence] = request.sequences
    request.prompt_logprobs += [None, TokenLogprobs(2, -1.0)]
    sequence.token_ids.append(7)
    sequence.logprobs.append(TokenLogprobs(7, -0.5, ((7, -0.5),)))
    before = request.snapshot()

    sequence.token_ids += [8, 9]
    sequence.logprobs += [TokenLogprobs(8, -1.0), TokenLogprobs(9, -2.0)]
    sequence.state = SequenceState.FINISHED
    sequence.finish_reason, sequence.stop_reason = "stop", 9
    request.prompt_logprobs.append(TokenLogprobs(3, -1.0))
    request.num_cached_tokens = 3
    request.first_token_time = request.finished_time = 1.0
    request.error = ValueError()

    assert before.token_ids == (7,)
    assert before.outputs[0].num_tokens == 1
    assert before.outputs[0].logprobs == (TokenLogprobs(7, -0.5, ((7, -0.5),)),)
    assert before.outputs[0].stop_reason is before.finish_reason is None
    assert before.prompt_logprobs == (None, TokenLogprobs(2, -1.0))
    assert (before.finished, before.num_cached_tokens, before.error) == (False, 0, None)
    assert before.metrics.first_token_time is before.metrics.finished_time is None

    after = request.snapshot()
    assert after.token_ids == (7, 8, 9)
    assert (after.finish_reason, after.outputs[0].stop_reason, after.finished) == ("stop", 9, True)
    assert len(after.outputs[0].logprobs or ()) == 3


def test_a_snapshot_holds_the_siblings_that_there_were() -> None:
    request = _request(num_sequences=2)
    before = request.snapshot()
    request.sequences.append(Sequence(request, 1, [1, 2, 3]))
    assert len(before.outputs) == 1
    assert [output.index for output in request.snapshot().outputs] == [0, 1]


def test_a_snapshot_can_not_be_assigned_to() -> None:
    output = _request().snapshot()
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.finished = True  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.outputs[0].finish_reason = "stop"  # type: ignore[misc]
    assert isinstance(output.token_ids, tuple)


def test_a_snapshot_copies_no_tokens() -> None:
    request = _request()
    [sequence] = request.sequences
    assert request.snapshot().outputs[0]._tokens is sequence.token_ids


def test_log_probabilities_are_absent_unless_asked_for() -> None:
    output = _request().snapshot()
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    asked = _request(wants_logprobs=True, wants_prompt_logprobs=True).snapshot()
    assert asked.prompt_logprobs == asked.outputs[0].logprobs == ()


def test_the_only_sequences_shortcuts_refuse_to_choose_among_several() -> None:
    request = _request(num_sequences=2)
    request.sequences.append(Sequence(request, 1, [1, 2, 3]))
    output: RequestOutput = request.snapshot()
    with pytest.raises(AttributeError, match=r"'r' has 2 sequences; read them in \.outputs"):
        _ = output.token_ids
    with pytest.raises(AttributeError, match="2 sequences"):
        _ = output.finish_reason


def test_a_request_is_finished_when_all_its_sequences_are() -> None:
    request = _request(num_sequences=2)
    request.sequences.append(Sequence(request, 1, [1, 2, 3]))
    request.sequences[0].state = SequenceState.FINISHED
    assert not request.is_finished
    request.sequences[1].state = SequenceState.FINISHED
    assert request.is_finished
