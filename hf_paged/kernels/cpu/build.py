"""Compiles a C file of the package, attention.c or another, once for this machine, and loads it beside torch.

```
attention.c  flags  compiler and its version  CPU and its features  torch's OpenMP runtime
       └───────┴──────────────┴── sha256 ──────────┴──────────────────────┘
                                     │
<cache directory>/kernels/attention-<24 digits>.so      there: loaded. Not there: compiled in a folder of its own beside
                                                        it, then renamed, so that nobody ever sees half a file
```

The library is linked against the very OpenMP runtime that torch has loaded: two of them in one process wait for each
other with spinning threads, which costs five to twenty times.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

from hf_paged.embedded import cache_directory
from hf_paged.errors import ConfigError

SOURCE = Path(__file__).with_name("attention.c")
COMPILE_FLAGS = ("-std=gnu11", "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
LINK_FLAGS = ("-shared", "-Wl,-z,defs")
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT = 300  # seconds a compiler may take


class BuildError(ConfigError):
    """The native kernels can't be compiled or loaded here; the message is why, as half a sentence."""


_lock = threading.Lock()
_outcomes: dict[tuple[str, ...], ctypes.CDLL | BuildError] = {}


def unavailable_reason() -> str | None:
    """Why there is no point in building here, as half a sentence, found without building; None: it can be tried."""
    if sys.platform != "linux":
        return "its kernels are built on Linux only"
    if find_compiler() is None:
        return "there is no C compiler (install gcc, or set CC)"
    return None


def find_compiler() -> list[str] | None:
    """The command of the C compiler: CC from the environment, or the first of `COMPILERS`; None without any."""
    for command in [os.environ["CC"]] if os.environ.get("CC") else COMPILERS:
        words = shlex.split(command)
        found = shutil.which(words[0]) if words else None
        if found:
            return [found, *words[1:]]
    return None


def load_library(source: Path = SOURCE) -> ctypes.CDLL:
    """The library of a C file, built at the first call on this machine and loaded at the first in this process.

    Any number of threads and processes may call it at once. A failure is remembered for as long as CC, PATH and the
    cache directory stay what they are.

    Raises:
        BuildError: with the reason.
    """
    setting = (str(source), str(cache_directory()), os.environ.get("CC", ""), os.environ.get("PATH", ""))
    with _lock:
        outcome = _outcomes.get(setting)
        if outcome is None:
            try:
                outcome = _load(source)
            except BuildError as error:
                outcome = error
            except (OSError, subprocess.SubprocessError) as error:
                outcome = BuildError(f"its kernels can't be built ({error})")
            _outcomes[setting] = outcome
    if isinstance(outcome, BuildError):
        raise BuildError(*outcome.args)
    return outcome


def openmp_runtimes() -> list[str]:
    """The OpenMP runtimes that are loaded in this process: real paths of their files, in no order."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "omp" in line:  # there are thousands of lines, and a path costs more than a look
            path = line.split(maxsplit=5)[-1]
            if path.startswith("/") and Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
                found.add(path)
    return sorted({os.path.realpath(path) for path in found})


def _load(source: Path) -> ctypes.CDLL:
    reason = unavailable_reason()
    if reason is not None:
        raise BuildError(reason)
    runtime = _torchs_runtime()
    compiler = find_compiler()
    assert compiler is not None
    folder = cache_directory() / "kernels"
    target = folder / f"{source.stem}-{cache_key(compiler, runtime, source)}.so"
    if target.is_file():
        return _open(target, runtime)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.stem}-", dir=folder) as own:
            os.replace(_compile(compiler, runtime, source, Path(own)), target)
        return _open(target, runtime)
    except OSError:  # a cache directory that can't be written to: a build for this process alone
        with tempfile.TemporaryDirectory(prefix="hf_paged-") as own:
            return _open(_compile(compiler, runtime, source, Path(own)), runtime)


def cache_key(compiler: list[str], runtime: str, source: Path = SOURCE) -> str:
    """What the built library depends on, as 24 hexadecimal digits."""
    parts = [
        source.read_bytes(),
        *(header.read_bytes() for folder in (SOURCE.parent, source.parent) for header in sorted(folder.glob("*.h"))),
        repr((COMPILE_FLAGS, LINK_FLAGS, _machine_flag(), compiler, runtime)).encode(),
        _version_of(tuple(compiler), _changed(compiler[0])).encode(),
        _cpu().encode(),
    ]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:24]


@cache  # there are several files to build, and a process a question
def _version_of(compiler: tuple[str, ...], changed: int) -> str:
    return _run([*compiler, "--version"])


def _changed(program: str) -> int:
    try:
        return os.stat(program).st_mtime_ns
    except OSError:
        return 0


def _torchs_runtime() -> str:
    import torch  # the runtime comes with it

    loaded = openmp_runtimes()
    own = [path for path in loaded if Path(path).is_relative_to(Path(torch.__file__).resolve().parents[1])]
    if not loaded:
        raise BuildError("torch runs without OpenMP here")
    if len(own or loaded) > 1:
        raise BuildError(f"this process has several OpenMP runtimes ({', '.join(own or loaded)})")
    return (own or loaded)[0]


def _machine_flag() -> str:
    # What -march=native is on x86, compilers for Arm call -mcpu=native.
    return "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"


@cache
def _cpu() -> str:
    """Architecture, model and features of the CPU: a home directory may be shared by machines of several kinds."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU architecture", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = {line for line in lines if line.split(":")[0].strip() in names}
    return "\n".join([platform.machine(), *sorted(known)])


def _compile(compiler: list[str], runtime: str, source: Path, folder: Path) -> Path:
    """Builds in an empty folder of its own."""
    compiled, library = folder / "compiled.o", folder / "library.so"
    _run([*compiler, *COMPILE_FLAGS, _machine_flag(), "-c", str(source), "-o", str(compiled)])
    # Without -fopenmp, which would add the compiler's own runtime.
    _run([*compiler, *LINK_FLAGS, str(compiled), runtime, "-o", str(library)])
    return library


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line), lines[0] if lines else f"exit code {done.returncode}")
        raise BuildError(f"{Path(command[0]).name} can't build its kernels ({said.strip()[:300]})")
    return done.stdout


def _open(path: Path, runtime: str) -> ctypes.CDLL:
    before = openmp_runtimes()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"its kernels can't be loaded ({error})") from error
    added = set(openmp_runtimes()) - set(before)
    if added:
        raise BuildError(
            f"it would bring a second OpenMP runtime ({', '.join(sorted(added))}) beside torch's {runtime}"
        )
    return library
