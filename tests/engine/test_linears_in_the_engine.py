"""The engine with its linear layers computed natively: stock's tokens, and a model that nothing happened to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_paged import PagedConfig, PagedEngine, get_engine, num_fallbacks, release
from hf_paged.errors import ConfigError
from hf_paged.kernels.cpu.build import BuildError
from tests.equality.drive import pool_of_2048, run_requests, tokens_of
from tests.linears.built import needs_native
from tests.oracle import assert_equal_batches, assert_equal_tokens, assert_rows_equal_solo, left_pad, ragged_prompts
from tests.zoo import ARCHITECTURES, LATENT, PAD_TOKEN_ID, fresh
from tests.zoo import build as built_model

NEW = 8
PROMPTS = ragged_prompts(5, seed=61, shortest=2, longest=40)
IDS, MASK = left_pad(PROMPTS)
OPTIONS: dict[str, Any] = {
    "attention_mask": MASK,
    "max_new_tokens": NEW,
    "do_sample": False,
    "pad_token_id": PAD_TOKEN_ID,
}
NATIVE = {"cache_implementation": "paged", "cache_config": PagedConfig(linear_backend="native")}


def _num_products(model: Any) -> int:
    engine = get_engine(model)
    assert engine is not None
    return engine.core.runner.linears.num_products


@needs_native
@pytest.mark.parametrize("name", [*ARCHITECTURES, *LATENT[:2]])
def test_tokens_are_stock_s(name: str) -> None:
    model = built_model(name)
    engine = PagedEngine(model, pool_of_2048(linear_backend="native", max_batch_tokens=32))
    assert_rows_equal_solo(
        model, PROMPTS, tokens_of(run_requests(engine, PROMPTS, max_new_tokens=NEW)), name, max_new_tokens=NEW
    )
    assert engine.core.runner.linears.num_products > 0


@needs_native
def test_q_k_v_and_gate_up_are_joined() -> None:
    engine = PagedEngine(built_model("llama"), pool_of_2048(linear_backend="native"))
    assert engine.core.runner.linears.groups == [3, 2] * 3


@needs_native
def test_rows_beyond_the_crossover_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.linears.swap.LEAST_BYTES", 0)
    monkeypatch.setattr("hf_paged.linears.forward.SURE_ROWS", 8)
    asked = []
    monkeypatch.setattr("hf_paged.linears.forward.measured_limit", lambda *arguments: asked.append(arguments) or 16)
    model = built_model("llama")
    engine = PagedEngine(model, pool_of_2048(max_batch_tokens=32))
    linears = engine.core.runner.linears
    before = linears.num_products
    outputs = run_requests(engine, PROMPTS[:1] * 3, max_new_tokens=NEW)
    assert_rows_equal_solo(model, PROMPTS[:1] * 3, tokens_of(outputs), max_new_tokens=NEW)
    assert 0 < linears.num_products - before < engine.stats()["num_steps"] * 22
    assert len(asked) == 3 * 7, "once a layer; the head has few rows"


@needs_native
def test_tokens_do_not_depend_on_the_batch() -> None:
    model = fresh("llama").bfloat16()
    engine = PagedEngine(model, pool_of_2048(linear_backend="native", enable_prefix_caching=False))
    together = tokens_of(run_requests(engine, PROMPTS, max_new_tokens=NEW))
    alone = [tokens_of(run_requests(engine, [prompt], max_new_tokens=NEW))[0] for prompt in PROMPTS]
    for one, other in zip(together, alone, strict=True):
        assert_equal_tokens(one, other)


@needs_native
def test_the_model_outside_of_a_step_is_the_caller_s() -> None:
    model = fresh("llama")
    untouched = copy.deepcopy(model)
    expected = model.generate(IDS, **OPTIONS)
    logits = model(IDS).logits
    for _ in range(2):
        assert_equal_batches(model.generate(IDS, **OPTIONS, **NATIVE), expected)
        assert num_fallbacks(model) == 0
        for (name, module), (_, plain) in zip(model.named_modules(), untouched.named_modules(), strict=True):
            assert module.__dict__.keys() == plain.__dict__.keys(), name
        assert torch.equal(model(IDS).logits, logits), "a plain forward is torch's, to the last bit"
        state, before = model.state_dict(), untouched.state_dict()
        assert all(torch.equal(state[name], before[name]) for name in before)
        assert torch.equal(copy.deepcopy(model)(IDS).logits, logits)
        release(model)
    assert torch.equal(model(IDS).logits, logits)


@needs_native
def test_training_steps_between_generations_are_seen() -> None:
    model = fresh("llama")
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for _ in range(3):
        seen.append(model.generate(IDS, **OPTIONS, **NATIVE))
        assert_equal_batches(seen[-1], model.generate(IDS, **OPTIONS))
        model.train()
        model(IDS, labels=IDS).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        model.eval()
    assert not torch.equal(seen[0], seen[2])
    model.load_state_dict(fresh("llama").state_dict())
    assert_equal_batches(model.generate(IDS, **OPTIONS, **NATIVE), seen[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5
    assert_equal_batches(model.generate(IDS, **OPTIONS, **NATIVE), model.generate(IDS, **OPTIONS))
    assert _num_products(model) > 0


@needs_native
def test_a_layer_that_is_replaced_is_found_at_the_next_call() -> None:
    model = fresh("llama")
    model.generate(IDS, **OPTIONS, **NATIVE)
    head = torch.nn.Linear(64, model.config.vocab_size, bias=False)
    torch.nn.init.normal_(head.weight)
    model.lm_head = head
    assert_equal_batches(model.generate(IDS, **OPTIONS, **NATIVE), model.generate(IDS, **OPTIONS))
    assert _layers_a_step(model) == 3 * 7 + 1, "the new head among them"


def _layers_a_step(model: Any) -> int:
    engine = get_engine(model)
    assert engine is not None
    before, steps = _num_products(model), engine.stats()["num_steps"]
    model.generate(IDS, **{**OPTIONS, "max_new_tokens": 3}, **NATIVE)
    return (_num_products(model) - before) // (engine.stats()["num_steps"] - steps)


def test_stock_s_layers_on_request_and_for_small_models() -> None:
    for options in ({"linear_backend": "torch"}, {}):
        engine = PagedEngine(built_model("llama"), pool_of_2048(**options))
        run_requests(engine, PROMPTS, max_new_tokens=2)
        assert engine.core.runner.linears.num_products == 0


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_libraries() -> None:
        raise BuildError("there is no C compiler")

    monkeypatch.setattr("hf_paged.linears.native.load_libraries", load_libraries)
    monkeypatch.setattr("hf_paged.linears.swap.LEAST_BYTES", 0)
    model = built_model("llama")
    engine = PagedEngine(model, pool_of_2048())
    assert_rows_equal_solo(
        model, PROMPTS, tokens_of(run_requests(engine, PROMPTS, max_new_tokens=NEW)), max_new_tokens=NEW
    )
    assert engine.core.runner.linears.num_products == 0
    with pytest.raises(ConfigError, match="'native' can't run here: there is no C compiler; choose"):
        PagedEngine(model, pool_of_2048(linear_backend="native"))


def test_an_unknown_linear_backend() -> None:
    with pytest.raises(ConfigError, match="linear_backend must be one of auto, native, torch"):
        PagedConfig(linear_backend="packed")
