"""Decoder layers that run in one call, where everything in them is native anyway."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules import module as hooks_of_all

from hf_paged.fused import rotary
from hf_paged.fused.gates import GateForward
from hf_paged.fused.layer_code import is_known
from hf_paged.fused.layer_program import Attention, LayerProgram, LayerWeights
from hf_paged.fused.norms import NormForward
from hf_paged.fused.scope import Scope
from hf_paged.kernels.cpu.backend import NativeBackend
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionParams, PackedStep, current_step
from hf_paged.linears.forward import NativeForward
from hf_paged.linears.stand_in import StandIn

if TYPE_CHECKING:
    from hf_paged.cache.step_cache import StepCache
    from hf_paged.cache.storage import LayerStorage

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_GATED = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
# What a model's loop hands to its layers that this code doesn't use, or that says nothing new in a packed step.
_WITHOUT_EFFECT = frozenset(
    ("cache", "past_key_values", "position_embeddings", "position_ids", "use_cache", "cache_position")
)


class _Place(NamedTuple):
    """Where a layer's K and V lie, and how they are read."""

    layer_idx: int
    storage: LayerStorage
    blocks: KVBlocks
    backend: NativeBackend
    group: int
    params: AttentionParams

    def holds(self, module: nn.Module, cache: StepCache) -> bool:
        """Whether it is still so."""
        storage = self.storage
        return (
            cast("int", module.layer_idx) == self.layer_idx
            and cast("float", module.scaling) == self.params.scale
            and cache.backend is self.backend
            and cache.storages.get(self.layer_idx) is storage
            and storage.blocks is self.blocks
        )


StandIns = Mapping[nn.Module, StandIn[Any]]


class LayerForward(StandIn[nn.Module]):
    """Stands in for the `forward` of a decoder layer.

    The first time, the layer runs as it is, too; only one that gives the same bits runs in one call from then on. Each
    time, everything in the layer has to be as it was found: with a hook, a `forward` of somebody's, or another module
    in the place of one, the layer runs as it is.

    Args:
        layer: whose code is known.
        scope: of the fused operations.
        program: runs it.
        stand_ins: for each of the modules below the layer that the program computes.
    """

    def __init__(self, layer: nn.Module, scope: Scope, program: LayerProgram, stand_ins: StandIns) -> None:
        super().__init__(layer)
        self._scope = scope
        self._program = program
        attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
        self._kinds = type(attention), type(_child(mlp, "act_fn"))
        self._stand_ins = [stand_ins[module] for module in _computed(layer)]
        *linears, self._gate = self._stand_ins[: len(_LINEARS) + len(_GATED) + 1]
        self._linears = cast("list[NativeForward]", linears)
        self._norms = cast("list[NormForward]", self._stand_ins[len(linears) + 1 :])
        self._shapes: list[torch.Size] | None = None  # of what was the same, bit by bit, as the layer as it is
        self._differs = False
        self._place: _Place | None = None

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        """As the layer's own: `[1, T, hidden]` to `[1, T, hidden]`."""
        layer, step = self.module, current_step()
        assert layer is not None
        call = None
        if step is not None and not self._differs and not args:
            call = self._prepare(layer, step, hidden_states, options)
        if call is None or step is None:
            return self.stock(layer, hidden_states, *args, **options)
        weights, attention, index = call
        run = partial(self._program, weights, attention, hidden_states, self._scope.num_threads)
        shapes = _shapes(weights, attention)
        if shapes != self._shapes:
            expected = self.stock(layer, hidden_states, **options)  # and writes what is written again now
            self._differs = not isinstance(expected, torch.Tensor) or not torch.equal(expected, run())
            self._shapes = shapes
            return expected
        step.updated.append(index)
        step.attended.append(index)
        self._scope.num_layers += 1
        self._scope.num_calls += len(self._norms) + len(("rotary", "gate"))
        self._linears[0].count(len(self._linears))
        return run()

    def _prepare(
        self, layer: nn.Module, step: PackedStep, x: torch.Tensor, options: dict[str, Any]
    ) -> tuple[LayerWeights, Attention, int] | None:
        """What the program is to be called with, and the layer's index; None if the layer has to run as it is."""
        angles = options.get("position_embeddings")
        if (
            step.probe is not None
            or not isinstance(angles, tuple)
            or len(angles) != 2
            or not self._scope.takes(x, *angles)
            or x.dim() != 3
            or x.shape[0] != 1
            or not (x.is_contiguous() and angles[0].is_contiguous() and angles[1].is_contiguous())
            or (options.get("cache") is not step.cache and options.get("past_key_values") is not step.cache)
            or [name for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT]
            or not self._is_as_found(layer)
        ):
            return None
        linears = [linear.native_weights(x.shape[1]) for linear in self._linears]
        norms = [norm.native_norm() for norm in self._norms]
        module, place = _child(layer, "self_attn"), self._place
        if place is None or not place.holds(module, cast("StepCache", step.cache)):
            place = self._place = _place(module, step)
        if place is None or None in linears or None in norms:
            return None
        q, k, v, o, gate, up, down = cast("list[Any]", linears)
        first, second, *heads = cast("list[Any]", norms)
        if angles[0].shape != (1, x.shape[1], place.blocks.keys.shape[3]):
            return None
        head_norms = (heads[0], heads[1]) if heads else None
        act = cast("GateForward", self._gate).act
        metadata = step.metadata(place.group, place.storage.spec.device)
        weights = LayerWeights(first, (q, k, v), head_norms, o, second, (gate, up), down, act)
        return weights, Attention(place.backend, place.blocks, metadata, place.params, *angles), place.layer_idx

    def _is_as_found(self, layer: nn.Module) -> bool:
        # once a layer and step: plain loops, no generators
        if hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks:
            return False
        try:
            attention, modules = _child(layer, "self_attn"), _computed(layer)
            act = _child(_child(layer, "mlp"), "act_fn")
        except KeyError:
            return False
        if (type(attention), type(act)) != self._kinds or len(modules) != len(self._stand_ins):
            return False
        for module, stand_in in zip(modules, self._stand_ins, strict=True):
            own = module.__dict__
            if own.get("forward") is not stand_in or own["_forward_hooks"] or own["_forward_pre_hooks"]:
                return False
        for module in (attention, act):
            own = module.__dict__
            if "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]:
                return False
        return True


