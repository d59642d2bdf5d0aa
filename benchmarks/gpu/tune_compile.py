"""Compiles what `tune` times, so that its time goes into timing."""

from __future__ import annotations

from benchmarks.gpu.tune import compile_rows as rows

__all__ = ["rows"]
