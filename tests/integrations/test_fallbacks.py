"""What the engine can't run, stock's loop runs: right, said once, and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_paged import PagedKVCache, get_engine, num_fallbacks
from hf_paged.compat import CACHE_KEYWORD
from hf_paged.errors import CapacityError, PagedError
from hf_paged.integrations import decoding
from tests.oracle import assert_equal_batches, left_pad, ragged_prompts
from tests.zoo import PAD_TOKEN_ID, VOCAB_SIZE, fresh

NEW = 6
IDS, MASK = left_pad(ragged_prompts(3, seed=61, shortest=3, longest=12))
OPTIONS: dict[str, Any] = {
    "attention_mask": MASK,
    "max_new_tokens": NEW,
    "do_sample": False,
    "pad_token_id": PAD_TOKEN_ID,
}


def _both(model: Any, **options: Any) -> tuple[Any, Any]:
    keywords = {**OPTIONS, **options}
    return model.generate(IDS, **keywords), model.generate(IDS, **keywords, cache_implementation="paged")


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2, "use_cache": False}, "use_cache=False"),
        ({"use_cache": False}, "use_cache=False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "attentions"),
        ({"prompt_lookup_num_tokens": 2, "return_dict_in_generate": True}, "assisted generation"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"position_ids": MASK.cumsum(-1).sub(1).clamp_min(0)}, "position_ids"),
        ({"assistant_model": None, "return_dict_in_generate": True}, "assisted generation"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mode_that_needs_stocks_loop_gets_it_and_says_so_once(
    options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = fresh("llama")
    if "prompt_lookup_num_tokens" in options:
        options = {**options, "attention_mask": MASK[-1:], "one row": True}
    if "assistant_model" in options:
        options = {**options, "assistant_model": fresh("llama"), "one row": True}
    one_row = options.pop("one row", False)
    model.generate(IDS, **OPTIONS, cache_implementation="paged")  # so that there is an engine that counts
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        for _ in range(2):
            if one_row:
                keywords = {**OPTIONS, **options, "attention_mask": torch.ones(1, 5, dtype=torch.int64)}
                stock = model.generate(IDS[-1:, -5:], **keywords)
                paged = model.generate(IDS[-1:, -5:], **keywords, cache_implementation="paged")
            else:
                stock, paged = _both(model, **options)
            if not isinstance(stock, torch.Tensor):
                stock, paged = stock.sequences, paged.sequences
            assert_equal_batches(paged, stock)
    said = [record.getMessage() for record in caplog.records if record.name == "hf_paged"]
    assert len(said) == 1
    assert reason in said[0]
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["num_fallbacks"] == 2


@pytest.mark.parametrize("num_common", [0, 3])
def test_continuing_from_a_returned_cache(num_common: int) -> None:
    # padding that all rows have in common counts, too: the next call's mask has columns for it
    model = fresh("llama")
    prompt = torch.nn.functional.pad(IDS, (num_common, 0), value=PAD_TOKEN_ID)
    padded = torch.nn.functional.pad(MASK, (num_common, 0))
    outs, lengths = [], []
    for more in ({}, {"cache_implementation": "paged"}):
        first = model.generate(prompt, **{**OPTIONS, "attention_mask": padded}, **more, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, torch.full((len(IDS), 2), 9)], -1)
        mask = torch.cat([padded, torch.ones(len(IDS), ids.shape[1] - padded.shape[1], dtype=MASK.dtype)], -1)
        lengths.append(first[CACHE_KEYWORD].get_seq_length())
        keywords = {**OPTIONS, "attention_mask": mask, CACHE_KEYWORD: first[CACHE_KEYWORD]}
        outs.append(model.generate(ids, **keywords, **more))
    assert_equal_batches(outs[1], outs[0])
    assert lengths[1] == lengths[0] == prompt.shape[1] + NEW - 1


def _alibi() -> Any:
    torch.manual_seed(0)
    config = BloomConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4, eos_token_id=None, bos_token_id=None
    )
    return BloomForCausalLM(config).eval()


def test_a_model_that_can_not_run_packed_runs_as_stock(caplog: pytest.LogCaptureFixture) -> None:
    model = _alibi()
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        for _ in range(2):
            stock, paged = _both(model)
            assert_equal_batches(paged, stock)
    said = [record.getMessage() for record in caplog.records if record.name == "hf_paged"]
    assert len(said) == 1
    assert get_engine(model) is None


def test_an_encoder_decoder_runs_on_a_paged_cache(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        stock, paged = _both(model)
    assert_equal_batches(paged, stock)
    assert "encoder-decoder" in caplog.text


def test_an_unknown_keyword_raises_as_in_stock() -> None:
    model = fresh("llama")
    with pytest.raises(ValueError, match="no_such_option") as stock:
        model.generate(IDS, **OPTIONS, no_such_option=1)
    with pytest.raises(ValueError, match="no_such_option") as paged:
        model.generate(IDS, **OPTIONS, no_such_option=1, cache_implementation="paged")
    assert str(stock.value) == str(paged.value)


@pytest.mark.parametrize("more", [{}, {"return_dict_in_generate": True}], ids=["one by one", "in lockstep"])
def test_a_row_that_outgrows_the_pool_says_what_to_change(more: dict[str, Any]) -> None:
    model = fresh("llama")
    keywords = {**OPTIONS, "max_new_tokens": 60, "cache_implementation": "paged", **more}
    with pytest.raises(PagedError, match="max_new_tokens"):
        model.generate(IDS, **keywords, cache_config={"num_blocks": 5, "block_size": 8})
    engine = get_engine(model)
    assert engine is not None
    engine.check()
    assert engine.stats()["free_blocks"] == 5


@pytest.mark.parametrize("more", [{}, {"return_dict_in_generate": True}], ids=["one by one", "in lockstep"])
def test_rows_that_end_early_may_ask_for_more_than_fits(more: dict[str, Any]) -> None:
    model = fresh("llama")
    free = model.generate(IDS, **OPTIONS)[:, IDS.shape[1] :]
    keywords = {**OPTIONS, "max_new_tokens": 200, "eos_token_id": sorted({*free[:, 3].tolist()}), **more}
    stock = model.generate(IDS, **keywords)
    paged = model.generate(
        IDS, **keywords, cache_implementation="paged", cache_config={"num_blocks": 6, "block_size": 8}
    )
    if more:
        stock, paged = stock.sequences, paged.sequences
    assert_equal_batches(paged, stock)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("hidden", [-1, -4], ids=["behind the prompt", "inside it"])
def test_a_mask_that_is_no_left_padding_means_what_it_means_in_stock(name: str, hidden: int) -> None:
    model = fresh(name)
    ids, mask = left_pad(ragged_prompts(3, seed=62, shortest=20, longest=30))
    mask[0, hidden] = 0
    stock, paged = (
        model.generate(ids, **{**OPTIONS, "attention_mask": mask}, **more)
        for more in ({}, {"cache_implementation": "paged"})
    )
    assert_equal_batches(paged, stock)
    assert num_fallbacks(model) == 1


class _RowsLookAtEachOther(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.5 * (scores - scores.roll(1, 0))


def test_a_processor_that_looks_from_row_to_row_sees_stocks_scores() -> None:
    model = fresh("llama")
    free = model.generate(IDS, **OPTIONS, logits_processor=[_RowsLookAtEachOther()])[:, IDS.shape[1] :]
    options = {"eos_token_id": [int(free[1, 1])], "max_new_tokens": 12}
    stock = model.generate(IDS, **{**OPTIONS, **options}, logits_processor=[_RowsLookAtEachOther()])
    paged = model.generate(
        IDS, **{**OPTIONS, **options}, logits_processor=[_RowsLookAtEachOther()], cache_implementation="paged"
    )
    assert_equal_batches(paged, stock)
    assert num_fallbacks(model) == 0


def test_a_call_that_the_queue_refuses_leaves_the_engine_as_it_was() -> None:
    model = fresh("llama")
    with pytest.raises(CapacityError, match="max_queue_size"):
        model.generate(IDS, **OPTIONS, cache_implementation="paged", cache_config={"max_queue_size": 2})
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["num_waiting"] == 0
    assert engine.step() == []
    assert_equal_batches(
        model.generate(IDS[:2], **{**OPTIONS, "attention_mask": MASK[:2]}, cache_implementation="paged"),
        model.generate(IDS[:2], **{**OPTIONS, "attention_mask": MASK[:2]}),
    )


def test_a_high_limit_that_is_not_reached_takes_no_large_pool() -> None:
    model = fresh("llama", max_position_embeddings=16384)
    free = model.generate(IDS, **OPTIONS)[:, IDS.shape[1] :]
    keywords = {**OPTIONS, "max_new_tokens": 10_000, "eos_token_id": sorted({*free[:, 3].tolist()})}
    stock = model.generate(IDS, **keywords)
    assert_equal_batches(model.generate(IDS, **keywords, cache_implementation="paged"), stock)
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["num_blocks"] < 80
    assert engine.stats()["num_preemptions"] == 0


def test_rows_that_last_longer_than_expected_grow_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_HORIZON", 4)
    model = fresh("llama")
    keywords = {**OPTIONS, "max_new_tokens": 40}
    stock = model.generate(IDS, **keywords)
    assert_equal_batches(model.generate(IDS, **keywords, cache_implementation="paged"), stock)
    engine = get_engine(model)
    assert engine is not None
    engine.check()
    assert engine.stats()["num_preemptions"] == 0


def _greedy(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    cache = kwargs.get(CACHE_KEYWORD)
    seen.append(cache)
    fresh_ids, mask = input_ids, kwargs["attention_mask"]
    for _ in range(NEW):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -fresh_ids.shape[1] :]
        out = model(fresh_ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE_KEYWORD: cache})
        fresh_ids = out.logits[:, -1:].argmax(-1)
        input_ids, mask = torch.cat([input_ids, fresh_ids], 1), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return input_ids


seen: list[Any] = []


def test_a_function_as_custom_generate_gets_a_paged_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Stock hands such a loop a DynamicCache; ours gets the cache that the call asked for."""
    model = fresh("llama")
    seen.clear()
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        stock, paged = _both(model, custom_generate=_greedy)
    assert torch.equal(stock, paged)
    assert isinstance(seen[1], PagedKVCache)
    assert seen[1].get_seq_length() == IDS.shape[1] + NEW - 1
    assert "runs its own loop on a PagedKVCache" in caplog.text
    assert num_fallbacks(model) == 1


