"""Notices that a model's weights changed, so that no prefix computed with the old ones is reused.

Version counters miss writes through `.data` and by fused optimisers, so a small sample of each parameter's content is
compared too: 8 values spread over it, at most. What that can miss is a change that leaves all of these values as they
were; after such a change call `reset_prefix_cache()`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable

import torch

_SAMPLES = 8


Fingerprint = tuple[Hashable, ...]


def weights_fingerprint(model: torch.nn.Module, rewritten: Collection[int] = ()) -> Fingerprint | None:
    """Equal as long as the weights are, its last part `active_adapters`; None if that can't be told (offloaded weights,
    inference tensors, tensors without memory of their own). `rewritten` has the ids of buffers that each forward writes
    anew."""
    identities = []
    samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if id(tensor) in rewritten:
                continue
            if tensor.device.type == "meta" or tensor.is_inference():
                return None
            try:
                identities.append((id(tensor), tensor.data_ptr(), tensor._version))
                flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
                stride = max(1, flat.numel() // _SAMPLES)
                samples.setdefault((flat.device, flat.dtype), []).append(flat[::stride][:_SAMPLES])
            except (RuntimeError, NotImplementedError):  # a tensor subclass that holds its weights in another way
                return None
        try:
            content = tuple(torch.cat(values).float().cpu().numpy().tobytes() for values in samples.values())
        except (RuntimeError, NotImplementedError, TypeError):
            return None
    return (tuple(identities), content, active_adapters(model))


def active_adapters(model: torch.nn.Module) -> Hashable:
    """Which of PEFT's adapters take part, and how much: that changes what is computed, and no parameter."""
    return tuple(
        (
            tuple(module._active_adapter),  # type: ignore[arg-type]
            bool(module._disable_adapters),
            len(module.merged_adapters),  # type: ignore[arg-type]
            tuple(sorted(getattr(module, "scaling", {}).items())),
        )
        for module in model.modules()
        if hasattr(module, "_active_adapter") and hasattr(module, "merged_adapters")
    )
