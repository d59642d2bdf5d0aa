"""`hf-paged generate`: a file of prompts in, a file of answers out, all of them through one engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_paged import PagedConfig, PagedEngine
from hf_paged.commands.console import err, progress_bars
from hf_paged.commands.loading import load_model
from hf_paged.commands.prompt_file import Prompt, read_prompts
from hf_paged.commands.result_file import ResultFile
from hf_paged.errors import ConfigError, RequestError


@dataclass(frozen=True)
class GenerateOptions:
    """The options of the command. None stands for an option that wasn't given."""

    model: str
    prompts: Path
    output: Path | None = None
    max_new_tokens: int = 128
    chat: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    block_size: int | None = None
    num_blocks: int | None = None
    max_batch_tokens: int | None = None

    def sampling(self, index: int) -> dict[str, Any]:
        """Keywords of `add_request` for the prompt of that index: greedy unless a sampling option was given."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        chosen = {name: value for name, value in given.items() if value is not None}
        if not chosen or self.temperature == 0:
            return {"do_sample": False}
        # A seed of its own for each prompt: equal prompts get different answers, and a resumed run the same ones.
        return {"do_sample": True, "seed": self.seed + index, **chosen}

    def paged_config(self) -> PagedConfig:
        """The engine's settings, its defaults where no option was given."""
        names = ("block_size", "num_blocks", "max_batch_tokens")
        return PagedConfig(**{name: getattr(self, name) for name in names if getattr(self, name) is not None})


def run_generate(options: GenerateOptions) -> int:
    """Answer every prompt that the output file doesn't hold yet.

    Returns:
        The exit code: 0, 1 if a request failed, 130 if interrupted.

    Raises:
        PagedError: a malformed option or line, found before anything runs.
    """
    config = options.paged_config()
    prompts = read_prompts(options.prompts)
    with ResultFile(options.output, prompts) as results:
        waiting = [prompt for prompt in prompts if prompt.index not in results.finished]
        if results.finished:
            err.print(f"{len(results.finished)} of {len(prompts)} prompts are answered in {options.output} already")
        if not waiting:
            return 0
        model, tokenizer = load_model(options.model)
        ids = [encode(prompt, tokenizer, options.chat, options.prompts) for prompt in waiting]
        with PagedEngine(model, config) as engine:
            by_request = _submit(engine, waiting, ids, options)
            return _run(engine, tokenizer, by_request, results)


def encode(prompt: Prompt, tokenizer: Any, chat: bool | None, source: Path) -> list[int]:
    """Token ids of a prompt.

    Args:
        prompt: text, or a chat's messages.
        tokenizer: the model's.
        chat: put text into the chat template as a user's message; None does so if the tokenizer has a template.
        source: the file, for messages of errors.

    Raises:
        RequestError: the prompt can't be put into the template, or has no tokens.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    is_text = isinstance(prompt.content, str)
    if not is_text and chat is False:
        raise RequestError(f"{source}, line {prompt.line}: 'messages' need the chat template; leave out --no-chat.")
    if (chat or not is_text) and not has_template:
        raise RequestError(
            f"{source}, line {prompt.line}: this model has no chat template; use 'prompt' and --no-chat."
        )
    if is_text and not (has_template if chat is None else chat):
        ids = tokenizer(prompt.content)["input_ids"]
    else:
        messages = [{"role": "user", "content": prompt.content}] if is_text else prompt.content
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # templates raise what they like about roles and their order
            raise RequestError(f"{source}, line {prompt.line}: the chat template refused it: {error}") from error
    if not ids:
        raise RequestError(f"{source}, line {prompt.line}: the prompt has no tokens.")
    return list(ids)


def _submit(
    engine: PagedEngine, prompts: Sequence[Prompt], ids: Sequence[list[int]], options: GenerateOptions
) -> dict[str, Prompt]:
    by_request = {}
    for prompt, prompt_ids in zip(prompts, ids, strict=True):
        limit = prompt.max_new_tokens or options.max_new_tokens
        try:
            request_id = engine.add_request(prompt_ids, max_new_tokens=limit, **options.sampling(prompt.index))
        except ConfigError:
            raise
        except RequestError as error:
            raise RequestError(f"{options.prompts}, line {prompt.line}: {error}") from error
        by_request[request_id] = prompt
    return by_request


def _run(engine: PagedEngine, tokenizer: Any, by_request: dict[str, Prompt], results: ResultFile) -> int:
    num_failed = num_finished = num_tokens = 0
    start = time.monotonic()
    running: dict[str, int] = {}
    try:
        with progress_bars() as progress:
            bar = progress.add_task("Generating", total=len(by_request), note="")
            while engine.has_unfinished_requests:
                for output in engine.step():
                    sequence = output.outputs[0]
                    running[output.request_id] = sequence.num_tokens
                    if output.finished:
                        num_tokens += running.pop(output.request_id)
                        num_finished += 1
                        num_failed += sequence.finish_reason == "error"
                        results.write(result_row(by_request[output.request_id], output, tokenizer))
                speed = (num_tokens + sum(running.values())) / (time.monotonic() - start)
                progress.update(bar, completed=num_finished, note=f"{speed:.0f} tokens/s")
    except KeyboardInterrupt:
        err.print(f"Interrupted: {num_finished} of {len(by_request)} done; the same command goes on from there.")
        return 130
    if num_failed:
        err.print(f"[bold red]{num_failed} of {num_finished} failed[/]: see 'error' in their rows.")
    return 1 if num_failed else 0


def result_row(prompt: Prompt, output: Any, tokenizer: Any) -> dict[str, Any]:
    """What a line of the output holds.

    Args:
        prompt: the prompt that was answered.
        output: its finished RequestOutput.
        tokenizer: turns tokens to text, special tokens left out.
    """
    sequence = output.outputs[0]
    row = {
        "index": prompt.index,
        "id": prompt.id,
        "prompt": prompt.content,
        "text": tokenizer.decode(list(sequence.token_ids), skip_special_tokens=True),
        "num_tokens": len(sequence.token_ids),
        "finish_reason": sequence.finish_reason,
    }
    if output.error is not None:
        row["error"] = f"{type(output.error).__name__}: {output.error}"
    return row
