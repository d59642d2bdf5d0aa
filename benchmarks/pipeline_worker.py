"""A process of its own for one text-generation pipeline: it reads a job from stdin, and writes what it measured."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging

from benchmarks import memory
from benchmarks.job import Job
from benchmarks.pipeline_names import OURS, batch_size_of
from hf_paged.commands.demo_prompts import DEMO_PROMPTS


def main() -> None:
    run(Job.from_json(sys.stdin.read()))


def run(job: Job) -> None:
    """Runs the job's prompts, which are those of the demo, once in the job's pipeline."""
    torch.set_num_threads(job.threads)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(job.model_folder, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sum()  # weights that are mapped from the file come into memory now, not in the measured run
    tokenizer = AutoTokenizer.from_pretrained(job.model_folder)
    if tokenizer.pad_token_id is None:  # stock's batches need one
        tokenizer.pad_token = tokenizer.eos_token
    resting = memory.reset_peak()
    pipe = _pipeline(job.peer, model.eval(), tokenizer)
    options = {"do_sample": False, "return_tensors": True, "max_new_tokens": job.requests[0].num_output_tokens}
    pipe([_chat("Hello."), _chat("Good morning.")], **{**options, "max_new_tokens": 4})
    begin = time.perf_counter()
    sequences, first = [], None
    for records in pipe((_chat(prompt.text) for prompt in DEMO_PROMPTS[: len(job.requests)]), **options):
        first = first or time.perf_counter() - begin
        sequences.append(records[0]["generated_token_ids"])
    seconds = time.perf_counter() - begin
    peak = memory.peak_bytes()
    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    job.write(
        {
            "seconds": seconds,
            "first_result_seconds": first,
            "peak_bytes_above_weights": max(0, peak - resting),
            "tokens": [
                new_tokens(sequence, request.prompt_ids, tokenizer.pad_token_id, ends)
                for sequence, request in zip(sequences, job.requests, strict=True)
            ],
            "num_fallbacks": _num_fallbacks(model) if job.peer == OURS else None,
        }
    )


def _pipeline(name: str, model: Any, tokenizer: Any) -> Any:
    if name == OURS:
        import hf_paged

        stock = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        return hf_paged.paged_pipeline(stock)
    return pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", batch_size=batch_size_of(name))


def _num_fallbacks(model: Any) -> int:
    import hf_paged

    return hf_paged.num_fallbacks(model)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def new_tokens(sequence: Sequence[int], prompt_ids: Sequence[int], pad: int, ends: set[int]) -> list[int]:
    """A row's own new tokens, up to and with its end: without the padding that a batch puts before and behind it."""
    start = next(_places(sequence, prompt_ids, pad)) + len(prompt_ids)
    new = list(sequence[start:])
    end = next((index for index, token in enumerate(new) if token in ends), len(new) - 1)
    return new[: end + 1]


def _places(sequence: Sequence[int], prompt_ids: Sequence[int], pad: int) -> Iterator[int]:
    # where the prompt may begin: behind nothing but padding
    for place in range(len(sequence)):
        if list(sequence[place : place + len(prompt_ids)]) == list(prompt_ids):
            yield place
        if sequence[place] != pad:
            break
    raise ValueError("a pipeline returned a row that doesn't hold its prompt")


if __name__ == "__main__":
    main()
