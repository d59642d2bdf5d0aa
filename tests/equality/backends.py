"""What every attention backend is put through, whole: `generate`, preemption, and siblings that part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from tests.equality.drive import run_requests, tokens_of
from tests.oracle import Ids, assert_equal_batches, assert_rows_equal_solo, left_pad, random_prompt


def check_generate(
    model: PreTrainedModel,
    backend: str,
    prompts: Sequence[Ids],
    what: str,
    *,
    max_new_tokens: int,
    max_batch_tokens: int,
) -> None:
    """`generate` on a left-padded batch equals stock, prefilled in chunks, through this backend."""
    ids, mask = left_pad(prompts)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": max_new_tokens}
    stock = model.generate(ids, **options)
    config = PagedConfig(block_size=8, max_batch_tokens=max_batch_tokens, attention_backend=backend)
    ours = model.generate(ids, cache_implementation="paged", cache_config=config, **options)
    assert_equal_batches(ours, stock, what)
    assert_rows_equal_solo(model, prompts, ours[:, ids.shape[1] :].tolist(), what, max_new_tokens=max_new_tokens)
    engine = hf_paged.get_engine(model)
    assert engine.stats()["num_fallbacks"] == 0
    assert type(engine.core.runner.backend).name == backend
    assert engine.stats()["num_attention_calls"] > 0


def check_preemption(model: PreTrainedModel, backend: str) -> None:
    """Two requests that can't both grow equal stock."""
    prompts = [random_prompt(7, seed=seed) for seed in (1, 2)]  # each grows from one block to two
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=3, attention_backend=backend)) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=6)
        assert engine.stats()["num_preemptions"] > 0
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), max_new_tokens=6)


def check_siblings(model: PreTrainedModel, backend: str, max_new_tokens: int) -> None:
    """Siblings that share an unfull block and a cached prefix draw what they draw through the torch backend."""
    prompt = random_prompt(19, seed=4)
    found = []
    for name in ("torch", backend):
        with PagedEngine(model, PagedConfig(block_size=8, num_blocks=16, attention_backend=name)) as engine:
            for _ in range(2):
                output = run_requests(
                    engine, [prompt], num_return_sequences=2, do_sample=True, seed=5, max_new_tokens=max_new_tokens
                )
                found.append([list(sibling.token_ids) for sibling in output[0].outputs])
            assert engine.stats()["prefix_hit_tokens"] == 16
    assert found[0][0] != found[0][1]
    assert found == [found[0]] * 4
