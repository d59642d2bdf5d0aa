"""The commands and their options. Each imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from hf_paged.version import __version__

app = typer.Typer(
    name="hf-paged",
    help="A paged KV cache and continuous batching for HuggingFace Transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich's boxes cut long options short on 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> None:
    """Run the command that the arguments name. An error of ours is one line, not a traceback."""
    try:
        app(prog_name="hf-paged")
    except Exception as error:
        from hf_paged.commands.console import fail
        from hf_paged.errors import PagedError

        if not isinstance(error, PagedError):
            raise
        raise SystemExit(fail(error)) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A paged KV cache and continuous batching for HuggingFace Transformers."""


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False) -> None:
    """Show versions, devices and backends.

    What a bug report needs.
    """
    from hf_paged.commands.env import run_env

    raise typer.Exit(run_env(as_json))


@app.command()
def demo(
    num_prompts: Annotated[
        int, typer.Option("--prompts", metavar="N", min=1, max=32, help="Run the first N prompts.")
    ] = 32,
    threads: Annotated[
        Optional[int], typer.Option(metavar="N", min=1, help="CPU threads; torch's choice by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of the table.")] = False,
) -> None:
    """Compare with stock generate on a real model.

    32 chat prompts of mixed length: seconds, tokens a second, KV memory, and whether the rows are equal.
    """
    from hf_paged.commands.demo import run_demo

    raise typer.Exit(run_demo(num_prompts, threads, as_json))


@app.command()
def generate(
    model: Annotated[
        str, typer.Option(metavar="FOLDER", help="A model folder, or 'embedded' for SmolLM2-135M-Instruct.")
    ],
    prompts: Annotated[
        Path, typer.Option(metavar="FILE", help="Text with a prompt a line, or .jsonl with 'prompt' or 'messages'.")
    ],
    output: Annotated[
        Optional[Path],
        typer.Option(metavar="FILE", help="JSONL file of results; what it already holds is skipped. Default: stdout."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most tokens an answer; a line may have its own.")
    ] = 128,
    chat: Annotated[
        Optional[bool], typer.Option("--chat/--no-chat", help="Use the chat template. Default: if there is one.")
    ] = None,
    temperature: Annotated[
        Optional[float], typer.Option(metavar="T", min=0, help="Sample at this temperature; 0: greedy.")
    ] = None,
    top_p: Annotated[
        Optional[float], typer.Option(metavar="P", min=0, max=1, help="Sample from this share of the mass.")
    ] = None,
    top_k: Annotated[
        Optional[int], typer.Option(metavar="N", min=1, help="Sample from the k likeliest tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of sampling; prompt i has seed + i.")] = 0,
    block_size: Annotated[Optional[int], typer.Option(metavar="N", help="Tokens in a block of the pool.")] = None,
    num_blocks: Annotated[
        Optional[int], typer.Option(metavar="N", help="Blocks in the pool. Default: what memory allows.")
    ] = None,
    max_batch_tokens: Annotated[
        Optional[int], typer.Option(metavar="N", help="Most tokens computed in one step.")
    ] = None,
) -> None:
    """Answer a file of prompts.

    Results are written as they finish; an interrupted run goes on where it stopped.
    """
    from hf_paged.commands.generate import GenerateOptions, run_generate

    options = GenerateOptions(
        model=model,
        prompts=prompts,
        output=output,
        max_new_tokens=max_new_tokens,
        chat=chat,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        block_size=block_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
    )
    raise typer.Exit(run_generate(options))


@app.command()
def bench(
    model: Annotated[
        str, typer.Option(metavar="FOLDER", help="A model folder, or 'embedded' for SmolLM2-135M-Instruct.")
    ],
    prompts: Annotated[
        Optional[Path],
        typer.Option(
            metavar="FILE", help="Text with a prompt a line, or .jsonl as for generate. Default: the demo's 32."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most tokens an answer; a line may have its own.")
    ] = 64,
    chat: Annotated[
        Optional[bool], typer.Option("--chat/--no-chat", help="Use the chat template. Default: if there is one.")
    ] = None,
    threads: Annotated[
        Optional[int], typer.Option(metavar="N", min=1, help="CPU threads; torch's choice by default.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="N", min=0, help="Time for trying other settings; 0 tries none.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of the tables.")] = False,
) -> None:
    """Measure your model and prompts, stock against paged.

    Greedy, padded batches of 16 against the engine, and the block size and token budget that suit this machine. Exit
    code 1 if a float32 answer differs where stock's two best tokens are no tie.
    """
    from hf_paged.commands.bench import BenchOptions, run_bench

    options = BenchOptions(
        model=model,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        chat=chat,
        threads=threads,
        seconds=seconds,
        as_json=as_json,
    )
    raise typer.Exit(run_bench(options))


kernels = typer.Typer(help="Look into the Triton kernels.", no_args_is_help=True)
app.add_typer(kernels, name="kernels")


@kernels.callback()
def _kernels() -> None:
    """Look into the Triton kernels."""


@kernels.command("compile")
def compile_kernels(
    targets: Annotated[
        str, typer.Option(metavar="NAMES", help="GPU architectures, with commas between.")
    ] = "sm_80,sm_90,sm_100,gfx942",
    json_file: Annotated[
        Optional[Path], typer.Option("--json", metavar="FILE", help="Write the numbers to a file.")
    ] = None,
) -> None:
    """Compile every kernel; no GPU is needed.

    A table a target: registers, spills, shared memory, occupancy, matrix instructions. Exit code 1 if a kernel spills
    or lacks its matrix instruction.
    """
    from hf_paged.commands.kernels import run_compile

    raise typer.Exit(run_compile(targets, json_file))
