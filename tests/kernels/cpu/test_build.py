"""How the C kernels are built: once, by many at the same time, never unasked; and the reason where they can't be."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_paged.errors import ConfigError
from hf_paged.kernels import registry
from hf_paged.kernels.cpu import build
from hf_paged.kernels.cpu.backend import NativeBackend
from hf_paged.kernels.registry import available_backends, resolve_backend
from hf_paged.kernels.torch_backend import TorchBackend

ROOT = Path(__file__).resolve().parents[3]

builds = pytest.mark.skipif(build.unavailable_reason() is not None, reason=f"can't build: {build.unavailable_reason()}")
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse before they look for a compiler")


@pytest.fixture(autouse=True)
def _nothing_said() -> Iterator[None]:
    said = set(registry._said)
    registry._said.clear()
    yield
    registry._said.clear()
    registry._said.update(said)


def fake_compiler(folder: Path, script: str) -> Path:
    path = folder / "fake-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def start_python(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "HF_PAGED_CACHE": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


BUILD_AND_ATTEND = """
    from hf_paged.kernels.cpu import build
    from hf_paged.kernels.cpu.backend import NativeBackend
    from tests.kernels.packed import decodes, pack
    native = NativeBackend()
    out = pack(decodes([40] * 64)).attend(native)
    print(out.isfinite().all().item(), len(build.openmp_runtimes()))
