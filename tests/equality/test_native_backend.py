"""`generate` and the engine through the native CPU kernels, equal to stock for every model of the zoo."""

from __future__ import annotations

import pytest

from hf_paged import PagedConfig, PagedEngine
from hf_paged.kernels.cpu.build import unavailable_reason
from tests import zoo
from tests.equality.backends import check_generate, check_preemption, check_siblings
from tests.equality.drive import run_requests, tokens_of
from tests.oracle import assert_rows_equal_solo, ragged_prompts, random_prompt

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=f"not buildable here: {unavailable_reason()}")

NEW = 8
PROMPTS = [*ragged_prompts(5, seed=61), random_prompt(150, seed=62)]


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_generate_whole_equals_stock(name: str) -> None:
    check_generate(zoo.fresh(name), "native", PROMPTS, name, max_new_tokens=NEW, max_batch_tokens=70)


def test_preemption_equals_stock() -> None:
    for backend in ("torch", "native"):
        check_preemption(zoo.fresh("llama"), backend)


def test_siblings_that_share_an_unfull_block_and_a_prefix_equal_those_of_the_torch_backend() -> None:
    check_siblings(zoo.fresh("llama"), "native", max_new_tokens=6)


def test_what_the_kernels_leave_to_torch_runs_under_the_same_name() -> None:
    model = zoo.fresh("llama").double()
    prompts = ragged_prompts(3, seed=63)
    with PagedEngine(model, PagedConfig(attention_backend="native", num_blocks=64)) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=NEW)
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), max_new_tokens=NEW)
