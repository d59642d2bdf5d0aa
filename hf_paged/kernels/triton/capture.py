"""Launches recorded instead of run: what a launch function would hand to the compiler, for a GPU that isn't there.

                    a main configuration, on meta tensors
                                 |
    launch function      decides as if on the target            launch_table.target_override
                                 |  kernel[grid](*args, num_warps=...)
    Triton               binds, specialises for the target      a driver that only names it
                                 |  about to compile
    hook                 keeps it as a Launch, and stops there  triton.knobs.runtime.jit_cache_hook

So types, constants and divisibility are Triton's own conclusions from real arguments, and never a list beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from hf_paged.errors import ConfigError
from hf_paged.kernels.triton.architectures import Architecture
from hf_paged.kernels.triton.launch_table import target_override


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch, as the compiler is told of it."""

    kernel: Any  # triton's JITFunction
    signature: dict[str, str]  # argument -> type, "constexpr" for what is compiled in
    constants: dict[tuple[int, ...], Any]  # index of the argument -> its value
    attributes: dict[tuple[int, ...], Any]  # index of the argument -> what is known of it, as divisibility by 16
    options: dict[str, Any]  # num_warps, num_stages and all others of the target
    target: Architecture

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)

    @property
    def arguments(self) -> dict[str, Any]:
        """Constants by the argument's name."""
        names = list(self.signature)
        return {names[path[0]]: value for path, value in self.constants.items() if len(path) == 1}

    @property
    def key(self) -> str:
        """Equal for launches that the compiler can't tell apart."""
        told = (self.signature, self.constants, self.attributes, self.options)
        return f"{self.target.name} {self.kernel.__module__}.{self.name} {told}"


@contextmanager
def captured_launches(target: Architecture) -> Iterator[list[Launch]]:
    """Records the launches in its body, for `target`; nothing is compiled or run.

    Only for a process that computes nothing on a GPU meanwhile: Triton has one driver a process.

    Raises:
        ConfigError: kernels are interpreted in this process.
    """
    require_compiler()
    launches: list[Launch] = []

    def keep(**told: Any) -> bool:
        compiled = told["compile"]
        options = json.loads(compiled["specialization_data"])["options"]
        launches.append(
            Launch(
                kernel=told["fn"].jit_function,
                signature=compiled["signature"],
                constants=compiled["constants"],
                attributes=compiled["configs"][0],
                options={name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
                target=target,
            )
        )
        return True  # taken care of: don't compile

    # The private field: the public way back, reset_active(), looks for a GPU.
    previous_driver, previous_hook = driver._active, knobs.runtime.jit_cache_hook
    driver.set_active(_NamedDriver(gpu_target(target)))
    knobs.runtime.jit_cache_hook = keep
    try:
        with target_override(target.name):
            yield launches
    finally:
        knobs.runtime.jit_cache_hook = previous_hook
        driver.set_active(previous_driver)


def gpu_target(target: Architecture) -> GPUTarget:
    """The same for Triton."""
    return GPUTarget(target.backend, target.number, target.warp_size)


def require_compiler() -> None:
    """Raises ConfigError where kernels are interpreted, and so can't be compiled."""
    if knobs.runtime.interpret:
        raise ConfigError(
            "TRITON_INTERPRET is set, so kernels are interpreted and can't be compiled; unset it and start again."
        )


class _NamedDriver:
    """As much of a driver as a launch asks before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> GPUTarget:
        # Triton keeps what it derives for a device under this; the target makes it one entry a target.
        return self._target

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target
