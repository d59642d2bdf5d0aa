"""The library that linear.c is built to: once a machine, beside the attention kernels and by their rules."""

from __future__ import annotations

import ctypes
from pathlib import Path

from hf_paged.kernels.cpu import build

SOURCE = Path(__file__).with_name("linear.c")


def load_library() -> ctypes.CDLL:
    """Built at the first call on this machine, loaded at the first in this process.

    Raises:
        ConfigError: with the reason.
    """
    return build.load_library(SOURCE)
