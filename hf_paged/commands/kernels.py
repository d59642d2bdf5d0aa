"""`hf-paged kernels compile`: what each Triton kernel takes of a GPU, and whether that is as it should be."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_paged.commands.console import err, fail, out, progress_bars
from hf_paged.errors import ConfigError

if TYPE_CHECKING:
    from hf_paged.kernels.triton.architectures import Architecture
    from hf_paged.kernels.triton.compile_report import Compiled

PAGE_COLUMNS = 120  # where stdout is no terminal

_LEGEND = """\
warps       of a block
regs        vector registers of a thread
spills      registers that are kept in memory for some time; +ns: scalar registers kept in vector registers
shared      bytes of shared memory (LDS) of a block
occupancy   warps that fit on one SM or CU at the same time, at most, and what bounds them
matrix      matrix instruction, and its shape or kind"""


def run_compile(target_names: str, json_file: Path | None) -> int:
    """Compile every kernel in its main configurations and print a table a target. No GPU is needed.

    Args:
        target_names: such as "sm_90,gfx942".
        json_file: where to write the same as JSON.

    Returns:
        The exit code: 1 if a kernel doesn't compile, spills, or lacks its matrix instruction.

    Raises:
        ConfigError: triton is missing or interprets kernels in this process, a target is unknown, or the file can't
            be written.
    """
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("Triton is not installed; pip install triton.")
    import triton

    from hf_paged.kernels.triton.architectures import architecture
    from hf_paged.kernels.triton.capture import require_compiler

    targets = [architecture(name) for name in dict.fromkeys(target_names.replace(" ", "").split(",")) if name]
    if not targets:
        raise ConfigError("--targets is empty; name one, such as sm_90.")
    require_compiler()
    from hf_paged.kernels.triton.compile_report import compile_all, plan
    from hf_paged.kernels.triton.main_configurations import MAIN_CONFIGURATIONS

    begin = time.perf_counter()
    tasks = plan(MAIN_CONFIGURATIONS, targets)
    with progress_bars() as progress:
        bar = progress.add_task("Compiling", total=len(tasks), note="")

        def show(done: Compiled) -> None:
            progress.update(bar, advance=1, note=f"{done.kernel} {done.target}")

        compiled = compile_all(tasks, show)
    seconds = time.perf_counter() - begin

    if json_file is not None:
        _write_json(json_file, triton.__version__, seconds, compiled)
    print_tables(targets, compiled)
    err.print(f"{len(compiled)} kernels in {seconds:.0f} s, Triton {triton.__version__}")
    return report_problems(compiled)


def print_tables(targets: Iterable[Architecture], compiled: Iterable[Compiled]) -> None:
    """A table a target on stdout, a row a kernel and configuration; configurations that came out alike share one."""
    console = out if out.is_terminal else Console(width=PAGE_COLUMNS, highlight=False)
    rows = list(compiled)
    for target in targets:
        console.print(_table(target, [row for row in rows if row.target == target.name]))
    console.print(Text(_LEGEND, style="dim"))


def report_problems(compiled: Iterable[Compiled]) -> int:
    """Print each problem as a line on stderr; returns the exit code to leave with."""
    code = 0
    for row in compiled:
        for problem in row.problems:
            code = fail(f"{row.kernel} on {row.target} ({row.configuration}) {problem}")
    return code


def _table(target: Architecture, rows: list[Compiled]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=target.name, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("kernel", no_wrap=True)
    table.add_column("configuration", ratio=1)
    for name in ("warps", "regs", "spills", "shared"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("occupancy", no_wrap=True)
    table.add_column("matrix", no_wrap=True)
    alike: dict[str, list[Compiled]] = {}
    for row in rows:
        alike.setdefault(str(replace(row, configuration="", seconds=0.0)), []).append(row)
    shown = ""
    for row, *others in alike.values():
        if shown and row.kernel != shown:
            table.add_section()
        kernel = row.kernel.strip("_").removesuffix("_kernel")
        table.add_row(
            kernel if row.kernel != shown else "",
            row.configuration.removeprefix(f"{kernel} ") + (f" [dim]and {len(others)} alike[/]" if others else ""),
            *_cells(target, row),
            style="red" if row.problems else None,
        )
        shown = row.kernel
    return table


def _cells(target: Architecture, row: Compiled) -> list[str]:
    resources, fit = row.resources, row.occupancy
    if resources is None or fit is None:
        return [str(row.num_warps), "", "", "", "does not compile", ""]
    scalar = f" +{resources.scalar_spilled}s" if resources.scalar_spilled else ""
    return [
        str(row.num_warps),
        str(resources.registers),
        f"{resources.spilled}{scalar}",
        str(row.shared_bytes),
        f"{fit.warps:2}/{target.max_warps} {fit.bound}",
        ", ".join(f"{name} {shapes[-1]}" for name, shapes in resources.matrix.items()) or "-",
    ]


def _write_json(path: Path, triton_version: str, seconds: float, compiled: Iterable[Compiled]) -> None:
    content: dict[str, Any] = {
        "triton": triton_version,
        "seconds": round(seconds, 1),
        "kernels": [row.as_json() for row in compiled],
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} can't be written ({error.strerror}); name another file.") from error
