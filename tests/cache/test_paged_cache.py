"""PagedKVCache on its own: stock `generate` with it equals stock `generate` with a DynamicCache, in every mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    Gemma2Config,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
)

from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.compat import CACHE_KEYWORD
from hf_paged.errors import PagedError
from tests import zoo
from tests.cache import _encoder_decoders
from tests.oracle import TALLY

SCORE_TOLERANCE = 1e-5
NUM_NEW = 16
NOISE = 0.1
NAMES = ("llama", "mistral", "gemma2", "gpt2")

# name -> (rows, keywords); one row where stock takes no more, two of different length elsewhere
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (2, {}),
    "sampling": (2, {"do_sample": True, "temperature": 1.5}),
    "num_return_sequences": (2, {"do_sample": True, "num_return_sequences": 3}),
    "beams": (2, {"num_beams": 4}),
    "beams returned": (1, {"num_beams": 4, "num_return_sequences": 3}),
    "beam sampling": (2, {"num_beams": 3, "do_sample": True}),
    "chunked prefill": (2, {"prefill_chunk_size": 5}),
    "chunks past the window": (2, {"prefill_chunk_size": 24}),
    "beams after chunks": (2, {"prefill_chunk_size": 7, "num_beams": 3}),
    "prompt lookup": (1, {"prompt_lookup_num_tokens": 4}),
    "sampled prompt lookup": (1, {"prompt_lookup_num_tokens": 4, "do_sample": True}),
    "assistant": (1, {"assistant_model": "noisy"}),
    "sampling with assistant": (1, {"assistant_model": "noisy", "do_sample": True}),
}


def prompts(rows: int, length: int = 43) -> dict[str, torch.Tensor]:
    """Rows of random tokens that repeat themselves, the first of two left-padded."""
    ids = torch.randint(1, zoo.VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(3))
    ids[:, length // 2 : length // 2 + 12] = ids[:, length - 12 :].clone()
    mask = torch.ones_like(ids)
    if rows > 1:
        ids[0, :11], mask[0, :11] = zoo.PAD_TOKEN_ID, 0
    return {"input_ids": ids, "attention_mask": mask}


def is_sliding(model: PreTrainedModel) -> bool:
    return True in DynamicCache(config=model.config).is_sliding


def noisy_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A draft model that is right often and wrong often."""
    draft = copy.deepcopy(model)
    draft.generation_config.update(
        # Before 5.24 stock's own cache of a sliding draft doesn't survive two forwards without a crop.
        num_assistant_tokens=1 if CACHE_KEYWORD == "past_key_values" and is_sliding(model) else 5,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(NOISE * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return draft


def generated(model: PreTrainedModel, cache: Cache, **kwargs: Any) -> Any:
    if kwargs.get("assistant_model") == "noisy":
        kwargs["assistant_model"] = noisy_copy(model)
    torch.manual_seed(7)
    settings = {"max_new_tokens": NUM_NEW, "return_dict_in_generate": True, "output_scores": True}
    return model.generate(**{CACHE_KEYWORD: cache}, **settings, **kwargs)


def assert_same(ours: Any, stock: Any) -> None:
    assert torch.equal(ours.sequences, stock.sequences)
    assert len(ours.scores) == len(stock.scores) > 0
    for our_scores, stock_scores in zip(ours.scores, stock.scores, strict=True):
        torch.testing.assert_close(our_scores, stock_scores, atol=SCORE_TOLERANCE, rtol=0)
    if stock.get("sequences_scores") is not None:
        torch.testing.assert_close(ours.sequences_scores, stock.sequences_scores, atol=SCORE_TOLERANCE, rtol=0)


def forward(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, use_cache=True, **{CACHE_KEYWORD: cache}).logits
    return logits


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, zoo.VOCAB_SIZE, shape)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_every_mode_equals_dynamic_cache(name: str, mode: str) -> None:
    model = zoo.build(name)
    rows, kwargs = MODES[mode]
    cache = PagedKVCache(model.config)
    ours = generated(model, cache, **prompts(rows), **kwargs)
    stock = generated(model, DynamicCache(config=model.config), **prompts(rows), **kwargs)
    assert_same(ours, stock)
    assert ours[CACHE_KEYWORD] is cache
    cache.check()
    if kwargs.get("num_beams", 1) > 1:
        held, dense = cache.num_blocks_held, cache.num_blocks_dense
        TALLY.notes.append(f"{mode}, {name}: {held} blocks held, {dense} if beams shared none")
        assert cache.num_blocks_held < 0.7 * cache.num_blocks_dense
    cache.reset()
    cache.check()
    assert cache.num_blocks_held == cache.get_seq_length() == 0


@pytest.mark.parametrize("block_size", [1, 3, 64])
@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_any_block_size_gives_the_same_beams(name: str, block_size: int) -> None:
    model = zoo.build(name)
    cache = PagedKVCache(model.config, block_size=block_size)
    ours = generated(model, cache, **prompts(2), num_beams=3)
    assert_same(ours, generated(model, DynamicCache(config=model.config), **prompts(2), num_beams=3))
    cache.check()


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}], ids=str)
@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_without_a_config_all_layers_are_full_and_equal(name: str, kwargs: dict[str, Any]) -> None:
    model = zoo.build(name)
    cache = PagedKVCache()
    ours = generated(model, cache, **prompts(1), **kwargs)
    assert_same(ours, generated(model, DynamicCache(), **prompts(1), **kwargs))
    assert cache.is_sliding == [False] * model.config.num_hidden_layers
    cache.check()


