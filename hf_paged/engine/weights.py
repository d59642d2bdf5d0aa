"""Notices that a model's weights changed, so that no prefix computed with the old ones is reused.

Version counters miss writes through `.data` and by fused optimisers, so a small sample of each parameter's content is
compared too: 8 values spread over it, at most. What that can miss is a change that leaves all of these values as they
were; after such a change call `reset_prefix_cache()`.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

_SAMPLES = 8


def weights_fingerprint(model: torch.nn.Module) -> Hashable | None:
    """Equal as long as the weights are; None if that can't be told (offloaded weights, inference tensors)."""
    identities = []
    samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.device.type == "meta" or parameter.is_inference():
                return None
            identities.append((id(parameter), parameter.data_ptr(), parameter._version))
            flat = parameter.detach().reshape(-1) if parameter.is_contiguous() else parameter.detach().flatten()
            stride = max(1, flat.numel() // _SAMPLES)
            samples.setdefault((flat.device, flat.dtype), []).append(flat[::stride][:_SAMPLES])
        content = tuple(
            torch.cat(values).float().cpu().numpy().tobytes() for values in samples.values() if values[0].numel()
        )
    return (tuple(identities), content, _active_adapters(model))


def _active_adapters(model: torch.nn.Module) -> Hashable:
    # which of PEFT's adapters take part changes what is computed, and no parameter
    return tuple(
        (tuple(module._active_adapter), bool(module._disable_adapters), len(module.merged_adapters))  # type: ignore[arg-type]
        for module in model.modules()
        if hasattr(module, "_active_adapter") and hasattr(module, "merged_adapters")
    )
