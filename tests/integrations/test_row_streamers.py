"""A streamer a row: each shows what it would show in stock for that prompt alone, and ends when its row does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from hf_paged.errors import RequestError
from tests.oracle import assert_equal_tokens, left_pad, ragged_prompts, solo, staggered_ends
from tests.tiny_tokenizer import tiny_tokenizer
from tests.zoo import PAD_TOKEN_ID, build, fresh

NEW = 10
PROMPTS = ragged_prompts(4, seed=31, shortest=2, longest=20)
IDS, MASK = left_pad(PROMPTS)


class _Records(BaseStreamer):
    log: list[tuple[str, int]]

    def __init__(self, row: int = 0, log: list[tuple[str, int]] | None = None) -> None:
        self.row, self.log = row, [] if log is None else log
        self.prompt: list[int] | None = None
        self.tokens: list[int] = []
        self.num_ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.num_ends, "nothing comes after the end"
        self.log.append(("put", self.row))
        if self.prompt is None:
            assert value.dim() == 2
            self.prompt = value[0].tolist()
        else:
            assert value.dim() == 1
            self.tokens += value.tolist()

    def end(self) -> None:
        self.log.append(("end", self.row))
        self.num_ends += 1


def _options(**more: Any) -> dict[str, Any]:
    ends = staggered_ends(build("llama"), PROMPTS, NEW)
    common = {"attention_mask": MASK, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD_TOKEN_ID}
    return {**common, "eos_token_id": ends, "cache_implementation": "paged", **more}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"cache_config": {"num_blocks": 3, "block_size": 16}},
        {"output_hidden_states": True, "return_dict_in_generate": True},
    ],
    ids=["engine", "small pool", "stock's loop"],
)
def test_each_row_streams_as_it_does_alone(more: dict[str, Any]) -> None:
    options = _options(**more)
    log: list[tuple[str, int]] = []
    streamers = [_Records(row, log) for row in range(len(PROMPTS))]
    fresh("llama").generate(IDS, **options, streamer=streamers)
    lengths = []
    for prompt, streamer in zip(PROMPTS, streamers, strict=True):
        expected = solo(build("llama"), prompt, max_new_tokens=NEW, eos_token_id=options["eos_token_id"])
        assert streamer.prompt == prompt
        assert_equal_tokens(streamer.tokens, expected)
        assert streamer.num_ends == 1
        lengths.append(len(expected))
    assert len(set(lengths)) > 1
    shortest = lengths.index(min(lengths))
    last_put = max(index for index, (kind, _) in enumerate(log) if kind == "put")
    assert log.index(("end", shortest)) < last_put, "a row ends before the batch does"


def test_several_sequences_a_prompt_and_rows_that_nobody_reads() -> None:
    streamers = [_Records() if row % 3 else None for row in range(2 * len(PROMPTS))]
    options = _options(do_sample=True, num_return_sequences=2)
    torch.manual_seed(1)
    out = fresh("llama").generate(IDS, **options, streamer=streamers)
    for row, streamer in enumerate(streamers):
        if streamer is not None:
            assert streamer.prompt == PROMPTS[row // 2]
            assert streamer.tokens == out[row, IDS.shape[1] :][: len(streamer.tokens)].tolist()
            assert all(token == PAD_TOKEN_ID for token in out[row, IDS.shape[1] + len(streamer.tokens) :].tolist())
            assert streamer.num_ends == 1


def test_text_streamers_get_their_rows_text() -> None:
    tokenizer = tiny_tokenizer()
    streamers = [TextIteratorStreamer(tokenizer, skip_prompt=True) for _ in PROMPTS]
    fresh("llama").generate(IDS, **_options(), streamer=streamers)
    for prompt, streamer in zip(PROMPTS, streamers, strict=True):
        expected = solo(build("llama"), prompt, max_new_tokens=NEW, eos_token_id=_options()["eos_token_id"])
        assert "".join(streamer) == tokenizer.decode(expected)


def test_a_wrong_number_of_streamers_is_refused() -> None:
    with pytest.raises(RequestError, match="2 streamers for 4 rows"):
        fresh("llama").generate(IDS, **_options(), streamer=[_Records(), _Records()])