@pytest.mark.parametrize("kwargs", [{"num_beams": 3}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_generation_continues_from_a_returned_cache(name: str, kwargs: dict[str, Any]) -> None:
    model = zoo.build(name)
    outputs = []
    for cache in (PagedKVCache(model.config), DynamicCache(config=model.config)):
        first = generated(model, cache, **prompts(2))
        ids = torch.cat([first.sequences, torch.arange(1, 11).view(2, 5)], dim=1)
        mask = torch.ones_like(ids)
        mask[0, :11] = 0
        if kwargs.get("num_beams"):
            first[CACHE_KEYWORD].batch_repeat_interleave(kwargs["num_beams"])
        outputs.append(generated(model, first[CACHE_KEYWORD], input_ids=ids, attention_mask=mask, **kwargs))
    assert_same(*outputs)
    outputs[0][CACHE_KEYWORD].check()


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams", "beam sampling", "prompt lookup"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoder_models_equal_dynamic_cache(name: str, mode: str) -> None:
    model = _encoder_decoders.build(name)
    rows, kwargs = MODES[mode]
    caches = [
        EncoderDecoderCache(PagedKVCache(model.config), DynamicCache(config=model.config)),
        EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config)),
    ]
    assert_same(*(generated(model, cache, **prompts(rows), **kwargs) for cache in caches))
    paged = caches[0].self_attention_cache
    paged.check()
    assert paged.get_seq_length() >= NUM_NEW
    if "num_beams" in kwargs:
        assert paged.num_blocks_held <= paged.num_blocks_dense
    caches[0].reset()
    assert paged.num_blocks_held == 0


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_it_holds_cross_attention_too(name: str) -> None:
    model = _encoder_decoders.build(name)
    paged = EncoderDecoderCache(PagedKVCache(model.config), PagedKVCache(model.config))
    stock = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    assert_same(*(generated(model, cache, **prompts(2), num_beams=3) for cache in (paged, stock)))
    # all beams of a prompt keep pointing at one copy of the encoder's keys after the first reordering
    assert paged.cross_attention_cache.num_blocks_held < paged.cross_attention_cache.num_blocks_dense
    paged.cross_attention_cache.check()


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}], ids=str)
def test_layers_without_attention_keep_their_stock_state(kwargs: dict[str, Any]) -> None:
    layer_types = ["conv", "full_attention", "conv", "full_attention"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": zoo.VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    model = Lfm2ForCausalLM(Lfm2Config(**sizes, **ids, num_hidden_layers=4, layer_types=layer_types)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    cache = PagedKVCache(model.config)
    ours = generated(model, cache, **prompts(2), **kwargs)
    assert_same(ours, generated(model, DynamicCache(config=model.config), **prompts(2), **kwargs))
    assert cache.is_linear == [True, False, True, False]
    cache.check()


def test_beams_share_their_prompt() -> None:
    model = zoo.build("llama")
    cache = PagedKVCache(model.config)
    ids = random_ids(1, 16 * 8)
    generated(model, cache, input_ids=ids, attention_mask=torch.ones_like(ids), num_beams=6)
    # 8 blocks of prompt once, and at most one of the continuation a beam
    assert cache.num_blocks_held <= 8 + 6
    assert cache.num_blocks_dense == 6 * (8 + 1)


def test_a_fork_copies_the_shared_partial_block_once_per_writer_but_one() -> None:
    model = zoo.build("llama")
    cache = PagedKVCache(model.config)
    forward(model, random_ids(1, 16 + 5), cache)
    assert cache.num_blocks_held == 2
    cache.batch_repeat_interleave(3)
    assert (cache.num_blocks_held, cache.num_blocks_dense) == (2, 6)
    before = [layer.keys for layer in cache.layers]
    forward(model, random_ids(3, 1), cache)
    assert (cache.num_blocks_held, cache.num_blocks_dense) == (1 + 3, 6)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys[:, :, :-1], keys)
    cache.check()
    cache.reorder_cache(torch.tensor([2, 2, 2]))
    assert cache.num_blocks_held == 2
    cache.batch_select_indices(torch.tensor([False, True, False]))
    assert (cache.num_blocks_held, cache.num_blocks_dense) == (2, 2)
    forward(model, random_ids(1, 1), cache)  # the only holder writes in place
    assert cache.num_blocks_held == 2
    cache.check()


