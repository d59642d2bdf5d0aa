"""Puts the fused operations under a model for the length of a packed forward.

LlamaDecoderLayer        stock                                     here
  input_layernorm        pow, mean, add, rsqrt, mul, mul           one pass
  rotary                 mul, neg, cat, mul, add, for q and for k  one pass
  mlp                    silu, mul                                 one pass
  the whole layer                                                  one call, if all of it is native (`layers.py`)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hf_paged.errors import ConfigError
from hf_paged.fused import rotary
from hf_paged.fused.gates import Known, gate_forward
from hf_paged.fused.kernels import FusedKernels
from hf_paged.fused.layer_program import LayerProgram
from hf_paged.fused.layers import LayerForward, layer_forward
from hf_paged.fused.norms import norm_forward
from hf_paged.fused.scope import Scope
from hf_paged.linears.eligible import untouched_modules
from hf_paged.linears.stand_in import StandIn, standing_in
from hf_paged.linears.swap import LEAST_BYTES, LinearSwap, is_watched_by_others

_logger = logging.getLogger(__name__)


class FusedSwap:
    """The parts of one model that may run fused. It holds neither the model nor its weights.

    Nothing of the model differs outside of `installed`.

    Args:
        backend: `PagedConfig.linear_backend`. "torch" fuses nothing, "native" what there is, and "auto" the same if the
            model is large enough and fused.c can be built.

    Raises:
        ConfigError: "native", and fused.c can't be built or loaded here.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._scope: Scope | None = Scope(FusedKernels()) if backend == "native" else None
        self._forwards: list[StandIn[Any]] = []
        self._files: list[ModuleType] = []
        self._seen: list[int] | None = None

    @property
    def num_calls(self) -> int:
        """Operations that were computed fused so far."""
        return self._scope.num_calls if self._scope is not None else 0

    @property
    def num_layers(self) -> int:
        """Decoder layers that were computed in one call so far."""
        return self._scope.num_layers if self._scope is not None else 0

    def look(self, model: nn.Module, linears: LinearSwap) -> None:
        """Finds the parts of a model again: adapters and patches change which there are. Hold the model's lock.

        Args:
            model: it.
            linears: has looked at the same model.
        """
        if self._backend == "torch" or (self._backend == "auto" and not _is_large(model)):
            return
        modules = list(untouched_modules(model, set()))
        seen = [id(one) for one in (*modules, *linears.forwards)]
        if seen == self._seen:
            return
        self._seen, self._forwards, self._files = seen, [], []
        scope = self._make_scope()
        if scope is None:
            return
        known: Known = {}
        with torch.no_grad():
            found = [norm_forward(module, scope) or gate_forward(module, scope, known) for module in modules]
        self._forwards = [forward for forward in found if forward is not None]
        self._files = rotary.rotary_modules(model)
        self._forwards += self._whole_layers(modules, scope, linears)

    def _whole_layers(self, modules: list[nn.Module], scope: Scope, linears: LinearSwap) -> list[LayerForward]:
        if linears.product is None:
            return []
        program = LayerProgram(scope.kernels, linears.product)
        stand_ins = {
            module: forward
            for forward in (*linears.forwards, *self._forwards)
            if (module := forward.module) is not None
        }
        found = [layer_forward(module, scope, program, stand_ins) for module in modules]
        return [layer for layer in found if layer is not None]

    def _make_scope(self) -> Scope | None:
        if self._scope is None:
            try:
                self._scope = Scope(FusedKernels())
            except ConfigError as error:
                self._backend = "torch"
                _logger.info("Norms, gates and rotary embeddings stay torch's: %s.", error)
        return self._scope

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The fused operations inside, the model as it was outside, also after an exception. Hold the model's lock."""
        scope = self._scope
        if scope is None or is_watched_by_others():
            yield
            return
        before, files = scope.thread, [] if rotary.is_compiling_process() else self._files
        rotary.install(files, scope)
        try:
            scope.thread, scope.num_threads = threading.get_ident(), torch.get_num_threads()
            with standing_in(self._forwards):
                yield
        finally:
            scope.thread = before
            rotary.remove(files)


def _is_large(model: nn.Module) -> bool:
    weights = (parameter for parameter in model.parameters() if parameter.dim() > 1 and parameter.is_cpu)
    size = 0
    for weight in weights:
        size += weight.nbytes
        if size >= LEAST_BYTES:
            return True
    return False
