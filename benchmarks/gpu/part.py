"""What a part of the check is made of, and what its rows are given."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged.kernels.backend import AttentionBackend
from hf_paged.kernels.registry import resolve_backend


@dataclass(frozen=True)
class Setting:
    """Where the rows run."""

    device: torch.device
    backend_name: str
    smoke: bool = False  # tiny sizes, on the CPU
    deadline: float = float("inf")  # of the part, as time.time() gives it

    def backend(self) -> AttentionBackend:
        """A new backend under test."""
        return resolve_backend(self.backend_name, self.device)

    def time_left(self) -> float:
        """Seconds until the part's deadline."""
        return self.deadline - time.time()


@dataclass(frozen=True)
class Row:
    """One measurement. `run` returns its fields; "ok": False among them says that a kernel was wrong."""

    key: str
    run: Callable[[], dict[str, Any]]


def rows_of(part: str, setting: Setting) -> list[Row]:
    """All rows of a part, the most telling first. Listing them costs next to nothing."""
    rows: list[Row] = importlib.import_module(f"benchmarks.gpu.{part}").rows(setting)
    return rows
