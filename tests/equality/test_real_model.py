"""SmolLM2-135M: each row equal to stock's, or first different where stock's own two best logits are a tie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged import PagedConfig, PagedEngine, num_fallbacks
from hf_paged.commands.demo_prompts import DEMO_PROMPTS
from hf_paged.commands.demo_report import TIE, compare
from hf_paged.commands.demo_runs import Run
from hf_paged.embedded import EmbeddedModelError, embedded_model_folder
from tests.oracle import TALLY, left_pad, solo

NEW = 16
PROMPTS = [prompt.text for prompt in DEMO_PROMPTS[:10]]


@pytest.fixture(scope="module")
def model() -> Any:
    try:
        folder = embedded_model_folder()
    except EmbeddedModelError as error:
        pytest.skip(f"the embedded model is not here: {error}")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(model: Any) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


def _assert_equal_up_to_ties(model: Any, prompts: list[list[int]], rows: list[list[int]]) -> None:
    expected = [solo(model, prompt, max_new_tokens=NEW, eos_token_id=None) for prompt in prompts]
    found = compare(model, prompts, Run(expected, 1.0, 1, 1.0), Run(rows, 1.0, 1, 1.0))
    ties = [difference for difference in found.differences if difference.top2_gap < TIE]
    equal = f"{found.num_equal} of {found.num_rows} rows equal to stock"
    TALLY.notes.append(f"SmolLM2: {equal}, {len(ties)} first differ at a tie of stock's")
    assert found.is_equal_up_to_ties, found.differences


def test_the_engine_under_a_tight_pool(model: Any, prompts: list[list[int]]) -> None:
    longest = max(map(len, prompts)) + NEW
    config = PagedConfig(num_blocks=2 * -(-longest // 16), max_batch_tokens=64)
    with PagedEngine(model, config) as engine:
        outputs = engine.generate(prompts, max_new_tokens=NEW, eos_token_id=None)
        engine.check()
    _assert_equal_up_to_ties(model, prompts, [list(output.token_ids) for output in outputs])


def test_generate_on_a_left_padded_batch(model: Any, prompts: list[list[int]]) -> None:
    ids, mask = left_pad(prompts, pad_id=2)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=2,
        cache_implementation="paged",
    )
    _assert_equal_up_to_ties(model, prompts, out[:, ids.shape[1] :].tolist())
    assert num_fallbacks(model) == 0
