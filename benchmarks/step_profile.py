"""Where the time of a step goes, by how many tokens it has: the workload "mixed" on the engine, a clock at each part.

    python -m benchmarks.step_profile       128 requests; writes benchmarks/results/step-profile-DATE.json and .md
    python -m benchmarks.step_profile --requests 8 --max-batch-tokens 256

    step = schedule + pack + forward + sample + bookkeeping
                             └ products + attention + cache writes + norms, gates, rotary + the rest: torch and Python

"Host" is schedule, pack and bookkeeping: what a step costs before and after the model. The clocks take a few
microseconds a layer, which the rest of the forward holds.
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import nn

from benchmarks.limit import gemm_flops_per_second, limit_seconds, model_flops
from benchmarks.rounds import RESULTS, Setting, about, command_line, embedded_folder, err, num_cores, write_result
from benchmarks.workloads import FIRST_ID, LAST_ID, Workload, mixed

FORWARD = ("products", "attention", "cache writes", "norms, gates, rotary")
HOST = ("schedule", "pack", "bookkeeping")
SIZES = (1, 8, 16, 32, 64, 128, 256)  # the most tokens of each class but the last, which goes to full steps


@dataclass
class Clock:
    """Seconds of each part, since they were taken last."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to a part's."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - begin

        return wrapper

    def take(self) -> dict[str, float]:
        """The parts so far, and a new start."""
        taken, self.seconds = self.seconds, defaultdict(float)
        return dict(taken)


