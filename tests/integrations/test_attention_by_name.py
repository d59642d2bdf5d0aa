"""`attn_implementation="hf_paged"` as the user's own choice: every forward gives what the model gave before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_paged
from hf_paged.compat import CACHE_KEYWORD
from tests import zoo
from tests.oracle import assert_equal_batches, left_pad, ragged_prompts

PROMPTS = ragged_prompts(3, seed=17, shortest=3, longest=40)
IMAGE_TOKEN = 99


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PreTrainedModel, PreTrainedModel]]:
    """Every model as it is, and loaded from its folder under our name."""
    loaded = {}
    for name in zoo.ARCHITECTURES:
        folder = tmp_path_factory.mktemp(name)
        stock = zoo.build(name)
        stock.save_pretrained(folder)
        ours = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="hf_paged", dtype=torch.float32)
        assert ours.config._attn_implementation == "hf_paged"
        loaded[name] = (stock, ours)
    return loaded


def _close(ours: torch.Tensor, stock: torch.Tensor) -> None:
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_a_plain_forward_with_padding(name: str, pairs: Any) -> None:
    stock, ours = pairs[name]
    ids, mask = left_pad(PROMPTS)
    real = mask.bool()
    with torch.no_grad():
        expected, actual = (model(ids, attention_mask=mask, use_cache=False).logits for model in (stock, ours))
    _close(actual[real], expected[real])


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_a_forward_on_a_cache_of_stock_s_own(name: str, pairs: Any) -> None:
    ids = torch.tensor([PROMPTS[0]])
    found = []
    for model in pairs[name]:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :-1], use_cache=True, **{CACHE_KEYWORD: cache})
            found.append(model(ids[:, -1:], use_cache=True, **{CACHE_KEYWORD: cache}).logits)
    _close(found[1], found[0])


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_a_training_step(name: str) -> None:
    model = zoo.fresh(name).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # its draws would differ
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    found = []
    for implementation in (model.config._attn_implementation, "hf_paged"):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        loss = model(ids, labels=ids, use_cache=False).loss
        embeddings = model.get_input_embeddings().weight
        found.append((loss.detach(), *torch.autograd.grad(loss, embeddings)))
    for ours, stock in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_generate_stock_and_paged(name: str, pairs: Any) -> None:
    stock, ours = pairs[name]
    ids, mask = left_pad(PROMPTS)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6}
    expected = stock.generate(ids, **options)
    assert_equal_batches(ours.generate(ids, **options), expected, name)
    assert_equal_batches(ours.generate(ids, cache_implementation="paged", **options), expected, name)
    assert hf_paged.get_engine(ours).stats()["num_fallbacks"] == 0
    assert ours.config._attn_implementation == "hf_paged"


def test_a_vision_tower_and_its_language_model() -> None:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28,
            patch_size=14,
        ),
        text_config=LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1,
        ),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(3)
    model = LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN, 7, 8]])
    pixels = torch.randn(1, 3, 28, 28)
    inputs = {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        expected = model(**inputs).logits
        for choice in ("hf_paged", {"text_config": "hf_paged"}, {"vision_config": "hf_paged"}):
            model.set_attn_implementation("sdpa")
            model.set_attn_implementation(choice)
            _close(model(**inputs).logits, expected)


def test_an_encoder_sees_both_ways() -> None:
    torch.manual_seed(4)
    config = BertConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = BertModel(config).eval()
    ids, mask = left_pad(PROMPTS)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
        model.set_attn_implementation("hf_paged")
        assert model.config._attn_implementation == "hf_paged"
        actual = model(ids, attention_mask=mask).last_hidden_state
    _close(actual[mask.bool()], expected[mask.bool()])


def test_a_bias_of_the_model_s_own_outside_a_packed_step(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = T5Config(vocab_size=128, d_model=32, d_ff=48, num_layers=2, num_heads=2, d_kv=16, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    ids, mask = left_pad(PROMPTS)
    stock = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    model.save_pretrained(tmp_path)
    ours = T5ForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="hf_paged")
    assert_equal_batches(ours.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False), stock)
