"""Runs an engine to its end one step at a time, and proves its invariants after each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_paged import PagedConfig, PagedEngine, RequestOutput
from tests.oracle import Ids, assert_equal_tokens


def pool_of_2048(block_size: int = 16, **options: Any) -> PagedConfig:
    """Settings with a pool that holds 2048 tokens: plenty for the tests, and small enough to be checked every step."""
    return PagedConfig(block_size=block_size, num_blocks=2048 // block_size, **options)


def run_to_end(engine: PagedEngine, waiting: Sequence[Any], limit: int = 20_000) -> dict[Any, RequestOutput]:
    """Steps until every request in `waiting` is finished; `engine.check()` after every step, and at idle.

    Returns the final output of each. Fails if `limit` steps aren't enough: no request may starve.
    """
    final: dict[Any, RequestOutput] = {}
    outstanding = set(waiting)
    for _ in range(limit):
        if not outstanding:
            engine.check()
            return final
        for output in engine.step():
            if output.finished:
                assert output.request_id not in final, "a request finished twice"
                final[output.request_id] = output
                outstanding.discard(output.request_id)
        engine.check()
    raise AssertionError(f"{len(outstanding)} of {len(waiting)} requests unfinished after {limit} steps")


def run_requests(
    engine: PagedEngine, prompts: Sequence[Ids], per_request: Sequence[Mapping[str, Any]] | None = None, **shared: Any
) -> list[RequestOutput]:
    """Adds one request a prompt and steps to the end; outputs in input order. None may end with an error."""
    options = per_request or [{}] * len(prompts)
    ids = [engine.add_request(list(prompt), **{**shared, **own}) for prompt, own in zip(prompts, options, strict=True)]
    final = run_to_end(engine, ids)
    outputs = [final[request_id] for request_id in ids]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None, output.error
        assert list(output.prompt_token_ids) == list(prompt)
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[Ids]:
    return [list(output.token_ids) for output in outputs]


def check_seeded_company(model: PreTrainedModel, prompts: Sequence[Ids], name: str, max_new_tokens: int) -> None:
    """What a seed draws for the first prompt doesn't depend on the others, each of which draws with its own."""
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "seed": 7, "max_new_tokens": max_new_tokens}
    with PagedEngine(model, pool_of_2048(8)) as engine:
        (alone,) = run_requests(engine, prompts[:1], [options])
        crowd = run_requests(engine, prompts, [{**options, "seed": 7 + index} for index in range(len(prompts))])
    assert_equal_tokens(crowd[0].token_ids, alone.token_ids, name)
    assert len({output.token_ids for output in crowd}) == len(prompts)
