"""Puts what `hf-paged kernels compile --json FILE` found into docs/kernels.md, every kernel by every target.

hf-paged kernels compile --targets sm_80,sm_90,sm_100,gfx942 --json benchmarks/results/kernel-compile.json
python -m benchmarks.kernel_report
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from benchmarks.markers import put

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "kernel-compile.json"
PAGE = ROOT / "docs" / "kernels.md"


def main() -> None:
    """Bring the page's table up to date."""
    report = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), "compiled", markdown(report)), encoding="utf-8")
    typer.echo(f"{PAGE.name} has {len(report['kernels'])} kernels of {RESULT.name}.")


def markdown(report: dict[str, Any]) -> str:
    """A row a kernel and configuration, a column a target."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    targets: list[str] = []
    for item in report["kernels"]:
        if item["target"] not in targets:
            targets.append(item["target"])
        name = item["kernel"].strip("_").removesuffix("_kernel")
        rows.setdefault((name, item["configuration"]), {})[item["target"]] = _cell(item)
    lines = [
        f"Triton {report['triton']}. Registers a thread, KiB of shared memory a block, warps that fit, instruction; "
        "spilled registers would be named.",
        "",
        "| kernel | configuration | " + " | ".join(targets) + " |",
        "|---|---|" + "---|" * len(targets),
    ]
    for (kernel, configuration), cells in rows.items():
        lines.append(f"| {kernel} | {configuration} | " + " | ".join(cells.get(t, "") for t in targets) + " |")
    return "\n".join(lines)


def _cell(item: dict[str, Any]) -> str:
    resources = item["resources"]
    parts = [
        f"{resources['registers']} regs",
        f"{item['shared_bytes'] / 1024:.0f} KiB",
        f"{item['occupancy']['warps']} warps",
        *sorted(resources["matrix"]),
    ]
    if resources["spilled"]:
        parts.append(f"**{resources['spilled']} spilled**")
    return ", ".join(parts)


if __name__ == "__main__":
    typer.run(main)