@pytest.mark.parametrize("name", NAMES)
def test_contrastive_helpers_equal_dynamic_cache(name: str) -> None:
    model = zoo.build(name)
    prompt, candidates, last = random_ids(2, 30), random_ids(6, 1), random_ids(2, 2)
    logits = []
    for cache in (PagedKVCache(model.config), DynamicCache(config=model.config)):
        steps = [forward(model, prompt, cache)]
        cache.batch_repeat_interleave(3)
        steps.append(forward(model, candidates, cache))
        cache.batch_select_indices(torch.tensor([2, 3]))
        steps.append(forward(model, last, cache))
        logits.append(torch.cat([step.flatten() for step in steps]))
    torch.testing.assert_close(*logits, atol=SCORE_TOLERANCE, rtol=0)


def test_blocks_behind_the_window_are_given_back() -> None:
    model = zoo.build("mistral")
    cache = PagedKVCache(model.config, block_size=4)
    generated(model, cache, **prompts(2), max_length=None)
    # 15 keys are visible to the next query: they lie in at most 5 blocks of 4
    assert 2 * 4 <= cache.num_blocks_held <= 2 * 5
    cache.check()


def test_a_long_prompt_never_holds_more_than_its_window() -> None:
    model = zoo.build("mistral")
    cache = PagedKVCache(model.config, block_size=4)
    forward(model, random_ids(1, 400), cache)
    assert cache.num_blocks_held <= 5
    assert cache.nbytes == sum(layer.storage.num_bytes for layer in cache.layers)
    assert cache.layers[0].storage.num_blocks < 16  # a hundred would hold the whole prompt


def test_only_the_sliding_layers_slide() -> None:
    model = zoo.build("gemma2")
    cache = PagedKVCache(model.config, block_size=4)
    assert cache.is_sliding == DynamicCache(config=model.config).is_sliding == [True, False, True, False]
    forward(model, random_ids(1, 100), cache)
    assert cache.num_blocks_dense == 25 + 4  # 15 visible keys end on a block here
    for ours, length in zip(cache.layers, (zoo.WINDOW - 1, 100) * 2, strict=True):
        assert ours.keys.shape[2] == ours.values.shape[2] == length
    assert cache.get_mask_sizes(3, 0) == (zoo.WINDOW - 1 + 3, 100 - zoo.WINDOW + 1)
    assert cache.get_mask_sizes(3, 1) == (103, 0)
    assert cache.get_seq_length() == cache.get_query_offset() == 100
    assert (cache.layers[0].get_max_length(), cache.layers[1].get_max_length()) == (zoo.WINDOW, -1)