"""


@builds
def test_processes_that_build_at_once_end_with_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [start_python(BUILD_AND_ATTEND, tmp_path) for _ in range(2)]
    assert [output_of(process) for process in processes] == ["True 1\n"] * 2
    built = {path.name.partition("-")[0] for path in (tmp_path / "kernels").iterdir()}
    assert built == {"attention", "write"}
    (library,) = (tmp_path / "kernels").glob("attention-*")  # and nothing of those that came later
    assert library.name.startswith("attention-")
    before = library.stat().st_mtime_ns
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path))
    assert build.load_library()._name == str(library)  # this process takes what is there
    assert library.stat().st_mtime_ns == before


@builds
def test_a_cache_that_can_not_be_written_to_costs_a_build_a_process(tmp_path: Path) -> None:
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("a file where the folder should be")
    assert output_of(start_python(BUILD_AND_ATTEND, in_the_way)) == "True 1\n"


@builds
def test_only_torchs_openmp_runtime_is_loaded() -> None:
    build.load_library()
    torch.ones(100_000).add_(1)
    assert len(build.openmp_runtimes()) == 1


def test_importing_the_package_and_asking_what_can_run_builds_nothing(tmp_path: Path) -> None:
    log = tmp_path / "called"
    compiler = fake_compiler(tmp_path, f"touch {log}; exit 1")
    code = """
        import hf_paged, hf_paged.engine.engine
        from hf_paged.kernels.registry import available_backends
        from hf_paged.kernels.cpu.backend import NativeBackend
        print(available_backends("cpu")["native"])
    """
    said = output_of(start_python(code, tmp_path / "cache", CC=str(compiler)))
    assert said.strip() == str(build.unavailable_reason() if sys.platform != "linux" else None)
    assert not log.exists()
    assert not (tmp_path / "cache").exists()


@linux
def test_without_a_compiler_auto_takes_torch_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = "there is no C compiler (install gcc, or set CC)"
    assert available_backends("cpu")["native"] == reason
    with caplog.at_level("WARNING", logger="hf_paged"):
        assert {type(resolve_backend("auto", "cpu")) for _ in range(3)} == {TorchBackend}
    assert [record.getMessage() for record in caplog.records] == [
        f"Attention on cpu takes the torch backend: the native one can't run, since {reason}."
    ]
    with pytest.raises(ConfigError, match="'native' can't run on cpu: there is no C compiler"):
        resolve_backend("native", "cpu")


@linux
def test_a_broken_compiler_is_torch_under_auto_and_its_message_under_the_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = tmp_path / "calls"
    script = f'echo "$@" >> {calls}; [ "$1" = --version ] && exit 0; echo "x.c:1: error: no such luck" >&2; exit 1'
    compiler = fake_compiler(tmp_path, script)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    assert available_backends("cpu")["native"] is None  # there is something to try
    with caplog.at_level("WARNING", logger="hf_paged"):
        assert {type(resolve_backend("auto", "cpu")) for _ in range(3)} == {TorchBackend}
    (message,) = [record.getMessage() for record in caplog.records]
    assert "fake-cc can't build its kernels (x.c:1: error: no such luck)" in message
    with pytest.raises(ConfigError, match=r"'native' can't run on cpu: .*no such luck"):
        resolve_backend("native", "cpu")
    assert len(calls.read_text().splitlines()) == 2  # --version and one try, however often it was asked for
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


@linux
@pytest.mark.parametrize("script", ["exit 0", "kill -9 $$"], ids=["does nothing", "is killed"])
def test_a_compiler_without_result_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, script)))
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="kernels"):
        NativeBackend()


@builds
def test_a_library_that_can_not_be_loaded_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path))
    compiler = build.find_compiler()
    assert compiler is not None
    (tmp_path / "kernels").mkdir()
    key = build.cache_key(compiler, build._torchs_runtime())
    (tmp_path / "kernels" / f"attention-{key}.so").write_bytes(b"not a library")
    with pytest.raises(ConfigError, match="can't be loaded"):
        NativeBackend()


@builds
def test_the_key_follows_source_flags_compiler_cpu_and_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "attention.c"
    other.write_bytes(build.SOURCE.read_bytes() + b"\n")
    newer = fake_compiler(tmp_path, "echo another version")
    compiler = build.find_compiler()
    assert compiler is not None
    keys = [
        build.cache_key(compiler, "libgomp.so.1"),
        build.cache_key(compiler, "libomp.so"),
        build.cache_key([*compiler, "-m64"], "libgomp.so.1"),
        build.cache_key([str(newer)], "libgomp.so.1"),
        build.cache_key(compiler, "libgomp.so.1", other),
    ]
    keys.append(_key_with_another_header(monkeypatch, tmp_path, compiler, other))
    newer.write_text("#!/bin/sh\necho its next version\n")
    keys.append(build.cache_key([str(newer)], "libgomp.so.1"))
    assert build.cache_key(compiler, "libgomp.so.1") == keys[0]
    monkeypatch.setattr(build, "COMPILE_FLAGS", ("-O2",))
    keys.append(build.cache_key(compiler, "libgomp.so.1"))
    monkeypatch.setattr(build, "_cpu", lambda: "another machine in the same home")
    keys.append(build.cache_key(compiler, "libgomp.so.1"))
    assert len(set(keys)) == len(keys)


def _key_with_another_header(monkeypatch: pytest.MonkeyPatch, folder: Path, compiler: list[str], source: Path) -> str:
    (folder / "exponential.h").write_text("/* another */")
    with monkeypatch.context() as patch:
        patch.setattr(build, "SOURCE", source)  # its folder has the headers
        return build.cache_key(compiler, "libgomp.so.1", source)


def test_other_systems_run_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert available_backends("cpu")["native"] == "its kernels are built on Linux only"
    assert type(resolve_backend("auto", "cpu")) is TorchBackend


def test_other_devices_are_refused() -> None:
    assert NativeBackend.unavailable_reason(torch.device("cuda")) == "its kernels run on a CPU"


@builds
def test_the_source_compiles_without_warnings_and_without_wide_registers(tmp_path: Path) -> None:
    """What other processors get: the same source for 128-bit vectors, and for none that the compiler may assume."""
    compiler = build.find_compiler()
    assert compiler is not None
    flags = ["-std=gnu11", "-O1", "-fopenmp", "-fPIC", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"]
    for more in ([], [build._machine_flag()]):
        command = [*compiler, *flags, *more, "-c", str(build.SOURCE), "-o", str(tmp_path / "out.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
