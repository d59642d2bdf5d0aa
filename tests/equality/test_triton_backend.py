"""`generate` and the engine through the Triton kernels, under Triton's interpreter, equal to stock token by token."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from hf_paged import PagedConfig, PagedEngine
from hf_paged.errors import ConfigError, PagedError
from hf_paged.kernels.registry import available_backends, resolve_backend
from tests import zoo
from tests.equality.backends import check_generate, check_preemption, check_siblings
from tests.equality.drive import run_requests, tokens_of
from tests.oracle import assert_rows_equal_solo, random_prompt

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

NEW = 3
# Few and short, since an interpreted program takes milliseconds; still past the window, and over several blocks.
PROMPTS = [random_prompt(length, seed=length) for length in (5, 22)]
# Grouped heads; a window everywhere; alternating windows with softcap; sinks, and experts
MODELS = ("llama", "mistral", "gemma2", "gpt_oss")


@pytest.mark.parametrize("name", MODELS)
def test_generate_whole_equals_stock(name: str) -> None:
    model = zoo.fresh(name, num_hidden_layers=2)
    check_generate(model, "triton", PROMPTS, name, max_new_tokens=NEW, max_batch_tokens=20)


def test_preemption_equals_stock() -> None:
    check_preemption(zoo.fresh("llama", num_hidden_layers=1), "triton")


def test_siblings_that_share_an_unfull_block_and_a_prefix_equal_those_of_the_torch_backend() -> None:
    check_siblings(zoo.fresh("llama", num_hidden_layers=1), "triton", max_new_tokens=3)


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