def test_past_recording_keeps_blocks_until_crop() -> None:
    model = zoo.build("mistral")
    ids = random_ids(1, 60)
    cache = PagedKVCache(model.config, block_size=4)
    cache.activate_past_recording()
    forward(model, ids[:, :50], cache)
    assert cache.num_blocks_held == 13
    cache.crop(-20)
    assert cache.get_seq_length() == 30
    assert cache.num_blocks_held == 5  # tokens 15 to 29 are visible: blocks 3 to 7
    again = forward(model, ids[:, 30:], cache)
    whole = forward(model, ids, PagedKVCache(model.config))
    torch.testing.assert_close(again, whole[:, 30:], atol=1e-4, rtol=0)
    cache.crop(0)
    cache.check()
    assert cache.num_blocks_held <= 5


def test_crop_behind_a_passed_window_needs_past_recording() -> None:
    model = zoo.build("gemma2")
    cache = PagedKVCache(model.config)
    forward(model, random_ids(1, 40), cache)
    with pytest.raises(PagedError, match="activate_past_recording"):
        cache.crop(-3)
    assert cache.get_seq_length(0) == cache.get_seq_length(1) == 40  # nothing was changed
    cache.check()


@pytest.mark.parametrize("amount", [-7, torch.tensor(-7), 14, torch.tensor(14)], ids=str)
def test_crop_takes_what_both_versions_hand_it(amount: int | torch.Tensor) -> None:
    model = zoo.build("llama")
    ids = random_ids(2, 21)
    cache = PagedKVCache(model.config, block_size=4)
    forward(model, ids, cache)
    cache.crop(amount)
    assert (cache.get_seq_length(), cache.num_blocks_held) == (14, 2 * 4)
    cache.crop(0)
    cache.crop(50)
    assert cache.get_seq_length() == 14
    cache.check()
    expected = forward(model, ids, PagedKVCache(model.config))[:, 14:]
    torch.testing.assert_close(forward(model, ids[:, 14:], cache), expected, atol=1e-4, rtol=0)


def test_a_deepcopy_and_its_original_go_their_own_ways() -> None:
    model = zoo.build("gemma2")
    prompt = random_ids(1, 40)
    prefix = PagedKVCache(model.config)
    forward(model, prompt, prefix)
    for seed in range(2):
        ids = torch.cat([prompt, torch.full((1, 3), 9 + seed)], dim=1)
        mask = torch.ones_like(ids)
        ours = generated(model, copy.deepcopy(prefix), input_ids=ids, attention_mask=mask)
        stock = generated(model, DynamicCache(config=model.config), input_ids=ids, attention_mask=mask)
        assert torch.equal(ours.sequences, stock.sequences)
        ours[CACHE_KEYWORD].check()
    assert prefix.get_seq_length() == 40
    prefix.check()


def test_a_reset_cache_takes_another_batch_and_type() -> None:
    cache = PagedKVCache()
    cache.update(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), 0)
    cache.reset()
    keys, values = torch.randn(4, 3, 9, 4, dtype=torch.float64), torch.randn(4, 3, 9, 4, dtype=torch.float64)
    cache.update(keys, values, 0)
    assert torch.equal(cache.layers[0].keys, keys)
    assert torch.equal(cache.layers[0].values, values)
    cache.check()


def test_keys_and_values_may_differ_in_shape_and_type_and_by_layer() -> None:
    cache = PagedKVCache(block_size=4)
    shapes = [((2, 8, torch.float32), (2, 8, torch.bfloat16)), ((1, 12, torch.float32), (3, 5, torch.float32))]
    seen: list[list[list[torch.Tensor]]] = [[[], []], [[], []]]  # layer, K or V, forward
    for num_new in (6, 1, 3):
        for layer_idx, specs in enumerate(shapes):
            new = [torch.randn(2, heads, num_new, dim).to(dtype) for heads, dim, dtype in specs]
            returned = cache.update(new[0], new[1], layer_idx)
            for history, tensor, out in zip(seen[layer_idx], new, returned, strict=True):
                history.append(tensor)
                assert out.dtype == tensor.dtype
                assert torch.equal(out, torch.cat(history, dim=2))


