from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import hf_paged
from hf_paged.cli import main
from hf_paged.commands.kernels import print_tables, report_problems
from hf_paged.kernels.triton.architectures import architecture, occupancy
from hf_paged.kernels.triton.assembly import Resources
from hf_paged.kernels.triton.compile_report import Compiled

TARGETS = ["sm_90", "gfx942"]


class Run(NamedTuple):
    """A run of the command in a process of its own, since the suite's interprets kernels."""

    code: int
    out: str
    err: str
    kernels: list[dict[str, Any]]


def run_the_command(folder: Path) -> Run:
    file = folder / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "hf_paged", "kernels", "compile", "--targets", ",".join(TARGETS), "--json", file]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return Run(ran.returncode, ran.stdout, ran.stderr, json.loads(file.read_text())["kernels"] if file.exists() else [])


def kernels_in_the_source() -> set[str]:
    folder = Path(hf_paged.__file__).parent / "kernels" / "triton"
    sources = "\n".join(path.read_text() for path in folder.glob("*.py"))
    return set(re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", sources))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_every_target_without_spills_and_with_its_matrix_instruction(tmp_path: Path) -> None:
    run = run_the_command(tmp_path)
    assert run.code == 0, run.err
    assert [row for row in run.kernels if row["problems"]] == []
    kernels = kernels_in_the_source()
    assert len(kernels) >= 5
    for target in TARGETS:
        assert {row["kernel"] for row in run.kernels if row["target"] == target} == kernels
    for kernel in kernels:
        assert run.out.count(f"\n {kernel.strip('_').removesuffix('_kernel')} ") == len(TARGETS)


def test_interpreted_kernels_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys, "argv", ["hf-paged", "kernels", "compile"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert "error: TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("targets", "message"), [("sm_91", "There is no target 'sm_91': did you mean"), (",", "--targets is empty")]
)
def test_a_target_that_is_unknown_is_an_error(
    targets: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-paged", "kernels", "compile", "--targets", targets])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert message in capsys.readouterr().err


def row(
    configuration: str, *problems: str, registers: int = 100, spilled: int = 0, kernel: str = "_a_kernel"
) -> Compiled:
    target = architecture("sm_90")
    resources = Resources(registers, spilled, 0, {"wgmma": ("m64n64k16",)})
    fit = occupancy(target, 4, registers, 4096)
    return Compiled(kernel, configuration, "sm_90", 4, 2, 4096, 0, resources, fit, 1.0, problems)


def test_a_problem_is_exit_code_1_and_names_kernel_target_and_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report_problems([row("one"), row("two", "spills 8 registers", spilled=8)]) == 1
    assert re.sub(r"\s+", " ", capsys.readouterr().err) == "error: _a_kernel on sm_90 (two) spills 8 registers "
    assert report_problems([row("one")]) == 0


def test_configurations_that_come_out_alike_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("a one"), row("a two"), row("three", registers=120), row("a four", kernel="_b_kernel")]
    print_tables([architecture("sm_90")], rows)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [
        "a",
        "one",
        "and",
        "1",
        "alike",
        "4",
        "100",
        "0",
        "4096",
        "16/64",
        "registers",
        "wgmma",
        "m64n64k16",
    ] in lines
    assert ["three", "4", "120", "0", "4096", "16/64", "registers", "wgmma", "m64n64k16"] in lines
    assert any(line[:3] == ["b", "a", "four"] for line in lines)


def test_a_kernel_that_does_not_compile_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables([architecture("sm_90")], [Compiled("_a_kernel", "one", "sm_90", 4, 2, problems=("does not compile",))])
    assert "does not compile" in capsys.readouterr().out
