"""Wrapped, offloaded, compiled, training, autocast: the model as it is given, and given back as it was."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import peft
import peft.helpers
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_paged import PagedConfig, PagedEngine, get_engine, num_fallbacks
from hf_paged.errors import EngineClosedError, UnsupportedModelError
from tests.oracle import assert_equal_batches, assert_equal_tokens, left_pad, ragged_prompts, solo
from tests.zoo import PAD_TOKEN_ID, build, fresh

NEW = 8
PROMPTS = ragged_prompts(4, seed=51, shortest=3, longest=20)
IDS, MASK = left_pad(PROMPTS)
OPTIONS: dict[str, Any] = {
    "attention_mask": MASK,
    "max_new_tokens": NEW,
    "do_sample": False,
    "pad_token_id": PAD_TOKEN_ID,
}


def _assert_paged_equals_stock(model: Any, num_fallbacks: int = 0) -> None:
    expected = model.generate(input_ids=IDS, **OPTIONS)
    actual = model.generate(input_ids=IDS, **OPTIONS, cache_implementation="paged")
    assert_equal_batches(actual, expected)
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["num_fallbacks"] == num_fallbacks
    engine.check()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_offloaded_to_the_cpu(name: str) -> None:
    model = fresh(name)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert next(model.parameters()).device.type == "meta"
    _assert_paged_equals_stock(model)
    _assert_paged_equals_stock(model)
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["prefix_hit_tokens"] == 0, "weights that can't be looked at keep no prefixes between calls"


def test_offloaded_to_disk(tmp_path: Path) -> None:
    model = fresh("llama")
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    _assert_paged_equals_stock(model)


def test_weights_made_in_inference_mode_keep_no_prefixes() -> None:
    with torch.inference_mode():
        model = fresh("llama")
    assert next(model.parameters()).is_inference()
    for _ in range(2):
        _assert_paged_equals_stock(model)
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["prefix_hit_tokens"] == 0


def test_compiled_model_and_compiled_layers() -> None:
    model = fresh("llama")
    expected = [solo(model, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    engine = PagedEngine(torch.compile(model, backend="eager"), PagedConfig(block_size=8, num_blocks=64))
    for tokens, output in zip(expected, engine.generate(PROMPTS, max_new_tokens=NEW), strict=True):
        assert_equal_tokens(output.token_ids, tokens)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
    engine = PagedEngine(model, PagedConfig(block_size=8, num_blocks=64))
    for tokens, output in zip(expected, engine.generate(PROMPTS, max_new_tokens=NEW), strict=True):
        assert_equal_tokens(output.token_ids, tokens)


def test_training_mode_with_gradient_checkpointing() -> None:
    model = fresh("llama", attention_dropout=0.1)
    expected = model.generate(IDS, **OPTIONS)
    model.train()
    model.gradient_checkpointing_enable()
    actual = model.generate(IDS, **OPTIONS, cache_implementation="paged")
    assert_equal_batches(actual, expected)
    assert all(module.training for module in model.modules())
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_autocast(name: str) -> None:
    model = fresh(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(IDS[:1, -3:]).logits
        paged = model.generate(IDS, **OPTIONS, cache_implementation="paged")
    assert logits.isfinite().all()
    assert paged.shape == (len(PROMPTS), IDS.shape[1] + NEW)
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["num_fallbacks"] == 0
    _assert_paged_equals_stock(model)  # and outside of it, with a pool of float32 again


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_run_on_the_engine(dtype: torch.dtype) -> None:
    model = fresh("llama").to(dtype)
    paged = model.generate(IDS, **OPTIONS, cache_implementation="paged")
    stock = model.generate(IDS, **OPTIONS)
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["num_fallbacks"] == 0
    # rounding decides near ties, so only the first new token of every row is sure to be the same
    assert_equal_tokens(paged[:, IDS.shape[1]].tolist(), stock[:, IDS.shape[1]].tolist())


def test_keys_and_values_stored_in_another_type() -> None:
    config = PagedConfig(k_dtype="bfloat16", v_dtype=torch.float16, num_blocks=64, block_size=8)  # type: ignore[arg-type]
    engine = PagedEngine(build("llama"), config)
    storage = engine.core.runner.cache.storages[0]  # type: ignore[union-attr]
    assert (storage.blocks.keys.dtype, storage.blocks.values.dtype) == (torch.bfloat16, torch.float16)
    first = [output.token_ids[0] for output in engine.generate(PROMPTS, max_new_tokens=NEW)]
    assert_equal_tokens(first, [solo(build("llama"), prompt, max_new_tokens=1)[0] for prompt in PROMPTS])


def _adapted() -> Any:
    lora = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(fresh("llama"), lora)
    model.add_adapter("other", lora)
    return model.eval()


def test_adapters_change_tokens_and_share_no_prefixes() -> None:
    model = _adapted()
    rows = []
    for adapter in ("default", "other", "default"):
        model.set_adapter(adapter)
        expected = model.generate(input_ids=IDS, **OPTIONS)
        assert_equal_batches(model.generate(input_ids=IDS, **OPTIONS, cache_implementation="paged"), expected)
        rows.append(expected[:, IDS.shape[1] :].tolist())
    assert rows[0] == rows[2] != rows[1]
    with peft.helpers.rescale_adapter_scale(model, 0.25):
        rescaled = model.generate(input_ids=IDS, **OPTIONS)
        assert rescaled[:, IDS.shape[1] :].tolist() != rows[0]
        assert_equal_batches(model.generate(input_ids=IDS, **OPTIONS, cache_implementation="paged"), rescaled)
    with model.disable_adapter():
        _assert_paged_equals_stock(model)
    merged = model.merge_and_unload()
    _assert_paged_equals_stock(merged)


def test_torchao_weights() -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed on this platform")
    model = fresh("llama")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    for _ in range(2):
        _assert_paged_equals_stock(model)
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["prefix_hit_tokens"] == 0, "weights that can't be looked at keep no prefixes between calls"


@pytest.mark.parametrize(("bits", "on_engine"), [(4, True), (8, False)])
def test_bitsandbytes_weights(bits: int, on_engine: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed on this platform")
    fresh("llama").save_pretrained(tmp_path)
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    expected = model.generate(input_ids=IDS, **OPTIONS)
    for _ in range(2):
        assert_equal_batches(model.generate(input_ids=IDS, **OPTIONS, cache_implementation="paged"), expected)
    # the 8-bit product treats a column as an outlier by all rows of a batch, so a row depends on its neighbours
    assert (num_fallbacks(model) == 0) == on_engine


def test_a_wrapper_of_something_else_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear"):
        PagedEngine(torch.nn.Linear(2, 2))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_child_needs_an_engine_of_its_own() -> None:
    model = build("llama")
    engine = PagedEngine(model, PagedConfig(num_blocks=64))
    expected = engine.generate(PROMPTS[:1], max_new_tokens=NEW)[0].token_ids
    model.generate(IDS, **OPTIONS, cache_implementation="paged")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                engine.generate(PROMPTS[:1], max_new_tokens=NEW)
            except EngineClosedError:
                own = PagedEngine(model, PagedConfig(num_blocks=64))
                code = 0 if own.generate(PROMPTS[:1], max_new_tokens=NEW)[0].token_ids == expected else 2
                model.generate(IDS, **OPTIONS, cache_implementation="paged")
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
