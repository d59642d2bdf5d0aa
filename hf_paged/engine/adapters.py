"""LoRA adapters of PEFT, several of them in one packed step.

For the length of a forward every LoRA layer gets a `forward` that computes the base layer once for all tokens, and adds
each adapter's low-rank product to the tokens of its requests:

    result       base(x)                         all tokens together
    of x         += B_x(A_x(x[rows of x])) s_x   one product an adapter, not a request
    of y         += B_y(A_y(x[rows of y])) s_y
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from hf_paged.engine.adapter_rows import BASE, AdapterRows, Rows
from hf_paged.errors import PackedStepError, RequestError, UnsupportedModelError, nearest
from hf_paged.kernels.metadata import current_step

_PROBE_TOKENS = 3


# By this keyword PEFT hands every layer the adapters of a call's rows.
HOOK_KEYWORD = "adapter_names"


class AdapterSwap:
    """The LoRA layers of one model, which it doesn't hold."""

    def __init__(self) -> None:
        self._checked: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str | None]] = weakref.WeakKeyDictionary()

    def require(self, model: nn.Module, name: Any, probe: Callable[[int], None]) -> None:
        """Sees to it that requests of a model may name an adapter.

        Args:
            model: it may have adapters.
            name: of an adapter, or "__base__" for none.
            probe: runs a forward of that many tokens.

        Raises:
            RequestError: there is no such adapter, or its layers can't be told apart in a packed step.
        """
        known = adapter_names(model)
        if not isinstance(name, str) or name not in known | {BASE}:
            loaded = nearest(name, known | {BASE}) if isinstance(name, str) and known else "it has no LoRA adapters."
            raise RequestError(f"The model has no adapter {name!r}: {loaded}")
        reason = self.why_not(model, probe)
        if reason is not None:
            raise RequestError(f"Requests of this model can't name an adapter each: {reason}")

    def why_not(self, model: nn.Module, probe: Callable[[int], None]) -> str | None:
        """Why requests of this model can't name an adapter each, or None if they can. A small forward finds out."""
        reason = _why_not_plain(model)
        if reason is not None:
            return reason
        signature = tuple((id(layer), tuple(_names(layer))) for layer in _lora_layers(model))
        known, found = self._checked.get(model, (None, None))
        if known != signature:
            rows: Any = [(BASE, Rows(slice(None)))]
            try:
                with _installed(model, AdapterRows({_PROBE_TOKENS: rows, 1: rows})):
                    probe(_PROBE_TOKENS)
            except (PackedStepError, UnsupportedModelError) as error:
                found = str(error)
            else:
                found = None
            self._checked[model] = (signature, found)
        return found

    @contextmanager
    def installed(self, model: nn.Module, rows: AdapterRows | None) -> Iterator[None]:
        """Every row gets its adapter inside, the model as it was outside, also after an exception. Hold its lock.

        Args:
            model: the model that runs.
            rows: of which adapter; None leaves all to the model's active ones.

        Raises:
            PackedStepError: a named adapter is gone, or has been merged.
        """
        if rows is None:
            yield
            return
        layers = _lora_layers(model)
        missing = rows.named - {name for layer in layers for name in _names(layer)}
        if missing:
            raise PackedStepError(f"Adapter {min(missing)!r} was deleted while a request ran.")
        if any(layer.merged for layer in layers):
            raise PackedStepError("An adapter was merged while a request with an adapter of its own ran.")
        with _installed(model, rows):
            yield


def adapter_hooks(model: nn.Module) -> list[tuple[Any, int, Any]]:
    """PEFT's hooks of a `generate(adapter_names=...)` that is under way: the dict, the key, and the hook."""
    if getattr(model, "peft_config", None) is None:
        return []
    return [
        (module._forward_pre_hooks, key, hook)
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, functools.partial) and HOOK_KEYWORD in hook.keywords
    ]