def test_a_cache_filled_in_inference_mode_is_written_under_no_grad() -> None:
    model = zoo.build("mistral")
    cache = PagedKVCache(model.config)
    with torch.inference_mode():
        model(random_ids(1, 20), use_cache=True, **{CACHE_KEYWORD: cache})
    forward(model, random_ids(1, 3), cache)
    assert cache.get_seq_length() == 23


def test_a_forward_with_gradients_leaves_a_cache_that_can_be_copied() -> None:
    model = zoo.build("llama")
    cache = PagedKVCache(model.config)
    for num_new in (5, 1):
        model(random_ids(1, num_new), use_cache=True, **{CACHE_KEYWORD: cache})
    assert not cache.layers[0].keys.requires_grad
    assert torch.equal(copy.deepcopy(cache).layers[0].keys, cache.layers[0].keys)


def test_a_batch_that_differs_from_the_cache_is_refused() -> None:
    model = zoo.build("llama")
    cache = PagedKVCache(model.config)
    forward(model, random_ids(1, 5), cache)
    with pytest.raises(PagedError, match="batch_repeat_interleave"):
        forward(model, random_ids(2, 1), cache)


def test_the_contract_that_generate_reads() -> None:
    cache = PagedKVCache(zoo.build("llama").config)
    assert cache.is_croppable
    assert not cache.is_compileable
    assert cache.is_linear == [False] * 3
    assert not hasattr(cache, "to")
    assert cache.layers[0].keys is None
    assert not cache.is_initialized
    assert cache.nbytes == cache.num_blocks_held == 0
    for call in ("reset", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices"):
        with pytest.raises(PagedError, match="on the cache"):
            getattr(cache.layers[0], call)(*([] if call == "reset" else [torch.tensor([0])]))
    with pytest.raises(PagedError, match="block_size"):
        PagedKVCache(block_size=0)


def change_rows(cache: Cache, rows: int, action: str, draws: list[int]) -> None:
    """One change of the rows, the same in every cache for the same draws."""
    picked = torch.tensor(draws) % rows
    if action == "reorder":
        cache.reorder_cache(picked[:rows])
    elif action == "repeat" and rows <= 3:
        cache.batch_repeat_interleave(1 + draws[0] % 2)
    elif action == "select":
        cache.batch_select_indices(picked[: 1 + draws[0] % 3])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_history_equals_dynamic_cache_tensor_for_tensor(data: st.DataObject) -> None:
    window, block_size = data.draw(st.integers(2, 12)), data.draw(st.sampled_from([1, 2, 4, 5]))
    config = Gemma2Config(num_hidden_layers=4, sliding_window=window)
    paged: Cache = PagedKVCache(config, block_size)
    stock: Cache = DynamicCache(config=config)
    recording = data.draw(st.booleans())
    if recording:
        paged.activate_past_recording()
        stock.activate_past_recording()
    rows = data.draw(st.integers(1, 3))
    for _ in range(data.draw(st.integers(1, 10))):
        num_new = data.draw(st.integers(1, 14))
        sizes = [paged.get_mask_sizes(num_new, layer_idx) for layer_idx in range(4)]
        assert sizes == [stock.get_mask_sizes(num_new, layer_idx) for layer_idx in range(4)]
        for layer_idx in range(4):
            keys, values = torch.randn(rows, 2, num_new, 3), torch.randn(rows, 2, num_new, 4)
            ours = paged.update(keys, values, layer_idx)
            theirs = stock.update(keys, values, layer_idx)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            assert ours[0].shape[2] == sizes[layer_idx][0]
        if recording:
            removed = data.draw(st.integers(0, num_new))
            paged.crop(-removed)
            stock.crop(-removed)
        paged.check()
        action = data.draw(st.sampled_from(["none", "reorder", "repeat", "select", "copy"]))
        if action == "copy":
            paged = copy.deepcopy(paged)
        elif paged.get_seq_length():
            draws = data.draw(st.lists(st.integers(0, 59), min_size=6, max_size=6))
            for cache in (paged, stock):
                change_rows(cache, rows, action, draws)
        paged.check()
        rows = stock.layers[0].keys.shape[0]
        assert paged.get_seq_length() == stock.get_seq_length()
