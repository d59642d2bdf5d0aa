"""Attention backends by name."""

from __future__ import annotations

from typing import TypeVar

import torch

from hf_paged.errors import ConfigError, nearest
from hf_paged.kernels.backend import AttentionBackend
from hf_paged.kernels.reference import ReferenceBackend
from hf_paged.kernels.torch_backend import TorchBackend
from hf_paged.kernels.triton.backend import TritonBackend

_backends: dict[str, type[AttentionBackend]] = {}

_Backend = TypeVar("_Backend", bound=AttentionBackend)


def register_backend(cls: type[_Backend]) -> type[_Backend]:
    """Makes a backend known under its `name`; also a class decorator.

    Raises:
        ConfigError: the name is missing, is "auto", or is taken by another class.
    """
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name or name == "auto":
        raise ConfigError(f"{cls.__name__}.name must be a string other than 'auto' and '', not {name!r}.")
    if _backends.get(name, cls) is not cls:
        raise ConfigError(
            f"An attention backend {name!r} is registered already ({_backends[name].__qualname__}); "
            f"give {cls.__qualname__} another name."
        )
    _backends[name] = cls
    return cls


def available_backends(device: torch.device | str | None = None) -> dict[str, str | None]:
    """Every registered name, with the reason why it can't run on a device, or None where it can.

    Args:
        device: None is the machine's accelerator, or the CPU without one.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    device = torch.device(device)
    return {name: cls.unavailable_reason(device) for name, cls in _backends.items()}


def resolve_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """A new backend by its name, or the best that can run on a device for "auto".

    Raises:
        ConfigError: the name is unknown, or the backend can't run there.
    """
    device = torch.device(device)
    reasons = available_backends(device)
    if name == "auto":
        candidates = [
            cls
            for cls in _backends.values()
            if cls.auto_priority is not None
            and device.type in (cls.auto_device_types or (device.type,))
            and reasons[cls.name] is None
        ]
        if not candidates:
            raise ConfigError(f"No attention backend can run on {device}; move the model to another device.")
        return max(candidates, key=lambda cls: cls.auto_priority or 0)()
    if name not in _backends:
        raise ConfigError(f"There is no attention backend {name!r}: {nearest(name, [*_backends, 'auto'])}")
    if reasons[name] is not None:
        raise ConfigError(
            f"The attention backend {name!r} can't run on {device}: {reasons[name]}; "
            "choose another one, or attention_backend='auto'."
        )
    return _backends[name]()


register_backend(TritonBackend)
register_backend(TorchBackend)
register_backend(ReferenceBackend)
