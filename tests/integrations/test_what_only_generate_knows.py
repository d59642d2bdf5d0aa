"""Text alone for vision-language models, and what a forward doesn't show: positions and windows of generate's."""

from __future__ import annotations

import logging

import pytest

from hf_paged.integrations.engines import num_fallbacks
from tests.models.building import build
from tests.models.entries import CAUSAL, VISION_LANGUAGE, entries
from tests.oracle import assert_equal_batches, left_pad, random_prompt

IDS, MASK = left_pad([random_prompt(length, length) for length in (19, 5)])
ENTRIES = {entry.key: entry for entry in entries(CAUSAL, VISION_LANGUAGE)}


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("vision-language/llava", None),
        ("vision-language/gemma3", None),  # its tower's table of positions is shorter than these prompts
        ("vision-language/paligemma", "numbers the tokens of a prompt [1, 2, 3, 4]"),
        ("causal/moshi", "Its window is in stock's cache alone"),
    ],
)
def test_equal_to_stock_on_the_engine_or_with_a_reason(
    key: str, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(ENTRIES[key])
    options = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(IDS, **options)
    with caplog.at_level(logging.WARNING, "hf_paged"):
        for _ in range(2):
            assert_equal_batches(model.generate(IDS, **options, cache_implementation="paged"), expected, key)
    assert num_fallbacks(model) == (0 if reason is None else 2)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (0 if reason is None else 1), "said once"
    assert reason is None or reason in said[0]