@contextmanager
def clocks_on(engine: Any) -> Iterator[Clock]:
    """Clocks around the parts of every step inside."""
    from hf_paged.engine import core, model_runner
    from hf_paged.fused.kernels import FusedKernels
    from hf_paged.fused.layer_program import LayerProgram
    from hf_paged.linears.native import NativeProduct

    clock = Clock()
    places = [
        (type(engine.core.scheduler), "schedule", "schedule"),
        (model_runner, "pack", "pack"),
        (core, "choose", "sample"),
        (nn.Linear, "forward", "products"),
        (NativeProduct, "__call__", "products"),
        (type(engine.core.runner.backend), "attend", "attention"),
        (type(engine.core.runner.backend), "write", "cache writes"),
        *((FusedKernels, name, "norms, gates, rotary") for name in ("rms_norm", "gate", "rotary")),
    ]
    inside = {"product": "products", "spread": "products", "attend": "attention", "write": "cache writes"}

    def add(name: str, seconds: float) -> None:  # of an operation of a whole layer
        clock.seconds[inside.get(name, "norms, gates, rotary")] += seconds

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(LayerProgram, "clock", staticmethod(add)))
        for owner, name, part in places:
            stack.enter_context(mock.patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        run = clock.timed("run", model_runner.ModelRunner.run)

        def counted(runner: Any, output: Any) -> Any:
            clock.seconds["tokens"] += output.num_tokens
            return run(runner, output)

        stack.enter_context(mock.patch.object(model_runner.ModelRunner, "run", counted))
        yield clock


def run_steps(engine: Any, workload: Workload) -> list[dict[str, float]]:
    """The parts of each step in seconds, and its `tokens`."""
    for request in workload.requests:
        engine.add_request(
            list(request.prompt_ids), max_new_tokens=request.num_output_tokens, do_sample=False, eos_token_id=None
        )
    steps = []
    with clocks_on(engine) as clock:
        while engine.has_unfinished_requests:
            begin = time.perf_counter()
            engine.step()
            steps.append(parts_of({"step": time.perf_counter() - begin, **clock.take()}))
    return steps


def parts_of(step: dict[str, float]) -> dict[str, float]:
    """What is nested, told apart."""

    def part(name: str) -> float:
        return step.get(name, 0.0)

    forward = part("run") - part("pack")
    return {
        "tokens": step["tokens"],
        "step": step["step"],
        "schedule": part("schedule"),
        "pack": part("pack"),
        "sample": part("sample"),
        "bookkeeping": step["step"] - part("schedule") - part("run") - part("sample"),
        **{name: part(name) for name in FORWARD},
        "rest of the forward": forward - sum(map(part, FORWARD)),
    }


def classes(steps: Sequence[dict[str, float]], full: int) -> list[dict[str, Any]]:
    """Means over the steps of each size."""
    rows = []
    sizes = [size for size in SIZES if size < full]
    for low, high in zip((0, *sizes), (*sizes, full), strict=True):
        members = [step for step in steps if low < step["tokens"] <= high]
        if not members:
            continue
        mean = {name: sum(step[name] for step in members) / len(members) for name in members[0]}
        host = sum(mean[name] for name in HOST) / mean["step"]
        title = f"{low + 1} to {high}" if high > low + 1 else f"{high}"
        rows.append({"tokens": title, "num_steps": len(members), "host_share": host, "mean": mean})
    return rows


def markdown(result: dict[str, Any]) -> str:
    """A row a class, milliseconds; and how it was measured."""
    shown = ("step", *FORWARD, "rest of the forward", "sample", *HOST)
    lines = [f"| tokens | steps | {' | '.join(shown)} | host |", "|---|" + "---:|" * (len(shown) + 2)]
    for row in result["rows"]:
        cells = " | ".join(f"{row['mean'][name] * 1e3:.1f}" for name in shown)
        lines.append(f"| {row['tokens']} | {row['num_steps']} | {cells} | {row['host_share']:.1%} |")
    machine = result["machine"]
    note = (
        f"Milliseconds a step. Workload *mixed*, {result['num_requests']} requests in {result['seconds']:.1f} s; the "
        f"limit, every token's products at {result['gemm_flops_per_second'] / 1e9:.0f} GFLOP/s, is "
        f"{result['limit_seconds']:.1f} s. "
        f"{result['model']}, float32. {machine['cpu']['model']}, {result['threads']} threads. {result['date'][:10]}, "
        f"{result['commit'] or 'no repository'}: `{result['command']}`"
    )
    return "\n".join([*lines, "", note])


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests of the workload.")] = 128,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a step.")] = 512,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. Default: a core each.")] = None,
    model: Annotated[Path | None, typer.Option(help="A model folder. Default: the embedded SmolLM2-135M.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of the result file and its table.")] = RESULTS,
) -> None:
    """Measure, write a result file beside its table, print the table."""
    from transformers import AutoModelForCausalLM

    import hf_paged

    setting = Setting(model or embedded_folder(), threads or num_cores())
    torch.set_num_threads(setting.threads)
    result = about("step-profile", command_line("benchmarks.step_profile"), 1, setting)
    loaded = AutoModelForCausalLM.from_pretrained(setting.model_folder, dtype=torch.float32).eval()
    workload = mixed(requests, last_id=min(LAST_ID, loaded.config.vocab_size))
    with hf_paged.PagedEngine(loaded, hf_paged.PagedConfig(max_batch_tokens=max_batch_tokens)) as engine:
        warm_up = list(range(FIRST_ID, FIRST_ID + max_batch_tokens))
        engine.generate([warm_up], max_new_tokens=2, do_sample=False)  # which products are faster is measured once
        rates = [gemm_flops_per_second()]
        begin = time.perf_counter()
        steps = run_steps(engine, workload)
        seconds = time.perf_counter() - begin
        rates.append(gemm_flops_per_second())
    counts = workload.num_prompt_tokens, workload.num_output_tokens
    result |= {
        "num_requests": requests,
        "seconds": seconds,
        "gemm_flops_per_second": max(rates),
        "limit_seconds": limit_seconds(*counts, model_flops(str(setting.model_folder)), max(rates)),
        "rows": classes(steps, max_batch_tokens),
    }
    path = write_result(result, output, requests)
    text = markdown(result)
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    print(text)
    err.print(f"Written to {os.path.relpath(path)}, its table beside it")


if __name__ == "__main__":
    typer.run(main)