def layer_forward(layer: nn.Module, scope: Scope, program: LayerProgram, stand_ins: StandIns) -> LayerForward | None:
    """A stand-in for a module that is found to be a decoder layer that a program can run; None for all others.

    Args:
        layer: any module.
        scope: of the fused operations.
        program: runs the layers of the model.
        stand_ins: what stands in for each module of the model.
    """
    try:
        attention, mlp, modules = _child(layer, "self_attn"), _child(layer, "mlp"), _computed(layer)
    except KeyError:
        return None
    turn = getattr(sys.modules.get(type(attention).__module__), rotary.FUNCTION, None)
    if (
        len(layer._modules) != 2 + len(_NORMS)
        or len(attention._modules) != len(modules) - len(_GATED) - len(_NORMS) - 1
        or not all(module in stand_ins for module in modules)
        or not isinstance(stand_ins[mlp], GateForward)
        or not isinstance(getattr(attention, "scaling", None), float)
        or not is_known(layer, attention)
        or not rotary.is_usual(turn)
    ):
        return None
    return LayerForward(layer, scope, program, stand_ins)


def _child(module: nn.Module, name: str) -> nn.Module:
    child = module._modules[name]
    if child is None:
        raise KeyError(name)
    return child


def _computed(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that a program computes: linear layers, the gated module, norms, those of heads.

    Raises:
        KeyError: one of them isn't there.
    """
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
    inside, gated, around = attention._modules, mlp._modules, layer._modules
    found = [
        *[inside[name] for name in _LINEARS],
        *[gated[name] for name in _GATED],
        mlp,
        *[around[name] for name in _NORMS],
        *[inside[name] for name in _HEAD_NORMS if name in inside],
    ]
    if None in found:
        raise KeyError(layer)
    return cast("list[nn.Module]", found)


def _place(module: nn.Module, step: PackedStep) -> _Place | None:
    """Where a layer's K and V lie; None unless that is in the pool, as float32, whole."""
    cache, index = cast("StepCache", step.cache), cast("int", module.layer_idx)
    storage, backend = cache.storages.get(index), cache.backend
    if storage is None or not isinstance(backend, NativeBackend):
        return None
    layer, blocks = cache.layer(index), storage.blocks
    is_plain = all(tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in blocks.tensors)
    if layer.is_gathered or blocks.is_quantised or not is_plain:
        return None
    params = AttentionParams(cast("float", module.scaling), layer.span.window, layer.span.chunk)
    return _Place(index, storage, blocks, backend, layer.group, params)


def _shapes(weights: LayerWeights, attention: Attention) -> list[torch.Size]:
    norms = weights.norm, weights.second_norm, *(weights.head_norms or ())
    linears = *weights.qkv, weights.o, *weights.gate_up, weights.down
    blocks = attention.blocks
    return [
        *(norm.weight.shape for norm in norms),
        *(weight.shape for weight, _ in linears),
        blocks.keys.shape[1:],
        blocks.values.shape[1:],
    ]
