"""What of a model is found and runs fused, what is left alone, and that the model is untouched outside."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from hf_paged.fused import rotary
from hf_paged.fused.swap import FusedSwap
from hf_paged.linears.swap import LinearSwap
from tests.fused.built import needs_fused
from tests.zoo import fresh

pytestmark = needs_fused

IDS = torch.arange(1, 8)[None]


def _swap(model: nn.Module) -> FusedSwap:
    swap = FusedSwap("native")
    swap.look(model, LinearSwap("torch"))
    return swap


def _inside(swap: FusedSwap, model: nn.Module) -> torch.Tensor:
    with torch.no_grad(), swap.installed():
        logits: torch.Tensor = model(IDS).logits
    return logits


def _outside(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(IDS).logits
    return logits


def _assert_untouched(model: nn.Module) -> None:
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
    names = {type(module).__module__ for module in model.modules()}
    for name in names:
        function = getattr(sys.modules[name], rotary.FUNCTION, None)
        assert not isinstance(function, rotary._StandIn)


# norms: two a layer and the last; gates and rotary: one a layer
@pytest.mark.parametrize(
    ("name", "a_layer", "once"),
    [("llama", 4, 1), ("mistral", 4, 1), ("qwen3", 6, 1), ("gemma2", 6, 1), ("gpt2", 0, 0)],
)
def test_what_is_found_in_a_model(name: str, a_layer: int, once: int) -> None:
    model = fresh(name)
    swap = _swap(model)
    expected = _outside(model)
    found = _inside(swap, model)
    assert swap.num_calls == a_layer * model.config.num_hidden_layers + once
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    _assert_untouched(model)


def test_the_model_comes_back_after_an_exception() -> None:
    model = fresh("llama")
    swap = _swap(model)
    with pytest.raises(KeyError), swap.installed():
        raise KeyError
    _assert_untouched(model)


def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    class CentredRMSNorm(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))

    model = fresh("llama")
    plain = _swap(model)
    _inside(plain, model)
    model.model.norm.__class__ = CentredRMSNorm
    swap = _swap(model)
    torch.testing.assert_close(_inside(swap, model), _outside(model), rtol=1e-4, atol=1e-5)
    assert swap.num_calls == plain.num_calls - 1


def test_a_norm_that_is_given_a_gate_runs_as_it_is() -> None:
    class GatedRMSNorm(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(hidden_states if gate is None else hidden_states * gate)

    model = fresh("llama")
    norm = model.model.norm
    norm.__class__ = GatedRMSNorm
    swap = _swap(model)
    x, gate = torch.randn(1, 3, model.config.hidden_size), torch.randn(1, 3, model.config.hidden_size)
    with torch.no_grad():
        expected = [norm(x), norm(x, gate), norm(x, gate=gate)]
        with swap.installed():
            found = [norm(x), norm(x, gate), norm(x, gate=gate)]
    torch.testing.assert_close(found, expected)
    assert swap.num_calls == 1


def test_modules_that_want_something_else_are_left_alone() -> None:
    class NeedyRMSNorm(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(hidden_states) * gate.sigmoid()  # type: ignore[union-attr]

    class NeedyMLP(modeling_llama.LlamaMLP):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, weights: dict[str, float] | None = None) -> torch.Tensor:
            return super().forward(x) * weights["of this layer"]  # type: ignore[index]

    model = fresh("llama")
    plain = _swap(model)
    _inside(plain, model)
    model.needy = nn.ModuleList([NeedyRMSNorm(8), NeedyMLP(model.config)])
    swap = _swap(model)
    _inside(swap, model)
    assert swap.num_calls == plain.num_calls


def test_a_feed_forward_that_computes_something_else_is_left_alone() -> None:
    class ScaledMLP(modeling_llama.LlamaMLP):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0.5

    model = fresh("llama")
    plain = _swap(model)
    _inside(plain, model)
    for layer in model.model.layers:
        layer.mlp.__class__ = ScaledMLP
    swap = _swap(model)
    torch.testing.assert_close(_inside(swap, model), _outside(model), rtol=1e-4, atol=1e-5)
    assert swap.num_calls == plain.num_calls - model.config.num_hidden_layers


def test_hooks_on_the_parts_of_a_feed_forward_run() -> None:
    model = fresh("llama")
    swap = _swap(model)
    _inside(swap, model)
    calls = swap.num_calls
    seen: list[str] = []
    mlp = model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    mlp.act_fn.register_forward_hook(lambda module, args, out: seen.append("act") or out * 2)
    torch.testing.assert_close(_inside(swap, model), _outside(model), rtol=1e-4, atol=1e-5)
    assert sorted(seen) == ["act", "act", "up", "up"]  # stock takes the gate's first, and then the other
    assert swap.num_calls == 2 * calls - 1, "the hooked gate runs as it is"


def test_changed_weights_count() -> None:
    model = fresh("llama")
    swap = _swap(model)
    before = _inside(swap, model)
    with torch.no_grad():
        model.model.norm.weight *= 3
    after = _inside(swap, model)
    torch.testing.assert_close(after, before * 3, rtol=1e-4, atol=1e-5)


def test_a_patched_rotary_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = modeling_llama.apply_rotary_pos_emb

    def patched(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(q * 2, k, *args, **kwargs)

    model = fresh("llama")
    plain = _swap(model)
    _inside(plain, model)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", patched)
    swap = _swap(model)
    torch.testing.assert_close(_inside(swap, model), _outside(model), rtol=1e-4, atol=1e-5)
    assert swap.num_calls == plain.num_calls - model.config.num_hidden_layers


def test_compiled_code_of_others_meets_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llama")
    plain = _swap(model)
    _inside(plain, model)
    import torch._dynamo.convert_frame

    monkeypatch.setattr(torch._dynamo.convert_frame, "FRAME_COUNTER", 1)
    swap = _swap(model)
    with swap.installed():
        assert not isinstance(modeling_llama.apply_rotary_pos_emb, rotary._StandIn)
    _inside(swap, model)
    assert swap.num_calls == plain.num_calls - model.config.num_hidden_layers


def test_other_threads_and_other_models_run_as_they_are() -> None:
    model, other = fresh("llama"), fresh("llama")
    swap, second = _swap(model), _swap(other)
    expected = _outside(other)
    found = []
    with swap.installed():
        thread = threading.Thread(target=lambda: found.append(_outside(other)))
        thread.start()
        thread.join()
        assert swap.num_calls == 0
        with second.installed():  # two engines in a row of callbacks
            pass
        assert isinstance(modeling_llama.apply_rotary_pos_emb, rotary._StandIn)
    assert torch.equal(found[0], expected)
    _assert_untouched(model)


def test_a_copy_and_a_pickle_that_another_thread_makes_have_the_models_own_forward() -> None:
    model = fresh("llama")
    swap, expected = _swap(model), _outside(model)
    copies: list[Any] = []

    def take_copies() -> None:
        copies.extend((copy.deepcopy(model), pickle.loads(pickle.dumps(model))))

    with swap.installed():
        thread = threading.Thread(target=take_copies)
        thread.start()
        thread.join()
    assert len(copies) == 2
    for taken in copies:
        assert torch.equal(_outside(taken), expected)
    _assert_untouched(model)


def test_gradients_and_other_types_go_through_torch() -> None:
    model = fresh("llama")
    swap = _swap(model)
    with swap.installed():
        model(IDS).logits.sum().backward()
    assert swap.num_calls == 0
    assert model.model.norm.weight.grad is not None
    half = fresh("llama").bfloat16()
    swap = _swap(half)
    assert torch.equal(_inside(swap, half), _outside(half))
    assert swap.num_calls == 0


def test_torch_fuses_nothing_and_auto_leaves_small_models_alone() -> None:
    for backend in ("torch", "auto"):
        model = fresh("llama")
        swap = FusedSwap(backend)
        swap.look(model, LinearSwap("torch"))
        assert torch.equal(_inside(swap, model), _outside(model))
        assert swap.num_calls == 0
