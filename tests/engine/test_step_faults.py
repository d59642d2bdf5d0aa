"""Something breaks at each point of a step: what every request then saw, and that the pool is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from hf_paged import PagedConfig, PagedEngine, get_engine
from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.step_cache import StepCache
from hf_paged.engine import core
from hf_paged.engine.model_runner import ModelRunner
from tests.oracle import assert_equal_batches, assert_equal_tokens, ragged_prompts, solo
from tests.zoo import build, fresh

NEW = 10
PROMPTS = ragged_prompts(5, seed=71, shortest=4, longest=24)


def _breaks(real: Callable[..., Any], calls: list[int], at: int, error: BaseException) -> Callable[..., Any]:
    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise error
        return real(*args, **kwargs)

    return broken


STAGES: dict[str, tuple[Any, str]] = {
    "schedule, a prefix": (BlockAllocator, "find_prefix"),
    "schedule, blocks": (BlockAllocator, "allocate"),
    "copies": (StepCache, "copy_blocks"),
    "after the forward": (BlockAllocator, "commit"),
    "sampling": (core, "choose"),
    "stopping": (core, "token_logprobs"),
}


@pytest.mark.parametrize("at", [1, 3, 7])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_breaks_raises_and_loses_nothing(
    stage: str, error: BaseException, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = PagedEngine(build("llama"), PagedConfig(num_blocks=64)).generate(
        [PROMPTS[0]], max_new_tokens=NEW, do_sample=True, seed=1, num_return_sequences=2
    )[0]
    engine = PagedEngine(build("llama"), PagedConfig(block_size=8, num_blocks=24, max_batch_tokens=24))
    ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    twins = engine.add_request(
        PROMPTS[0], max_new_tokens=NEW, do_sample=True, seed=1, num_return_sequences=2, prompt_logprobs=0
    )
    calls: list[int] = []
    owner, name = STAGES[stage]
    monkeypatch.setattr(owner, name, _breaks(getattr(owner, name), calls, at, error))
    final: dict[str, Any] = {}
    raised = 0
    for _ in range(500):
        try:
            outputs = engine.step()
        except type(error):
            raised += 1
            engine.check()
            continue
        engine.check()
        final.update({output.request_id: output for output in outputs if output.finished})
        if not engine.has_unfinished_requests:
            break
    assert raised == (len(calls) >= at)
    assert set(final) == {*ids, twins}
    for prompt, request_id in zip(PROMPTS, ids, strict=True):
        assert_equal_tokens(final[request_id].token_ids, solo(build("llama"), prompt, max_new_tokens=NEW))
    for sequence, expected in zip(final[twins].outputs, alone.outputs, strict=True):
        assert len(sequence.token_ids) == NEW
        if stage not in ("sampling", "stopping"):  # a draw that was lost there is drawn again
            assert_equal_tokens(sequence.token_ids, expected.token_ids)
    assert len(final[twins].prompt_logprobs) == len(PROMPTS[0])
    stats = engine.stats()
    assert stats["free_blocks"] == stats["num_blocks"]


@pytest.mark.parametrize("at", [1, 4])
def test_a_forward_that_breaks_once_is_tried_again_a_sequence_at_a_time(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PagedEngine(build("llama"), PagedConfig(block_size=8, num_blocks=64))
    ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    calls: list[int] = []
    broken = _breaks(ModelRunner.run, calls, at, torch.OutOfMemoryError("no memory"))
    monkeypatch.setattr(ModelRunner, "run", broken)
    final: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        final.update({output.request_id: output for output in engine.step()})
        engine.check()
    for prompt, request_id in zip(PROMPTS, ids, strict=True):
        assert_equal_tokens(final[request_id].token_ids, solo(build("llama"), prompt, max_new_tokens=NEW))
    assert len(calls) == NEW + len(PROMPTS)


class _BreakingStreamer(BaseStreamer):
    def __init__(self, after: int) -> None:
        self.after = after

    def put(self, value: torch.Tensor) -> None:
        self.after -= 1
        if self.after < 0:
            raise ConnectionError("nobody listens")

    def end(self) -> None:
        """Nothing to flush."""


@pytest.mark.parametrize("after", [1, 3])
def test_a_streamer_that_raises_ends_its_call_and_the_next_is_right(after: int) -> None:
    model = fresh("llama")
    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(ConnectionError, match="nobody listens"):
        model.generate(
            ids, max_new_tokens=NEW, do_sample=False, streamer=_BreakingStreamer(after), cache_implementation="paged"
        )
    engine = get_engine(model)
    assert engine is not None
    engine.check()
    assert engine.stats()["num_running"] == 0
    assert_equal_batches(
        model.generate(ids, max_new_tokens=NEW, do_sample=False, cache_implementation="paged"),
        model.generate(ids, max_new_tokens=NEW, do_sample=False),
    )
