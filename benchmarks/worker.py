"""One peer, one round, in a process of its own.

    process starts ─ imports ─ weights ─ peer, warm-up ─│─ workload ─│
    └────────────────── start-up ───────────────────────┘ └─ seconds ─┘
                               └── peak memory above this ────────────┘

It reads a job from stdin, and writes a result to the file that the job names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from benchmarks.peers import PEERS, WARM_UP, Settings
from benchmarks.workloads import WorkloadRequest


@dataclass(frozen=True)
class Job:
    """What a worker is asked for. `peer` is a name of PEERS, or GAPS."""

    peer: str
    model_folder: str
    threads: int
    settings: Settings
    requests: tuple[WorkloadRequest, ...]
    result_file: str
    started: float  # time.time() of the process's start

    def to_json(self) -> str:
        """For the worker's stdin."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse."""
        fields = json.loads(text)
        fields["settings"] = Settings(**fields["settings"])
        fields["requests"] = tuple(
            WorkloadRequest(tuple(item["prompt_ids"]), item["num_output_tokens"]) for item in fields["requests"]
        )
        return cls(**fields)


GAPS = "gaps"  # a job that runs each prompt once and returns the gap between stock's two best next tokens


def main() -> None:
    job = Job.from_json(sys.stdin.read())
    torch.set_num_threads(job.threads)
    logging.disable_progress_bar()
    model = _load(job.model_folder)
    result = {"gaps": _gaps(model, job.requests)} if job.peer == GAPS else _measure(model, job)
    Path(job.result_file).write_text(json.dumps(result), encoding="utf-8")


def _load(folder: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    # No end-of-sequence token: everyone returns as many tokens as were asked for.
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sum()  # weights that are mapped from the file come into memory now, not in the measured run
    return model


def _measure(model: PreTrainedModel, job: Job) -> dict[str, Any]:
    resting = _reset_peak()
    peer = PEERS[job.peer](model, job.requests, job.settings)
    peer.run(WARM_UP)
    startup = time.time() - job.started
    begin = time.perf_counter()
    tokens, report = peer.run(job.requests)
    seconds = time.perf_counter() - begin
    peak = _peak()
    peer.close()
    return {
        "startup_seconds": startup,
        "seconds": seconds,
        "peak_bytes_above_weights": max(0, peak - resting),
        "tokens": tokens,
        **asdict(report),
    }


@torch.no_grad()
def _gaps(model: PreTrainedModel, prompts: Sequence[WorkloadRequest]) -> list[float]:
    gaps = []
    for prompt in prompts:
        logits = model(torch.tensor([prompt.prompt_ids]), logits_to_keep=1).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        gaps.append(best - second)
    return gaps


def _reset_peak() -> int:
    """Resident bytes now; the kernel's note of the highest starts again from here, where it can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return max(_peak(), psutil.Process().memory_info().rss)
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


if __name__ == "__main__":
    main()
