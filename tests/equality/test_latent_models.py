"""Latent attention models run packed, on the compressed cache, and give stock's tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_paged import PagedConfig, PagedEngine
from hf_paged.errors import PackedStepError, UnsupportedModelError
from hf_paged.integrations.engines import get_engine, num_fallbacks
from hf_paged.kernels.absorbed import UP_PROJECTION
from tests import zoo
from tests.equality.drive import pool_of_2048, run_requests, run_to_end, tokens_of
from tests.oracle import (
    assert_equal_batches,
    assert_rows_equal_solo,
    border_prompts,
    differing_tokens,
    left_pad,
    ragged_prompts,
    random_prompt,
    solo,
)

NEW = 10
PROMPTS = ragged_prompts(6, seed=3, longest=40)
IDS, MASK = left_pad(PROMPTS)
OPTIONS: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": NEW, "do_sample": False}


def projections(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, UP_PROJECTION)]


def paged(model: Any, **more: Any) -> torch.Tensor:
    out: torch.Tensor = model.generate(IDS, **OPTIONS, cache_implementation="paged", **more)
    return out


@pytest.mark.parametrize("name", zoo.LATENT)
def test_generate_gives_stocks_tokens_from_the_engine(name: str) -> None:
    model = zoo.fresh(name)
    rows = [row[IDS.shape[1] :].tolist() for row in paged(model, cache_config={"block_size": 8})]
    assert_rows_equal_solo(model, PROMPTS, rows, name, max_new_tokens=NEW)
    assert num_fallbacks(model) == 0
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["num_packed_tokens"] >= sum(map(len, PROMPTS))


@pytest.mark.parametrize(("name", "block_size"), [*((name, 8) for name in zoo.LATENT), ("deepseek_v3", 16)])
def test_chunked_prefill_and_prefix_hits(name: str, block_size: int) -> None:
    model, prompts = zoo.build(name), border_prompts(block_size, seed=5)
    with PagedEngine(model, pool_of_2048(block_size, max_batch_tokens=13)) as engine:
        for _ in range(2):  # the second time all prompts are cached
            outputs = run_requests(engine, prompts, max_new_tokens=NEW)
            assert_rows_equal_solo(model, prompts, tokens_of(outputs), name, max_new_tokens=NEW)
        assert engine.stats()["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("name", zoo.LATENT)
def test_preempted_sequences_go_on_as_if_nothing_had_happened(name: str) -> None:
    model, prompts = zoo.build(name), [random_prompt(30, seed) for seed in range(4)]
    settings = PagedConfig(block_size=8, num_blocks=14, enable_prefix_caching=False)
    with PagedEngine(model, settings) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=NEW)
        assert engine.stats()["num_preemptions"] > 0
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), name, max_new_tokens=NEW)


@pytest.mark.parametrize("backend", ["torch", "reference", "triton"])
def test_every_backend_has_it(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    model, prompts = zoo.build("deepseek_v3"), [random_prompt(length, 7) for length in (19, 3)]
    with PagedEngine(model, pool_of_2048(attention_backend=backend, max_batch_tokens=12)) as engine:
        outputs = run_requests(engine, prompts, max_new_tokens=3)
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), backend, max_new_tokens=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_takes_a_latent_and_a_rotary_key_a_layer(dtype: torch.dtype) -> None:
    model = zoo.fresh("deepseek_v3").to(dtype)
    config = model.config
    with PagedEngine(model, pool_of_2048()) as engine:
        run_requests(engine, PROMPTS[:2], max_new_tokens=2)
        held = engine.stats()["pool_bytes"] / 2048
    a_layer = (config.kv_lora_rank + config.qk_rope_head_dim) * dtype.itemsize
    assert held == config.num_hidden_layers * a_layer


def test_bfloat16_stays_as_close_to_float32_as_stock_does() -> None:
    exact, model = zoo.build("minicpm3"), zoo.fresh("minicpm3").to(torch.bfloat16)
    expected = [solo(exact, ids, max_new_tokens=NEW) for ids in PROMPTS]
    stock = [solo(model, ids, max_new_tokens=NEW) for ids in PROMPTS]
    ours = [row[IDS.shape[1] :].tolist() for row in paged(model)]
    assert num_fallbacks(model) == 0

    def differing(rows: list[list[int]]) -> int:
        return sum(differing_tokens(a, b) for a, b in zip(rows, expected, strict=True))

    assert differing(ours) <= differing(stock) + NEW


def test_autocast_runs_packed() -> None:
    model = zoo.fresh("deepseek_v2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = paged(model)
    assert out.shape == (len(PROMPTS), IDS.shape[1] + NEW)
    assert num_fallbacks(model) == 0


def test_a_weight_that_changes_between_calls_counts_at_once() -> None:
    model = zoo.fresh("youtu")
    before = paged(model)
    with torch.no_grad():
        for module in projections(model):
            module.kv_b_proj.weight.mul_(-0.5)
    after = paged(model)
    assert_equal_batches(after, model.generate(IDS, **OPTIONS))
    assert not torch.equal(before, after)
    assert num_fallbacks(model) == 0


def _biased(module: Any) -> None:
    module.kv_b_proj.bias = nn.Parameter(torch.ones(module.kv_b_proj.weight.shape[0]))


def _hooked(module: Any) -> None:
    module.kv_b_proj.register_forward_hook(lambda _module, _args, output: output * 1.5)


def _patched(module: Any) -> None:
    plain = module.kv_b_proj.forward
    module.kv_b_proj.forward = lambda latents: plain(latents) * 1.5


def _with_lora(module: Any) -> None:
    from peft.tuners.lora import Linear
    from peft.tuners.lora.config import LoraConfig

    linear = Linear(module.kv_b_proj, "default", config=LoraConfig(r=2), r=2, lora_alpha=2)
    nn.init.normal_(linear.lora_B["default"].weight)
    module.kv_b_proj = linear.eval()


class _Int8Linear(nn.Linear):
    """Its weight as codes and scales, and a Linear to everyone who asks, as bitsandbytes makes them."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        self.scales = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((plain.weight / self.scales).round().to(torch.int8), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight * self.scales)