def test_code_that_custom_generate_names_runs_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "recipe" / "custom_generate"
    folder.mkdir(parents=True)
    (folder / "generate.py").write_text(
        "def generate(model, inputs, max_new_tokens=None, **kwargs):\n"
        "    return model.generate(inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)\n"
    )
    model = fresh("llama")
    options = {"custom_generate": str(folder.parent), "trust_remote_code": True}
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        stock, paged = _both(model, **options)
    assert torch.equal(stock, paged)
    assert "the code that custom_generate names runs as it is" in caplog.text
    assert num_fallbacks(model) == 1


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("hidden", [slice(0, 1), slice(None)], ids=["one row", "all rows"])
def test_a_mask_that_hides_whole_rows_gives_what_stock_gives(
    hidden: slice, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    mask = MASK.clone()
    mask[hidden] = 0
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        stock, paged = _both(fresh("llama"), attention_mask=mask, **options)
    assert torch.equal(stock, paged)
    assert "hides the whole of a row" in caplog.text


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_a_hole_in_a_mask_of_any_type_is_seen(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    mask = MASK.clone()
    mask[:, -2] = 0
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        stock, paged = _both(fresh("llama"), attention_mask=mask.to(dtype))
    assert torch.equal(stock, paged)
    assert "hides tokens inside" in caplog.text