@contextmanager
def hooks_at_rest(model: nn.Module) -> Iterator[None]:
    """Those hooks are off inside, since a packed forward has other rows than the call; they are back outside."""
    found = adapter_hooks(model)
    originals = [(hooks, dict(hooks)) for hooks in {id(hooks): hooks for hooks, _, _ in found}.values()]
    for hooks, key, _ in found:
        del hooks[key]
    try:
        yield
    finally:
        for hooks, original in originals:
            later = {key: hook for key, hook in hooks.items() if key not in original}
            hooks.clear()
            hooks.update({**original, **later})


def adapter_names(model: nn.Module) -> set[str]:
    """The LoRA adapters that any layer of a model has."""
    return {name for layer in _lora_layers(model) for name in _names(layer)}


def _names(layer: Any) -> Iterator[str]:
    yield from layer.lora_A.keys()
    yield from layer.lora_embedding_A.keys()


def _lora_layers(model: nn.Module) -> list[Any]:
    if "peft" not in sys.modules:  # then nobody has put its layers into a model
        return []
    from peft.tuners.lora.layer import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _why_not_plain(model: nn.Module) -> str | None:
    # Only the plain product is computed here. PEFT has it in one class for each kind of quantised layer, too.
    if "peft" not in sys.modules:
        return None
    from peft.tuners.lora import layer as lora
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, AuxiliaryTrainingWrapper):
            return f"{name} is trained whole, as modules_to_save or trainable tokens."
        if not isinstance(module, BaseTunerLayer):
            continue
        module = cast(Any, module)
        if not isinstance(module, lora.Linear | lora.Embedding) and kind not in ("Linear4bit", "Linear8bitLt"):
            return f"{name} is a {kind} of {type(module).__module__}, and only LoRA's linears and embeddings are known."
        if module.lora_variant:
            return f"{name} has a variant of LoRA, such as DoRA."
        if module.merged:
            return f"{name} has merged adapters; call unmerge_adapter() first."
        if "forward" in vars(module):
            return f"{name} has a forward of its own, as offloaded or patched layers do."
    return None


@contextmanager
def _installed(model: nn.Module, rows: AdapterRows) -> Iterator[None]:
    layers = _lora_layers(model)
    try:
        for layer in layers:
            layer.__dict__["forward"] = _RowwiseForward(layer, rows)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


class _RowwiseForward:
    """Stands in for the forward of one LoRA layer."""

    def __init__(self, layer: Any, rows: AdapterRows) -> None:
        self._layer = layer
        self._rows = rows

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        if current_step() is None:  # another thread uses the model in its own way
            return type(layer).forward(layer, x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        result = layer.base_layer(x, *args, **kwargs)
        is_linear = len(layer.lora_A) > 0
        parts = self._rows.parts(x.shape, 3 if is_linear else 2)
        if layer.disable_adapters:
            return result
        delta, tables = (_linear_delta, layer.lora_A) if is_linear else (_embedding_delta, layer.lora_embedding_A)
        inputs, outputs = x.flatten(0, 1), result.view(-1, *result.shape[2:])
        for owner, rows in parts:
            for name in layer.active_adapters if owner is None else (owner,):
                if name in tables:
                    rows.add(outputs, delta(layer, name, rows.take(inputs)))
        return result


def _linear_delta(layer: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    down, up = layer.lora_A[name], layer.lora_B[name]
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(down.weight.dtype)
    delta: torch.Tensor = up(down(x)) * layer.scaling[name]
    return delta


def _embedding_delta(layer: Any, name: str, ids: torch.Tensor) -> torch.Tensor:
    table, up = layer.lora_embedding_A[name].T, layer.lora_embedding_B[name].T
    delta: torch.Tensor = (layer._embed(ids, table) @ up) * layer.scaling[name]
    scale = layer._get_embed_scale()
    return delta if scale is None else delta * scale.to(delta.dtype)
