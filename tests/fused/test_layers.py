"""Decoder layers in one call: where they are, that tokens are stock's, and when a layer runs as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GraniteConfig, Qwen2Config

from hf_paged import PagedConfig, PagedEngine
from hf_paged.fused import layers
from hf_paged.fused.layer_program import LayerProgram
from tests.equality.drive import pool_of_2048, run_requests, tokens_of
from tests.fused.built import needs_fused
from tests.oracle import assert_rows_equal_solo
from tests.zoo import SHARED, draw_weights, fresh

pytestmark = needs_fused

NEW = 12
PROMPTS = [[5, 9, 2, 7], list(range(3, 40)), [8] * 19, list(range(90, 4, -1))]


def _drawn(name: str, config: Any) -> Any:
    model = AutoModelForCausalLM.from_config(config).eval()
    draw_weights(model, name, seed=0)
    return model


def _qwen2() -> Any:  # biases of q, k and v
    return _drawn("qwen2", Qwen2Config(**{**SHARED, "num_hidden_layers": 2}))


def _granite() -> Any:
    return _drawn("granite", GraniteConfig(**{**SHARED, "num_hidden_layers": 2, "residual_multiplier": 0.5}))


def _engine(model: Any, **options: Any) -> PagedEngine:
    return PagedEngine(model, pool_of_2048(linear_backend="native", **options))


def _whole(engine: PagedEngine) -> int:
    """Layers a step that ran in one call, of the steps since the engine was made."""
    before, steps = engine.core.runner.fused.num_layers, engine.stats()["num_steps"]
    run_requests(engine, [[4, 5, 6]], max_new_tokens=4)
    return (engine.core.runner.fused.num_layers - before) // (engine.stats()["num_steps"] - steps)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_batch_tokens", [16, 256])
def test_whole_layers_give_stock_s_tokens(name: str, max_batch_tokens: int) -> None:
    model = _qwen2() if name == "qwen2" else fresh(name)
    engine = _engine(model, max_batch_tokens=max_batch_tokens)
    outputs = run_requests(engine, PROMPTS, max_new_tokens=NEW)
    assert_rows_equal_solo(model, PROMPTS, tokens_of(outputs), name, max_new_tokens=NEW)
    assert _whole(engine) == model.config.num_hidden_layers


def test_rows_whose_length_is_bad_for_a_cache_are_taken_apart() -> None:
    model = fresh("llama", hidden_size=1024, num_hidden_layers=1)
    engine = _engine(model)
    outputs = run_requests(engine, PROMPTS, max_new_tokens=4)
    assert_rows_equal_solo(model, PROMPTS, tokens_of(outputs), max_new_tokens=4)
    assert _whole(engine) == 1


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "phi3", "mixtral"])
def test_other_layers_run_as_they_are(name: str) -> None:
    engine = _engine(fresh(name))
    run_requests(engine, PROMPTS[:2], max_new_tokens=2)
    assert _whole(engine) == 0


def test_a_layer_that_only_looks_alike_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # granite's layer is built of the same modules, and scales what they give: suppose that its code were known
    monkeypatch.setattr(layers, "is_known", lambda layer, attention: True)
    model = _granite()
    engine = _engine(model)
    assert [one for one in engine.core.runner.fused._forwards if isinstance(one, layers.LayerForward)]
    outputs = run_requests(engine, PROMPTS, max_new_tokens=NEW)
    assert_rows_equal_solo(model, PROMPTS, tokens_of(outputs), max_new_tokens=NEW)
    assert _whole(engine) == 0


def _hook(layer: nn.Module) -> Any:
    return layer.self_attn.o_proj.register_forward_hook(lambda module, inputs, output: output * 0.5)


def _own_forward(layer: nn.Module) -> Any:
    class Owner:
        def remove(self) -> None:
            del layer.mlp.forward

    stock = type(layer.mlp).forward
    layer.mlp.forward = lambda x: stock(layer.mlp, x) * 0.5
    return Owner()


def _other_module(layer: nn.Module) -> Any:
    class Owner:
        before = layer.mlp.act_fn

        def remove(self) -> None:
            layer.mlp.act_fn = self.before

    layer.mlp.act_fn = nn.ReLU()
    return Owner()


@pytest.mark.parametrize("change", [_hook, _own_forward, _other_module])
def test_a_change_below_a_layer_is_heard_at_the_next_step(change: Any) -> None:
    model = fresh("llama")
    engine = _engine(model, enable_prefix_caching=False)
    before = tokens_of(run_requests(engine, PROMPTS, max_new_tokens=NEW))
    assert _whole(engine) == 3
    owner = change(model.model.layers[1])
    changed = tokens_of(run_requests(engine, PROMPTS, max_new_tokens=NEW))
    assert _whole(engine) == 2
    assert_rows_equal_solo(model, PROMPTS, changed, max_new_tokens=NEW)
    assert changed != before
    owner.remove()
    assert tokens_of(run_requests(engine, PROMPTS, max_new_tokens=NEW)) == before
    assert _whole(engine) == 3


def test_new_weights_are_read() -> None:
    model = fresh("llama")
    engine = _engine(model, enable_prefix_caching=False)
    run_requests(engine, PROMPTS, max_new_tokens=NEW)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.flip(0).contiguous()
    outputs = run_requests(engine, PROMPTS, max_new_tokens=NEW)
    assert_rows_equal_solo(model, PROMPTS, tokens_of(outputs), max_new_tokens=NEW)
    assert _whole(engine) == 3


@pytest.mark.parametrize("dtypes", [{"k_dtype": "int8"}, {"v_dtype": "bfloat16"}], ids=str)
def test_a_cache_that_has_to_be_converted_to_is_written_by_the_layer_itself(dtypes: dict[str, str]) -> None:
    engine = _engine(fresh("llama"), **dtypes)
    run_requests(engine, PROMPTS, max_new_tokens=2)
    assert _whole(engine) == 0


def test_hidden_states_are_not_overwritten_by_later_layers() -> None:
    model = fresh("llama")
    engine = _engine(model)
    run_requests(engine, PROMPTS, max_new_tokens=2)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: seen.append((output, output.clone())))
        for layer in model.model.layers
    ]
    assert _whole(engine) == 3, "hooks of the layer itself see it from outside"
    for hook in hooks:
        hook.remove()
    assert len(seen) >= 3
    assert all(torch.equal(output, copy) for output, copy in seen)


def test_a_clock_is_told_each_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(fresh("qwen3"))
    run_requests(engine, PROMPTS, max_new_tokens=2)
    told: list[tuple[str, float]] = []
    monkeypatch.setattr(LayerProgram, "clock", staticmethod(lambda *one: told.append(one)))
    assert _whole(engine) == 2
    attention = ["rms_norm", "product", "rms_norm", "rms_norm", "rotary", "write", "attend", "product", "add"]
    names = [*attention, "rms_norm", "product", "gate", "product", "add"]
    assert [name for name, _ in told[: len(names)]] == names
    assert min(seconds for _, seconds in told) > 0


def test_the_torch_backend_has_no_whole_layers() -> None:
    model = fresh("llama")
    engine = PagedEngine(model, PagedConfig(num_blocks=64, linear_backend="torch"))
    run_requests(engine, PROMPTS, max_new_tokens=2)
    assert _whole(engine) == 0
