"""`generate` and the engine through the Triton kernels, under Triton's interpreter, equal to stock token by token."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.errors import ConfigError, PagedError
from hf_paged.kernels.registry import available_backends, resolve_backend
from tests import zoo
from tests.equality.drive import run_requests, tokens_of
from tests.oracle import assert_equal_batches, assert_rows_equal_solo, left_pad, random_prompt

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

NEW = 3
# Few and short, since an interpreted program takes milliseconds; still past the window, and over several blocks.
PROMPTS = [random_prompt(length, seed=length) for length in (5, 22)]
# Grouped heads; a window everywhere; alternating windows with softcap; sinks, and experts
MODELS = ("llama", "mistral", "gemma2", "gpt_oss")


def _kernels_ran(engine: PagedEngine) -> set[str]:
    return {type(engine.core.runner.backend).name} if engine.stats()["num_attention_calls"] else set()


@pytest.mark.parametrize("name", MODELS)
def test_generate_whole_equals_stock(name: str) -> None:
    model = zoo.fresh(name, num_hidden_layers=2)
    ids, mask = left_pad(PROMPTS)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW}
    stock = model.generate(ids, **options)
    config = PagedConfig(block_size=8, max_batch_tokens=20, attention_backend="triton")  # prefilled in chunks
    ours = model.generate(ids, cache_implementation="paged", cache_config=config, **options)
    assert_equal_batches(ours, stock, name)
    assert_rows_equal_solo(model, PROMPTS, ours[:, ids.shape[1] :].tolist(), name, max_new_tokens=NEW)
    engine = hf_paged.get_engine(model)
    assert engine.stats()["num_fallbacks"] == 0
    assert _kernels_ran(engine) == {"triton"}


def test_preemption_equals_stock() -> None:
    model = zoo.fresh("llama", num_hidden_layers=1)
    prompts = [random_prompt(7, seed=seed) for seed in (1, 2)]  # each grows from one block to two
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=3, attention_backend="triton")) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=6)
        assert engine.stats()["num_preemptions"] > 0
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), max_new_tokens=6)


def test_siblings_that_share_an_unfull_block_and_a_prefix_equal_those_of_the_torch_backend() -> None:
    model = zoo.fresh("llama", num_hidden_layers=1)
    prompt = random_prompt(19, seed=4)
    found = []
    for backend in ("torch", "triton"):
        with PagedEngine(model, PagedConfig(block_size=8, num_blocks=16, attention_backend=backend)) as engine:
            for _ in range(2):
                output = run_requests(
                    engine, [prompt], num_return_sequences=2, do_sample=True, seed=5, max_new_tokens=3
                )
                found.append([list(sibling.token_ids) for sibling in output[0].outputs])
            assert engine.stats()["prefix_hit_tokens"] == 16
    assert found[0][0] != found[0][1]
    assert found == [found[0]] * 4


def test_latent_attention_equals_stock() -> None:
    model = zoo.build("deepseek_v3")
    config = PagedConfig(block_size=8, num_blocks=64, max_batch_tokens=32, attention_backend="triton")
    with PagedEngine(model, config) as engine:
        outputs = run_requests(engine, PROMPTS, max_new_tokens=2)
    assert_rows_equal_solo(model, PROMPTS, tokens_of(outputs), max_new_tokens=2)


def test_a_cpu_takes_the_interpreter_only_when_asked_for_by_name() -> None:
    assert type(resolve_backend("auto", "cpu")).name != "triton"
    assert type(resolve_backend("triton", "cpu")).name == "triton"


def test_without_a_gpu_and_the_interpreter_the_name_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert available_backends("cpu")["triton"] == "Triton's kernels need a CUDA or ROCm device"
    with pytest.raises(ConfigError, match="'triton' can't run on cpu: Triton's kernels need a CUDA or ROCm device"):
        PagedEngine(zoo.build("llama"), PagedConfig(attention_backend="triton"))


def test_float64_is_refused_with_what_to_choose() -> None:
    model = zoo.fresh("llama").double()
    with pytest.raises(PagedError, match="attention_backend='torch'"):
        PagedEngine(model, PagedConfig(attention_backend="triton", num_blocks=8))
    with PagedEngine(model, PagedConfig(num_blocks=64)) as engine:
        assert engine.generate([[1, 2, 3]], max_new_tokens=2)
    assert torch.get_default_dtype() == torch.float32
