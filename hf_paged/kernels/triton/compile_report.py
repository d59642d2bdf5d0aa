"""Compiles the project's kernels for GPUs that aren't there, and says what each would take of one."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton import knobs
from triton.compiler import ASTSource

from hf_paged.kernels.triton.architectures import Architecture, Occupancy, occupancy
from hf_paged.kernels.triton.assembly import Resources, read_amd, read_nvidia
from hf_paged.kernels.triton.capture import Launch, captured_launches, gpu_target, require_compiler
from hf_paged.kernels.triton.main_configurations import MainConfiguration, Matrix, matrix_of


@dataclass(frozen=True)
class Task:
    """One kernel to compile: the first configuration that launches it, and the launch."""

    configuration: str
    launch: Launch


@dataclass(frozen=True)
class Compiled:
    """One kernel on one target. `problems` are empty where all is as it must be."""

    kernel: str
    configuration: str
    target: str
    num_warps: int
    num_stages: int
    shared_bytes: int = 0
    tensor_memory_columns: int = 0
    resources: Resources | None = None  # None: it didn't compile
    occupancy: Occupancy | None = None
    seconds: float = 0.0
    problems: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return asdict(self)


def plan(configurations: Iterable[MainConfiguration], targets: Sequence[Architecture]) -> list[Task]:
    """What the configurations launch on the targets, each kernel that the compiler can tell apart once.

    Raises:
        ConfigError: kernels are interpreted in this process.
    """
    tasks: dict[str, Task] = {}
    for configuration in configurations:
        for target in targets:
            with captured_launches(target) as launches:
                configuration.launch()
            for launch in launches:
                tasks.setdefault(launch.key, Task(configuration.name, launch))
    order = {task.launch.name: position for position, task in reversed(list(enumerate(tasks.values())))}
    return sorted(tasks.values(), key=lambda task: order[task.launch.name])


# What the workers compile; they are forked, so that they have it without being sent it.
_tasks: list[Task] = []


def compile_all(
    tasks: Sequence[Task], on_done: Callable[[Compiled], None] = lambda compiled: None, num_workers: int | None = None
) -> list[Compiled]:
    """Compiles each task, in as many processes as there are CPUs, without what earlier runs left in Triton's cache.

    Args:
        tasks: from `plan`.
        on_done: told of each as it is done, in this thread.
        num_workers: processes; 1 compiles in this one.

    Returns:
        One a task, in their order.
    """
    require_compiler()
    num_workers = min(num_workers or _num_cpus(), len(tasks))
    done: list[Compiled] = []
    with _empty_cache():
        if num_workers <= 1:
            for task in tasks:
                done.append(compile_task(task))
                on_done(done[-1])
            return done
        _tasks[:] = tasks
        with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("fork")) as pool:
            futures: list[Future[Compiled]] = [pool.submit(_compile_numbered, index) for index in range(len(tasks))]
            for future in as_completed(futures):
                on_done(future.result())
        return [future.result() for future in futures]


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _compile_numbered(index: int) -> Compiled:
    return compile_task(_tasks[index])


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    previous = knobs.cache.dir
    with tempfile.TemporaryDirectory(prefix="hf-paged-compile-") as folder:
        knobs.cache.dir = folder
        try:
            yield
        finally:
            knobs.cache.dir = previous


def compile_task(task: Task) -> Compiled:
    """Compiles one kernel. What the compiler refuses is a problem of the result, not an error."""
    launch = task.launch
    target = launch.target
    named = {
        "kernel": launch.name,
        "configuration": task.configuration,
        "target": target.name,
        "num_warps": launch.options["num_warps"],
        "num_stages": launch.options["num_stages"],
    }
    begin = time.perf_counter()
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    log = io.StringIO()
    previous = knobs.nvidia.dump_ptxas_log
    knobs.nvidia.dump_ptxas_log = True
    try:
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, target=gpu_target(target), options=launch.options)
    except Exception as error:  # the compiler's own errors have no base of their own
        return Compiled(**named, problems=(f"does not compile: {_one_line(error)}",))
    finally:
        knobs.nvidia.dump_ptxas_log = previous
    if target.backend == "cuda":
        resources = read_nvidia(log.getvalue(), compiled.asm["ptx"])
    else:
        resources = read_amd(compiled.asm["amdgcn"])
    shared, columns = compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", None) or 0
    fit = occupancy(target, compiled.metadata.num_warps, resources.registers, shared, columns)
    return Compiled(
        **named,
        shared_bytes=shared,
        tensor_memory_columns=columns,
        resources=resources,
        occupancy=fit,
        seconds=time.perf_counter() - begin,
        problems=tuple(find_problems(target, matrix_of(launch), resources, shared, fit)),
    )


def find_problems(
    target: Architecture, matrix: Matrix, resources: Resources, shared_bytes: int, fit: Occupancy
) -> Iterator[str]:
    """Yields what must not be: spills, a matrix instruction that isn't there, a block that doesn't fit."""
    if resources.spilled:
        yield f"spills {resources.spilled} registers"
    if shared_bytes > target.max_shared_bytes:
        yield f"needs {shared_bytes} bytes of shared memory, a block may have {target.max_shared_bytes}"
    elif fit.blocks == 0:
        yield f"not even one block fits: {fit.bound}"
    wanted = {Matrix.NONE: (), Matrix.ANY: target.matrix, Matrix.WIDEST: target.matrix[-1:]}[matrix]
    if wanted and not set(wanted) & set(resources.matrix):
        yield f"has no {' or '.join(wanted)}" + (f", only {', '.join(resources.matrix)}" if resources.matrix else "")
    if resources.is_serialised:
        yield "waits for each wgmma before the next"


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\b(error|fatal)\b *:", line)] or lines[-1:]
    return f"{type(error).__name__}: {' '.join(telling[:1])}"[:300]
