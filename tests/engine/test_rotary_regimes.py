"""Models whose rotary frequencies depend on the longest row run packed only below the length where they change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged import PagedConfig, PagedEngine, get_engine, num_fallbacks
from hf_paged.errors import CapacityError
from tests.oracle import assert_equal_batches, assert_equal_tokens, left_pad, random_prompt, solo
from tests.zoo import PAD_TOKEN_ID, fresh

LIMIT = 32
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": LIMIT,
    },
    "dynamic": {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": LIMIT,
    },
}


def _model(kind: str) -> Any:
    if kind == "longrope":
        return fresh(
            "phi3",
            rope_parameters={**ROPES[kind], "partial_rotary_factor": 1.0},
            original_max_position_embeddings=LIMIT,
            max_position_embeddings=256,
        )
    return fresh("llama", rope_parameters=ROPES[kind], max_position_embeddings=LIMIT)


@pytest.mark.parametrize("kind", ROPES)
def test_below_the_limit_it_runs_packed_and_above_it_as_stock(kind: str) -> None:
    model = _model(kind)
    prompts = [random_prompt(length, 81) for length in (20, 5)]
    ids, mask = left_pad(prompts)
    for new, fallbacks in ((12, 0), (20, 1)):
        keywords = {"attention_mask": mask, "max_new_tokens": new, "do_sample": False, "pad_token_id": PAD_TOKEN_ID}
        stock = model.generate(ids, **keywords)
        assert_equal_batches(model.generate(ids, **keywords, cache_implementation="paged"), stock)
        assert num_fallbacks(model) == fallbacks
    assert get_engine(model) is not None


@pytest.mark.parametrize("kind", ROPES)
def test_an_engine_refuses_what_would_pass_the_limit(kind: str) -> None:
    model = _model(kind)
    engine = PagedEngine(model, PagedConfig(num_blocks=16, max_batch_tokens=7))
    prompt = random_prompt(20, 82)
    with pytest.raises(CapacityError, match="rotary"):
        engine.add_request(prompt, max_new_tokens=13)
    with torch.no_grad():
        expected = solo(model, prompt, max_new_tokens=12)
    assert_equal_tokens(engine.generate([prompt], max_new_tokens=12)[0].token_ids, expected)
