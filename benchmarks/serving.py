"""What users feel under load: TTFT, TPOT, ITL, end to end, and how many requests a second keep the goals.

    python -m benchmarks.serving --rate 0.5 --rate 1                     Poisson arrivals, the engine in this process
    python -m benchmarks.serving --rate 1 --cv 4                         the same rate in bursts
    python -m benchmarks.serving --concurrency 1 --concurrency 8         so many users, one request each at a time
    python -m benchmarks.serving --rate 2 --url http://127.0.0.1:8000    a server with OpenAI's /v1/completions
    python -m benchmarks.serving --rate 2 --url URL --protocol tgi       a server with TGI's /generate_stream
    python -m benchmarks.serving --rate 1 --goal-ttft 1 --goal-tpot 0.1  goodput against goals

Loads run one after another; each has the same lengths and other ids, so that none finds the prefixes of the last.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.arrivals import gamma_arrivals
from benchmarks.compare import make_workload
from benchmarks.drawing import picture
from benchmarks.latency import Goals, summarise, ttft
from benchmarks.load import Record, Target, closed_loop, open_loop
from benchmarks.peer import WARM_UP
from benchmarks.rounds import (
    RESULTS,
    Setting,
    about,
    about_workload,
    command_line,
    embedded_folder,
    err,
    num_cores,
    write_result,
)
from benchmarks.serving_table import markdown
from benchmarks.targets import EngineTarget, OpenAITarget, TgiTarget
from benchmarks.workloads import FIRST_ID, WORKLOADS, Workload

NAMES = [name for name in WORKLOADS if name not in ("multi-turn", "parallel", "alone")]
Stats = Callable[[], Mapping[str, Any]]


class Protocol(str, enum.Enum):
    """What a server speaks."""

    OPENAI = "openai"
    TGI = "tgi"


@dataclass(frozen=True)
class Load:
    """How requests come: at `rate` a second with gaps of that `cv`, or from `concurrency` users."""

    rate: float | None = None
    cv: float = 1.0
    concurrency: int | None = None

    @property
    def name(self) -> str:
        """For a table."""
        if self.concurrency is not None:
            return f"{self.concurrency} user{'s' * (self.concurrency > 1)}"
        kind = {0.0: "evenly", 1.0: "Poisson"}.get(self.cv, f"in bursts, CV {self.cv:g}")
        return f"{self.rate:g}/s, {kind}"

    def run(self, target: Target, workload: Workload, seed: int) -> list[Record]:
        """The records of all requests."""
        if self.concurrency is not None:
            return closed_loop(target, workload.requests, self.concurrency)
        assert self.rate is not None
        times = gamma_arrivals(len(workload.requests), self.rate, self.cv, seed)
        return open_loop(target, workload.requests, times)


def main(
    rates: Annotated[
        list[float] | None, typer.Option("--rate", help="Open loop: requests a second; repeat it.")
    ] = None,
    cv: Annotated[float, typer.Option(min=0, help="Of the gaps: 1 is Poisson, more is bursty, 0 a clock.")] = 1.0,
    concurrencies: Annotated[
        list[int] | None, typer.Option("--concurrency", min=1, help="Closed loop: users; repeat it.")
    ] = None,
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(NAMES)}.")] = "mixed",
    requests: Annotated[int | None, typer.Option(min=1, help="Requests a load. Default: the workload's own.")] = None,
    url: Annotated[str | None, typer.Option(help="A server. Default: the engine, in this process.")] = None,
    protocol: Annotated[Protocol, typer.Option(help="What the server speaks.")] = Protocol.OPENAI,
    served_model: Annotated[str, typer.Option(help="The model's name at the server.")] = "default",
    as_text: Annotated[bool, typer.Option("--text", help="Send prompts as text, not as ids.")] = False,
    model: Annotated[Path | None, typer.Option(help="A model folder. Default: the embedded SmolLM2-135M.")] = None,
    goal_ttft: Annotated[float | None, typer.Option(help="Seconds to the first token.")] = None,
    goal_tpot: Annotated[float | None, typer.Option(help="Seconds for a token after the first.")] = None,
    goal_e2e: Annotated[float | None, typer.Option(help="Seconds to the last token.")] = None,
    kv_tokens: Annotated[int, typer.Option(min=1, help="Tokens in the engine's pool.")] = 16384,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a step of the engine.")] = 512,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch. Default: a core each.")] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 1,
    output: Annotated[Path, typer.Option(help="Folder of the result file, its table and its picture.")] = RESULTS,
) -> None:
    """Send loads, write a result file beside its table and its picture, print the table."""
    if workload not in NAMES:
        raise typer.BadParameter(f"{workload!r} is none of {', '.join(NAMES)}.", param_hint="--workload")
    if any(rate <= 0 for rate in rates or ()):
        raise typer.BadParameter("A rate is above 0.", param_hint="--rate")
    loads = [Load(rate=rate, cv=cv) for rate in rates or ()]
    loads += [Load(concurrency=count) for count in concurrencies or ()]
    if not loads:
        raise typer.BadParameter("Give at least one --rate or --concurrency.", param_hint="--rate")
    folder = model or embedded_folder()
    setting = Setting(folder, threads or num_cores())
    with _target(url, protocol, served_model, as_text, setting, kv_tokens, max_batch_tokens) as (target, stats):
        result = run(
            target,
            make_workload(workload, folder, requests),
            loads,
            goals=Goals(goal_ttft, goal_tpot, goal_e2e),
            setting=setting,
            command=command_line("benchmarks.serving"),
            name="the engine in this process" if url is None else f"a server that speaks {protocol.value}",
            seed=seed,
            stats=stats,
        )
    path = write_result(result, output, len(loads))
    text = markdown(result)
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    with picture():
        from benchmarks.serving_picture import draw_serving

        draw_serving(result, path.with_suffix(".png"))
    print(text)
    err.print(f"Written to {os.path.relpath(path)}, its table and its picture beside it")
    failed = [error for load in result["loads"] for error in load["summary"]["errors"]]
    if failed:
        err.print("[bold red]error:[/]", end=" ")
        err.print(f"requests failed: {'; '.join(sorted(set(failed)))}", markup=False)
        raise typer.Exit(1)


def run(
    target: Target,
    workload: Workload,
    loads: Sequence[Load],
    *,
    goals: Goals,
    setting: Setting,
    command: str,
    name: str,
    seed: int = 1,
    stats: Stats | None = None,
) -> dict[str, Any]:
    """Every load after a warm-up; returns what a result file holds.

    Args:
        stats: counters of an engine, whose change over each load is kept.
    """
    result = about("serving", command, 1, setting)
    warm_up = closed_loop(target, WARM_UP, 1)
    if warm_up[0].error is not None:
        raise SystemExit(f"error: the first request failed: {warm_up[0].error}")
    found = []
    for number, load in enumerate(loads, start=1):
        before = dict(stats()) if stats else {}
        with err.status(load.name):
            records = load.run(target, shifted(workload, number), seed)
        after = dict(stats()) if stats else {}
        found.append(
            {
                "name": load.name,
                **asdict(load),
                "summary": summarise(records, goals),
                "ttft_seconds": [ttft(record) for record in records if record.error is None],
                "engine": {key: after[key] - before[key] for key in COUNTERS if key in after},
            }
        )
        if not err.is_terminal:
            err.print(f"{load.name}: {found[-1]['summary']['seconds']:.1f} s")
    return {
        **result,
        "target": name,
        "goals": asdict(goals),
        "workload": about_workload(workload),
        "loads": found,
    }


COUNTERS = ("num_steps", "num_packed_tokens", "num_preemptions", "prefix_query_tokens", "prefix_hit_tokens")


def shifted(workload: Workload, number: int) -> Workload:
    """The same lengths and the same shared beginnings, in other ids."""
    last = max(token for request in workload.requests for token in request.prompt_ids) + 1
    span = last - FIRST_ID if last > FIRST_ID else last
    first = last - span
    requests = tuple(
        replace(request, prompt_ids=tuple(first + (token - first + number) % span for token in request.prompt_ids))
        for request in workload.requests
    )
    return Workload(workload.name, requests)


@contextmanager
def _target(
    url: str | None,
    protocol: Protocol,
    served_model: str,
    as_text: bool,
    setting: Setting,
    kv_tokens: int,
    max_batch_tokens: int,
) -> Iterator[tuple[Target, Stats | None]]:
    if url is None:
        with _engine(setting, kv_tokens, max_batch_tokens) as engine:
            yield EngineTarget(engine), engine.stats
        return
    decode = _decoder(setting.model_folder) if as_text or protocol is Protocol.TGI else None
    try:
        target = TgiTarget(url, decode) if protocol is Protocol.TGI else OpenAITarget(url, served_model, decode)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--url") from None
    yield target, None


def _engine(setting: Setting, kv_tokens: int, max_batch_tokens: int) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    import hf_paged

    torch.set_num_threads(setting.threads)
    with err.status("loading the model"):
        model = AutoModelForCausalLM.from_pretrained(setting.model_folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)  # no end-of-sequence token
    config = hf_paged.PagedConfig(max_batch_tokens=max_batch_tokens)
    return hf_paged.PagedEngine(model, config.with_options(num_blocks=-(-kv_tokens // config.block_size)))


def _decoder(folder: Path) -> Callable[[tuple[int, ...]], str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda ids: str(tokenizer.decode(list(ids)))


if __name__ == "__main__":
    typer.run(main)
