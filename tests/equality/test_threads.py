"""Engines and threads: two models in one process, and two threads on one model, each with the right tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedEngine
from tests import zoo
from tests.equality.drive import pool_of_2048, run_to_end, tokens_of
from tests.oracle import Ids, assert_equal_tokens, assert_rows_equal_solo, left_pad, ragged_prompts, solo

NEW = 10
SECONDS = 60  # a deadlock fails instead of hanging
PROMPTS = [ragged_prompts(4, seed=81, longest=40), ragged_prompts(4, seed=82, longest=40)]


def _in_threads(*tasks: Callable[[], Any]) -> list[Any]:
    """Runs the tasks at the same time, starting together; their results in order."""
    start = threading.Barrier(len(tasks))

    def run(task: Callable[[], Any]) -> Any:
        start.wait(SECONDS)
        return task()

    pool = ThreadPoolExecutor(len(tasks))
    try:
        return [future.result(SECONDS) for future in [pool.submit(run, task) for task in tasks]]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _remember_solo_runs(names: tuple[str, ...]) -> None:
    for name in names:
        for ids in PROMPTS[0] + PROMPTS[1]:
            solo(zoo.build(name), ids, max_new_tokens=NEW)


def _generate(model: Any, prompts: list[Ids], **kwargs: Any) -> list[Ids]:
    ids, mask = left_pad(prompts)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, cache_implementation="paged", **kwargs
    )
    return out[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("names", [("llama", "gemma2"), ("mistral", "qwen3")])
def test_two_models_step_by_step_in_turns(names: tuple[str, str]) -> None:
    """Thread a does a step, then thread b, and so on: neither sees the other's metadata."""
    _remember_solo_runs(names)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def drive(mine: int) -> list[Ids]:
        with PagedEngine(zoo.build(names[mine]), pool_of_2048(block_size=8, max_batch_tokens=16)) as engine:
            ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in PROMPTS[mine]]
            final: dict[Any, Any] = {}
            while len(final) < len(ids):
                assert turns[mine].acquire(timeout=SECONDS)
                try:
                    final.update({out.request_id: out for out in engine.step() if out.finished})
                    engine.check()
                finally:
                    turns[1 - mine].release()
            turns[1 - mine].release(1_000)  # the other goes on alone
            return tokens_of([final[request_id] for request_id in ids])

    for mine, rows in enumerate(_in_threads(lambda: drive(0), lambda: drive(1))):
        assert_rows_equal_solo(zoo.build(names[mine]), PROMPTS[mine], rows, names[mine], max_new_tokens=NEW)


def test_two_models_inside_one_anothers_forward() -> None:
    """Both forwards are open at once: a hook in each model waits until the other is inside its own."""
    names = ("llama", "mistral")
    _remember_solo_runs(names)
    models = [zoo.fresh(name) for name in names]
    meet = threading.Barrier(2)
    met = []

    def wait(*_: Any) -> None:
        try:
            meet.wait(0.2)
            met.append(1)
        except threading.BrokenBarrierError:
            pass  # the other has ended, or is elsewhere

    for model in models:
        model.model.layers[0].mlp.register_forward_hook(wait)

    def collect(mine: int) -> list[Ids]:
        with PagedEngine(models[mine], pool_of_2048(block_size=8, max_batch_tokens=64)) as engine:
            ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in PROMPTS[mine]]
            final = run_to_end(engine, ids)
            return tokens_of([final[request_id] for request_id in ids])

    for mine, rows in enumerate(_in_threads(lambda: collect(0), lambda: collect(1))):
        assert_rows_equal_solo(zoo.build(names[mine]), PROMPTS[mine], rows, names[mine], max_new_tokens=NEW)
    assert met


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_two_threads_generate_on_one_model(name: str) -> None:
    _remember_solo_runs((name,))
    model = zoo.build(name)
    implementation = model.config._attn_implementation
    config = pool_of_2048(block_size=8, max_batch_tokens=32)
    results = _in_threads(
        *(lambda mine=mine: [_generate(model, PROMPTS[mine], cache_config=config) for _ in range(3)] for mine in (0, 1))
    )
    for mine, rounds in enumerate(results):
        for rows in rounds:
            assert_rows_equal_solo(model, PROMPTS[mine], rows, f"{name} thread {mine}", max_new_tokens=NEW)
    assert model.config._attn_implementation == implementation
    hf_paged.get_engine(model).check()


def test_a_paged_and_a_stock_thread_on_one_model() -> None:
    """Stock forwards of another thread may run while a packed step has the implementation swapped."""
    name = "llama"
    _remember_solo_runs((name,))
    model = zoo.build(name)

    def stock() -> list[Ids]:
        rows = []
        for ids in PROMPTS[1]:
            tensor = torch.tensor([ids])
            out = model.generate(tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=NEW, do_sample=False)
            rows.append(out[0, len(ids) :].tolist())
        return rows

    paged_rows, stock_rows = _in_threads(lambda: _generate(model, PROMPTS[0]), stock)
    assert_rows_equal_solo(model, PROMPTS[0], paged_rows, "paged", max_new_tokens=NEW)
    assert_rows_equal_solo(model, PROMPTS[1], stock_rows, "stock", max_new_tokens=NEW)


def test_threads_share_one_engine() -> None:
    """Any waiting caller drives the loop; each gets its own outputs."""
    name = "qwen3"
    _remember_solo_runs((name,))
    model = zoo.build(name)
    with PagedEngine(model, pool_of_2048(block_size=8, max_batch_tokens=16)) as engine:

        def stream(ids: Ids) -> list[int]:
            *_, last = engine.stream(ids, max_new_tokens=NEW)
            return list(last.token_ids)

        results = _in_threads(
            lambda: tokens_of(engine.generate(PROMPTS[0], max_new_tokens=NEW)),
            lambda: tokens_of(engine.generate(PROMPTS[1], max_new_tokens=NEW)),
            lambda: stream(PROMPTS[0][1]),
        )
        engine.check()
        assert engine.stats()["num_running"] == engine.stats()["num_waiting"] == 0
    for mine in (0, 1):
        assert_rows_equal_solo(model, PROMPTS[mine], results[mine], f"caller {mine}", max_new_tokens=NEW)
    assert_equal_tokens(results[2], solo(model, PROMPTS[0][1], max_new_tokens=NEW), "stream")
