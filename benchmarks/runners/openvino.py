"""OpenVINO GenAI in float32, run by the interpreter of its own environment: `python -m benchmarks.runners.openvino`.

In that environment: pip install openvino-genai optimum-intel torch, then pip uninstall torchvision. The model is
exported to its own format first.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import memory
from benchmarks.job import Job, measure
from benchmarks.peer import Report, Tokens
from benchmarks.workloads import WorkloadRequest, is_sampled

BLOCK_SIZE = 32  # of its CPU kernels
MAX_SEQUENCES = 64


class OpenVinoPeer:
    """`ContinuousBatchingPipeline`, a step at a time, weights and KV cache in float32."""

    def __init__(self, job: Job) -> None:
        import openvino_genai as genai

        self._genai = genai
        self._sampled = is_sampled(job.requests)
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = job.settings.kv_tokens // BLOCK_SIZE
        scheduler.max_num_batched_tokens = job.settings.max_batch_tokens
        scheduler.max_num_seqs = MAX_SEQUENCES
        scheduler.enable_prefix_caching = True
        self._kv_bytes = scheduler.num_kv_blocks * BLOCK_SIZE * _kv_bytes_per_token(Path(job.model_folder))
        self._pipeline = genai.ContinuousBatchingPipeline(
            job.model_folder,
            scheduler,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": "f32",
                "KV_CACHE_PRECISION": "f32",
                "INFERENCE_NUM_THREADS": job.threads,
            },
        )
        self._count = 0

    def close(self) -> None:
        del self._pipeline

    def run(self, requests: Sequence[WorkloadRequest]) -> tuple[Tokens, Report]:
        import numpy as np
        from openvino import Tensor

        start = time.monotonic()
        handles = []
        for request in requests:
            config = self._genai.GenerationConfig()
            config.max_new_tokens = request.num_output_tokens
            config.ignore_eos = True
            config.do_sample = self._sampled
            config.num_return_sequences = request.num_sequences
            if self._sampled:
                config.temperature, config.top_p, config.top_k = 1.0, 1.0, 2**31 - 1
            ids = Tensor(np.array([request.prompt_ids], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._count, ids, config))
            self._count += 1
        answers: list[dict[int, list[int]]] = [{} for _ in requests]
        first: list[float | None] = [None] * len(requests)
        done = [0.0] * len(requests)
        num_steps = 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            num_steps += 1
            now = time.monotonic() - start
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for key, output in handle.read().items():
                        answers[index].setdefault(key, []).extend(output.generated_ids)
                    first[index] = now if first[index] is None else first[index]
                    done[index] = now
        report = Report(
            kv_bytes=self._kv_bytes,
            token_occupancy=None,
            done_seconds=tuple(done),
            # several answers of a prompt can only be read when all are there
            first_token_seconds=None if self._sampled else tuple(moment or 0.0 for moment in first),
            num_steps=num_steps,
        )
        return [answer[key] for answer in answers for key in sorted(answer)], report


def _kv_bytes_per_token(folder: Path) -> int:
    import json

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * kv_heads * head_dim * 4)


def main() -> None:
    gc.set_threshold(100_000)  # as in worker.py
    job = Job.from_json(sys.stdin.read())
    import openvino_genai  # noqa: F401  # memory is counted from here on

    weights = sum(file.stat().st_size for file in Path(job.model_folder).glob("openvino_model.bin"))
    resting = memory.reset_peak() + weights
    job.write(measure(job, lambda: OpenVinoPeer(job), resting))


if __name__ == "__main__":
    main()
