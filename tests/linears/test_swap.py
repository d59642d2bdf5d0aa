"""What runs natively inside of a packed forward, what is left alone, and that the model is untouched outside."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hf_paged.linears.eligible import eligible_linears
from hf_paged.linears.swap import LinearSwap
from tests.linears.built import needs_native
from tests.zoo import fresh

pytestmark = needs_native

IDS = torch.arange(1, 8)[None]


class Block(nn.Module):
    """q, k and v of one input, and an output of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(8, 6), nn.Linear(8, 4), nn.Linear(8, 4, bias=False), nn.Linear(14, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(torch.cat((self.q(x), self.k(x), self.v(x)), dim=-1))


def _swap(model: nn.Module) -> LinearSwap:
    swap = LinearSwap("native")
    swap.look(model)
    return swap


def _inside(swap: LinearSwap, model: nn.Module, *inputs: torch.Tensor) -> Any:
    with torch.no_grad(), swap.installed():
        return model(*inputs)


def _assert_untouched(model: nn.Module) -> None:
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]


def test_layers_that_take_the_same_tensor_are_computed_in_one_call() -> None:
    model, x = Block(), torch.randn(3, 8)
    swap = _swap(model)
    for _ in range(3):
        torch.testing.assert_close(_inside(swap, model, x), model(x))
        assert swap.groups == [3]
    calls = []
    product = swap._scope.product  # type: ignore[union-attr]
    swap._scope.product = lambda x, weights, threads: calls.append(len(weights)) or product(x, weights, threads)  # type: ignore
    torch.testing.assert_close(_inside(swap, model, x), model(x))
    assert calls == [3, 1]
    _assert_untouched(model)


def test_a_tensor_changed_in_place_between_two_layers_is_another() -> None:
    class Changing(Block):
        change = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x)
            if self.change:
                x.mul_(2)
            return self.o(torch.cat((q, self.k(x), self.v(x)), dim=-1))

    model, x = Changing(), torch.randn(3, 8)
    swap = _swap(model)
    _inside(swap, model, x)
    assert swap.groups == [3]
    model.change = True
    with torch.no_grad():
        expected = model(x.clone())
    torch.testing.assert_close(_inside(swap, model, x.clone()), expected)


def test_a_group_whose_parts_nobody_takes_is_given_up() -> None:
    class Choosing(Block):
        whole = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.whole else self.q(x)

    model, x = Choosing(), torch.randn(3, 8)
    swap = _swap(model)
    _inside(swap, model, x)
    model.whole = False
    assert swap.groups == [3]
    torch.testing.assert_close(_inside(swap, model, x), model(x))
    assert swap.groups == []
    model.whole = True
    torch.testing.assert_close(_inside(swap, model, x), model(x))


def test_in_inference_mode_nothing_is_joined() -> None:
    model = Block()
    swap = _swap(model)
    with torch.inference_mode():
        x = torch.randn(3, 8)
        for _ in range(2):
            torch.testing.assert_close(_inside(swap, model, x), model(x))
    assert swap.groups == []


def test_weights_are_read_at_each_call() -> None:
    model, x = Block(), torch.randn(3, 8)
    swap = _swap(model)
    _inside(swap, model, x)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    for change in range(5):
        if change == 0:
            model(x).sum().backward()
            optimiser.step()
        elif change == 1:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        elif change == 2:
            model.k.weight.data = torch.randn(4, 8)
        elif change == 3:
            model.v.weight = nn.Parameter(torch.randn(8, 4).t())  # not contiguous: torch's
        else:
            model.k = nn.Linear(8, 4)  # not seen before the next look
        before = swap.num_products
        torch.testing.assert_close(_inside(swap, model, x), model(x))
        assert swap.num_products > before
        _assert_untouched(model)


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model = Block()
    swap = _swap(model)
    handle = model.o.register_forward_pre_hook(lambda module, inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _inside(swap, model, torch.randn(3, 8))
    _assert_untouched(model)
    handle.remove()
    x = torch.randn(3, 8)
    torch.testing.assert_close(_inside(swap, model, x), model(x))


def test_another_thread_a_copy_and_a_pickle_have_the_model_s_own_forward() -> None:
    model, x = Block(), torch.randn(3, 8)
    swap = _swap(model)
    expected = model(x)
    results: list[Any] = []

    def look() -> None:
        results.append(model(x))  # with gradients
        results.append(copy.deepcopy(model)(x))
        results.append(pickle.loads(pickle.dumps(model))(x))
        results.append({name: value.clone() for name, value in model.state_dict().items()})

    with swap.installed():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        in_place = copy.deepcopy(model)
    assert swap.num_products == 0
    for result in results[:3]:
        assert torch.equal(result, expected)
        assert result.requires_grad
    assert results[3].keys() == model.state_dict().keys()
    model.q.weight.data.zero_()
    assert torch.equal(in_place(x), expected), "a copy's layers are its own"


def test_gradients_and_autocast_inside_are_torch_s() -> None:
    model, x = Block(), torch.randn(3, 8)
    swap = _swap(model)
    with swap.installed():
        out = model(x)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(x)
    assert out.requires_grad
    assert half.dtype == torch.bfloat16
    assert swap.num_products == 0


def test_other_types_and_other_layouts_are_torch_s() -> None:
    swap = LinearSwap("native")
    model = Block().double()
    swap.look(model)
    assert torch.equal(_inside(swap, model, torch.ones(3, 8).double()), model(torch.ones(3, 8).double()))
    assert swap.num_products == 0
    model = Block()
    swap.look(model)
    x = torch.randn(8, 3).t()
    torch.testing.assert_close(_inside(swap, model, x), model(x))
    assert swap.num_products == 1, "q, k and v get rows that aren't contiguous, and o gets their contiguous ones"
    with pytest.raises(RuntimeError):
        _inside(swap, model, torch.randn(3, 9))


def test_a_model_that_changes_its_type_goes_on_natively() -> None:
    model = Block()
    swap = _swap(model)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        x, before = torch.randn(3, 8).to(dtype), swap.num_products
        model.to(dtype)
        actual = _inside(swap, model, x)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, model(x))
        assert swap.num_products == before + 4


