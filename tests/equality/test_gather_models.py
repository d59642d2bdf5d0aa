"""Models that change K or V between the cache and attention run packed, and give stock's tokens."""

from __future__ import annotations

import pytest

from hf_paged import PagedConfig, PagedEngine
from hf_paged.integrations.engines import get_engine, num_fallbacks
from tests import families
from tests.equality.drive import check_seeded_company, pool_of_2048, run_requests, tokens_of
from tests.oracle import (
    assert_equal_tokens,
    assert_rows_equal_solo,
    border_prompts,
    left_pad,
    ragged_prompts,
    random_prompt,
    solo,
)

NEW = 7
PROMPTS = ragged_prompts(6, seed=3, longest=26)


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("name", families.GATHERED)
def test_ragged_requests_in_chunks_on_few_rows(name: str, block_size: int) -> None:
    model = families.build(name)
    settings = pool_of_2048(block_size, max_batch_tokens=12, max_requests_per_batch=4)
    with PagedEngine(model, settings) as engine:
        assert engine.mode == "gather"
        outputs = run_requests(engine, PROMPTS, max_new_tokens=NEW)
    assert_rows_equal_solo(model, PROMPTS, tokens_of(outputs), name, max_new_tokens=NEW)


@pytest.mark.parametrize("name", families.GATHERED)
def test_generate_gives_stocks_tokens_from_the_engine(name: str) -> None:
    model = families.build(name)
    before = num_fallbacks(model)
    ids, mask = left_pad(PROMPTS)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, cache_implementation="paged")
    rows = [row[ids.shape[1] :].tolist() for row in out]
    assert_rows_equal_solo(model, PROMPTS, rows, name, max_new_tokens=NEW)
    assert num_fallbacks(model) == before
    engine = get_engine(model)
    assert engine is not None
    assert engine.mode == "gather"
    engine.check()


@pytest.mark.parametrize("name", families.GATHERED)
def test_prefix_hits(name: str) -> None:
    model, prompts = families.build(name), border_prompts(8, seed=5)
    with PagedEngine(model, pool_of_2048(8, max_batch_tokens=13)) as engine:
        for _ in range(2):  # the second time all prompts are cached
            outputs = run_requests(engine, prompts, max_new_tokens=NEW)
            assert_rows_equal_solo(model, prompts, tokens_of(outputs), name, max_new_tokens=NEW)
        assert engine.stats()["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("name", families.GATHERED)
def test_preempted_sequences_go_on_as_if_nothing_had_happened(name: str) -> None:
    model, prompts = families.build(name), [random_prompt(length, 8) for length in (14, 15, 6, 16)]
    settings = PagedConfig(block_size=8, num_blocks=5, max_batch_tokens=24, enable_prefix_caching=False)
    with PagedEngine(model, settings) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=NEW)
        assert engine.stats()["num_preemptions"] > 0
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), name, max_new_tokens=NEW)


@pytest.mark.parametrize("name", families.GATHERED)
def test_seeded_sampling_does_not_depend_on_the_company(name: str) -> None:
    check_seeded_company(families.build(name), PROMPTS, name, max_new_tokens=6)


@pytest.mark.parametrize("backend", ["torch", "reference", "native", "triton"])
def test_every_backend_has_it(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    model, prompts = families.build("jetmoe"), [random_prompt(length, 7) for length in (19, 3)]
    with PagedEngine(model, pool_of_2048(attention_backend=backend, max_batch_tokens=12)) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=3)
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), backend, max_new_tokens=3)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_pool_is_handed_out_in_the_models_types(dtype: str) -> None:
    model, prompt = families.build("diffllama"), PROMPTS[0]
    with PagedEngine(model, pool_of_2048(8, k_dtype=dtype, v_dtype=dtype)) as engine:
        (output,) = run_requests(engine, [prompt], max_new_tokens=1)
    assert_equal_tokens(output.token_ids, solo(model, prompt, max_new_tokens=1), dtype)


@pytest.mark.parametrize("name", families.GATHERED)
def test_slots_that_hold_no_token_never_count(name: str) -> None:
    """Blocks are handed out whole; what a last block holds behind its tokens may be NaN."""
    model = families.build(name)
    with PagedEngine(model, pool_of_2048(8)) as engine:
        cache = engine.core.runner.cache
        assert cache is not None
        for storage in cache.storages.values():
            for tensor in storage.blocks.tensors:
                tensor.fill_(float("nan"))
        outputs = run_requests(engine, PROMPTS, max_new_tokens=NEW)
    assert_rows_equal_solo(model, PROMPTS, tokens_of(outputs), name, max_new_tokens=NEW)
