"""`generate` and the engine through the native CPU kernels, equal to stock for every model of the zoo."""

from __future__ import annotations

from typing import Any

import pytest

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.kernels.cpu.build import unavailable_reason
from tests import zoo
from tests.equality.drive import run_requests, tokens_of
from tests.oracle import assert_equal_batches, assert_rows_equal_solo, left_pad, ragged_prompts, random_prompt

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=f"not buildable here: {unavailable_reason()}")

NEW = 8
PROMPTS = [*ragged_prompts(5, seed=61), random_prompt(150, seed=62)]


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_generate_whole_equals_stock(name: str) -> None:
    model = zoo.fresh(name)
    ids, mask = left_pad(PROMPTS)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW}
    stock = model.generate(ids, **options)
    config = PagedConfig(block_size=8, max_batch_tokens=70, attention_backend="native")  # prefilled in chunks
    ours = model.generate(ids, cache_implementation="paged", cache_config=config, **options)
    assert_equal_batches(ours, stock, name)
    assert_rows_equal_solo(model, PROMPTS, ours[:, ids.shape[1] :].tolist(), name, max_new_tokens=NEW)
    engine = hf_paged.get_engine(model)
    assert engine.stats()["num_fallbacks"] == 0
    assert type(engine.core.runner.backend).name == "native"
    assert engine.stats()["num_attention_calls"] > 0


def test_preemption_prefix_hits_and_siblings_equal_those_of_the_torch_backend() -> None:
    model = zoo.fresh("llama")
    prompt = random_prompt(19, seed=4)
    found = []
    for backend in ("torch", "native"):
        with PagedEngine(model, PagedConfig(block_size=8, num_blocks=16, attention_backend=backend)) as engine:
            for _ in range(2):
                output = run_requests(
                    engine, [prompt], num_return_sequences=2, do_sample=True, seed=5, max_new_tokens=6
                )
                found.append([list(sibling.token_ids) for sibling in output[0].outputs])
            assert engine.stats()["prefix_hit_tokens"] == 16
        with PagedEngine(model, PagedConfig(block_size=8, num_blocks=3, attention_backend=backend)) as engine:
            prompts = [random_prompt(7, seed=seed) for seed in (1, 2)]  # each grows from one block to two
            outputs = run_requests(engine, prompts, max_new_tokens=6)
            assert engine.stats()["num_preemptions"] > 0
        assert_rows_equal_solo(model, prompts, tokens_of(outputs), max_new_tokens=6)
    assert found[0][0] != found[0][1]
    assert found == [found[0]] * 4


def test_what_the_kernels_leave_to_torch_runs_under_the_same_name() -> None:
    model = zoo.fresh("llama").double()
    prompts = ragged_prompts(3, seed=63)
    with PagedEngine(model, PagedConfig(attention_backend="native", num_blocks=64)) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=NEW)
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), max_new_tokens=NEW)
