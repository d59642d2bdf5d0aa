"""The count of blocks that beams hold, and the page that shows it."""

from __future__ import annotations

import json

from benchmarks import beam_memory
from benchmarks.beam_memory import BLOCK_SIZE, Case
from tests.oracle import random_prompt
from tests.zoo import fresh


def test_blocks_of_a_case() -> None:
    # 40 tokens of prompt and 24 of 25 new ones: 4 blocks a beam, 2 of them full of prompt
    case = Case(num_prompts=2, prompt_tokens=40, new_tokens=25, num_beams=3)
    assert BLOCK_SIZE == 16
    assert beam_memory.blocks(case) == (2 * 3 * 4, 2 * (2 + 3 * 2))


def test_a_case_measured_on_a_tiny_model() -> None:
    model = fresh("llama")
    case = Case(num_prompts=2, prompt_tokens=40, new_tokens=25, num_beams=3)
    row = beam_memory.measure(model, random_prompt(80, seed=1), case)
    assert row["dense_blocks"] == 24
    assert 2 * 4 <= row["peak_blocks"] <= row["prompt_shared_blocks"]
    assert row["saved_percent"] == 100 * (1 - row["peak_blocks"] / 24)


def test_the_page_shows_the_stored_result() -> None:
    result = json.loads(beam_memory.RESULT.read_text(encoding="utf-8"))
    assert beam_memory.markdown(result) in beam_memory.PAGE.read_text(encoding="utf-8")
    for row in result["rows"]:
        case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
        assert (row["dense_blocks"], row["prompt_shared_blocks"]) == beam_memory.blocks(case)