def _quantised(module: Any) -> None:
    module.kv_b_proj = _Int8Linear(module.kv_b_proj)


CHANGES = [
    pytest.param(_biased, "has a bias", id="bias"),
    pytest.param(_hooked, "has forward hooks", id="hook"),
    pytest.param(_patched, "has a forward of its own", id="patch"),
    pytest.param(_with_lora, "is a Linear of peft.tuners.lora.layer", id="LoRA"),
    pytest.param(_quantised, "is a _Int8Linear of tests", id="quantised"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_a_projection_that_is_more_than_its_weight_runs_stocks_loop(
    change: Callable[[Any], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = zoo.fresh("deepseek_v3")
    for module in projections(model):
        change(module)
    with pytest.raises(UnsupportedModelError, match=f"compressed cache: kv_b_proj {reason}"):
        PagedEngine(model, pool_of_2048())
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        assert_equal_batches(paged(model), model.generate(IDS, **OPTIONS))
    assert num_fallbacks(model) == 1
    assert reason in caplog.text


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_a_projection_that_changes_under_an_engine_ends_its_requests(
    change: Callable[[Any], None], reason: str
) -> None:
    model = zoo.fresh("deepseek_v3")
    with PagedEngine(model, pool_of_2048()) as engine:
        run_requests(engine, PROMPTS[:1], max_new_tokens=2)
        for module in projections(model):
            change(module)
        request = engine.add_request(PROMPTS[1], max_new_tokens=2)
        error = run_to_end(engine, [request])[request].error
        assert isinstance(error, PackedStepError)
        assert f"compressed cache: kv_b_proj {reason}" in str(error)


def test_a_projection_that_only_moves_its_inputs_is_plain() -> None:
    """As accelerate leaves every layer of a model that is spread over devices without offload."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    model = zoo.fresh("deepseek_v3")
    expected = model.generate(IDS, **OPTIONS)
    for module in projections(model):
        hooks.add_hook_to_module(module.kv_b_proj, hooks.AlignDevicesHook("cpu"))
    assert_equal_batches(paged(model), expected)
    assert num_fallbacks(model) == 0


def test_attention_to_selected_keys_is_refused() -> None:
    model = zoo.fresh("deepseek_v3")
    for module in projections(model):
        module.register_forward_pre_hook(
            lambda _module, args, options: (args, {**options, "indices": torch.zeros(1, 2, 2)}), with_kwargs=True
        )
    with pytest.raises(UnsupportedModelError, match="selected keys"):
        PagedEngine(model, pool_of_2048())


def test_an_adapter_that_comes_between_two_calls_runs_as_stock() -> None:
    model = zoo.fresh("deepseek_v3")
    plain = model.generate(IDS, **OPTIONS)
    assert_equal_batches(paged(model), plain)
    assert num_fallbacks(model) == 0
    module = projections(model)[0]
    projection = module.kv_b_proj
    _with_lora(module)
    assert_equal_batches(paged(model), model.generate(IDS, **OPTIONS))
    module.kv_b_proj = projection
    assert_equal_batches(paged(model), plain)
