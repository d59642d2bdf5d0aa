"""A process of its own for one peer of this environment, or for one of three other tasks.

It reads a job from stdin, and writes a result to the file that the job names.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

gc.set_threshold(100_000)  # as the command hf-paged does, see cli.py; every peer's process starts so
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from benchmarks import memory
from benchmarks.job import Job, measure
from benchmarks.limit import gemm_flops_per_second, model_flops
from benchmarks.peers import PEERS
from benchmarks.workloads import WorkloadRequest, is_sampled

GAPS = "gaps"  # runs each prompt once; returns the gap between stock's two best next tokens
GEMM = "gemm"  # measures the machine's float32 products
FLOPS = "flops"  # counts the model's


def main() -> None:
    run(Job.from_json(sys.stdin.read()))


def run(job: Job) -> None:
    """Does the job in this process, and writes its result."""
    torch.set_num_threads(job.threads)
    logging.disable_progress_bar()
    if job.peer == GEMM:
        job.write({"flops_per_second": gemm_flops_per_second()})
    elif job.peer == FLOPS:
        job.write(model_flops(job.model_folder))
    elif job.peer == GAPS:
        job.write({"gaps": _gaps(_load(job), job.requests)})
    else:
        model = _load(job)
        resting = memory.reset_peak()
        job.write(measure(job, lambda: PEERS[job.peer](model, job.requests, job.settings), resting))


def _load(job: Job) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(job.model_folder, dtype=torch.float32, attn_implementation="sdpa")
    # No end-of-sequence token: everyone returns as many tokens as were asked for.
    sampling = {"do_sample": True, "top_k": 0} if is_sampled(job.requests) else {"do_sample": False}
    model.generation_config = GenerationConfig(**sampling, pad_token_id=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sum()  # weights that are mapped from the file come into memory now, not in the measured run
    return model.eval()


@torch.no_grad()
def _gaps(model: PreTrainedModel, prompts: Sequence[WorkloadRequest]) -> list[float]:
    gaps = []
    for prompt in prompts:
        logits = model(torch.tensor([prompt.prompt_ids]), logits_to_keep=1).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        gaps.append(best - second)
    return gaps


if __name__ == "__main__":
    main()
