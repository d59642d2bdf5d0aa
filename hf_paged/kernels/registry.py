"""Attention backends by name."""

from __future__ import annotations

import logging
from typing import TypeVar

import torch

from hf_paged.errors import ConfigError, nearest
from hf_paged.kernels.backend import AttentionBackend
from hf_paged.kernels.cpu.backend import NativeBackend
from hf_paged.kernels.reference import ReferenceBackend
from hf_paged.kernels.torch_backend import TorchBackend
from hf_paged.kernels.triton.backend import TritonBackend

logger = logging.getLogger("hf_paged")

_backends: dict[str, type[AttentionBackend]] = {}
_said: set[str] = set()  # what "auto" has said in this process

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

    A backend may still find out that it can't run when it is made, and raise ConfigError. "auto" then takes the next
    one. If one that is meant for this type of device can't run, it says so, once a process.

    Raises:
        ConfigError: the name is unknown, or the backend can't run there.
    """
    device = torch.device(device)
    if name == "auto":
        return _resolve_best(device)
    if name not in _backends:
        raise ConfigError(f"There is no attention backend {name!r}: {nearest(name, [*_backends, 'auto'])}")
    reason = _backends[name].unavailable_reason(device)
    if reason is None:
        try:
            return _backends[name]()
        except ConfigError as error:
            reason = str(error)
    raise ConfigError(
        f"The attention backend {name!r} can't run on {device}: {reason}; "
        "choose another one, or attention_backend='auto'."
    )


def _resolve_best(device: torch.device) -> AttentionBackend:
    candidates = [
        cls
        for cls in _backends.values()
        if cls.auto_priority is not None and device.type in (cls.auto_device_types or (device.type,))
    ]
    failed: list[tuple[str, str]] = []
    for cls in sorted(candidates, key=lambda cls: -(cls.auto_priority or 0)):
        reason = cls.unavailable_reason(device)
        if reason is None:
            try:
                backend = cls()
            except ConfigError as error:
                reason = str(error)
            else:
                _say_once(failed, cls.name, device)
                return backend
        if cls.auto_device_types is not None:
            failed.append((cls.name, reason))
    raise ConfigError(f"No attention backend can run on {device}; move the model to another device.")


def _say_once(failed: list[tuple[str, str]], chosen: str, device: torch.device) -> None:
    for name, reason in failed:
        message = f"Attention on {device.type} takes the {chosen} backend: the {name} one can't run, since {reason}."
        if message not in _said:
            _said.add(message)
            logger.warning(message)


register_backend(TritonBackend)
register_backend(NativeBackend)
register_backend(TorchBackend)
register_backend(ReferenceBackend)
