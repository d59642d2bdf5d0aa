"""The libraries of the native product: built once a machine, beside the attention kernels and by their rules."""

from __future__ import annotations

import ctypes
from pathlib import Path

from hf_paged.kernels.cpu import build

SOURCES = tuple(Path(__file__).with_name(name) for name in ("linear.c", "gemm.c"))


def load_libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """For few rows and for many. Built at the first call on this machine, loaded at the first in this process.

    Raises:
        ConfigError: with the reason.
    """
    few, many = map(build.load_library, SOURCES)
    return few, many