def test_what_belongs_to_others_is_left_alone() -> None:
    class Own(nn.Linear):
        pass

    plain, own = nn.Linear(4, 4), Own(4, 4)
    assert eligible_linears(nn.Sequential(plain, own, nn.Conv1d(4, 4, 1))) == [plain]
    assert eligible_linears(nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4).half())) == []
    assert eligible_linears(nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))) == []
    assert eligible_linears(nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"))) == []  # type: ignore[arg-type]
    layer = Block()
    layer.forward = torch.compile(layer.forward, backend="eager")  # type: ignore[method-assign]
    assert eligible_linears(nn.Sequential(layer, plain)) == [plain]
    compiled = Block()
    compiled.compile(backend="eager")
    assert eligible_linears(nn.Sequential(compiled, plain)) == [plain]
    offloaded = nn.Sequential(Block())
    accelerate.cpu_offload(offloaded, execution_device="cpu")
    assert eligible_linears(offloaded) == []


def test_quantised_layers_are_left_alone() -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed on this platform")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
    assert eligible_linears(model) == [model[1]]


def test_adapters_on_plain_layers() -> None:
    lora = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = fresh("llama")
    swap = _swap(model)
    before = _inside(swap, model, IDS).logits
    adapted = peft.get_peft_model(model, lora).eval()
    swap.look(model)
    torch.testing.assert_close(_inside(swap, model, IDS).logits, adapted(IDS).logits)
    assert (_inside(swap, model, IDS).logits - before).abs().max() > 1e-2
    merged = adapted.merge_and_unload()
    swap.look(merged)
    torch.testing.assert_close(_inside(swap, merged, IDS).logits, merged(IDS).logits)
    _assert_untouched(merged)


def test_hooks_of_a_layer_run() -> None:
    model, x = Block(), torch.randn(3, 8)
    swap = _swap(model)
    model.q.register_forward_hook(lambda module, inputs, output: output + 1)
    torch.testing.assert_close(_inside(swap, model, x), model(x))
    assert swap.num_products == 4


def test_tied_weights() -> None:
    model = fresh("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    swap = _swap(model)
    torch.testing.assert_close(_inside(swap, model, IDS).logits, model(IDS).logits)
    assert swap.num_products == 3 * 7 + 1
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_swap_holds_neither_the_model_nor_its_layers() -> None:
    model = Block()
    swap = _swap(model)
    _inside(swap, model, torch.randn(3, 8))
    alive = [weakref.ref(model), *(weakref.ref(module) for module in model.modules())]
    del model
    gc.collect()
    assert not [reference for reference in alive if reference() is not None]
    with swap.installed():
        pass


def test_nothing_of_a_forward_is_kept() -> None:
    model = Block()
    swap = _swap(model)
    for _ in range(2):  # watched, and joined
        x = torch.randn(3, 8)
        with torch.no_grad(), swap.installed():
            parts = [model.q(x), model.k(x), model.v(x)]
        alive = [weakref.ref(tensor) for tensor in (x, *parts)]
        del x, parts
        assert not [reference for reference in alive if reference() is not None]


def test_modes_that_watch_operations_see_torch_s() -> None:
    model, x = Block(), torch.randn(3, 8)
    swap = _swap(model)
    with FlopCounterMode(display=False) as counter:
        _inside(swap, model, x)
    assert counter.get_total_flops() > 0
    with CountingMode() as counting:
        _inside(swap, model, x)
    assert counting.num_linears == 4
    assert swap.num_products == 0
    with torch.device("cpu"):
        _inside(swap, model, x)
    assert swap.num_products == 4


class CountingMode(TorchFunctionMode):
    """Counts calls of `linear`."""

    num_linears = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_linears += func is torch.nn.functional.linear
        return func(*args, **(kwargs or {}))


def test_small_models_are_left_alone_unless_asked_for() -> None:
    model = fresh("llama")
    for backend, some in (("auto", False), ("torch", False), ("native", True)):
        swap = LinearSwap(backend)
        swap.look(model)
        _inside(swap, model, IDS)
        assert (swap.num_products > 0) == some
