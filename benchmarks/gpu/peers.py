"""Who runs the workload on the card. Each stops at a given moment and hands back what it has."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.continuous_batching.utils import WorkloadHints

import hf_paged
from benchmarks.peers import left_padded, sdpa_pages
from benchmarks.workloads import WorkloadRequest

Tokens = list[list[int]]

STOCK_BATCH_SIZE = 64  # rows of a padded batch of stock generate
PAGE_SIZE = 32  # of generate_batch


@dataclass(frozen=True)
class Job:
    """What a peer is given. `limit` is in seconds from its start."""

    model: PreTrainedModel
    requests: Sequence[WorkloadRequest]
    backend_name: str
    max_batch_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests, in and out."""
        return sum(len(request.prompt_ids) + request.num_output_tokens for request in self.requests)

    def config(self) -> hf_paged.PagedConfig:
        """Room for all requests at once, which generate_batch gets too."""
        size = hf_paged.PagedConfig().block_size
        num_blocks = sum(-(-(len(r.prompt_ids) + r.num_output_tokens) // size) for r in self.requests)
        return hf_paged.PagedConfig(
            num_blocks=num_blocks + 16, max_batch_tokens=self.max_batch_tokens, attention_backend=self.backend_name
        )


# A peer prepares itself and returns what runs requests until a moment of time.monotonic(), and what ends it.
Run = Callable[[Sequence[WorkloadRequest], float], Tokens]
Peer = Callable[[Job], tuple[Run, Callable[[], None]]]


def run_engine(job: Job) -> tuple[Run, Callable[[], None]]:
    """PagedEngine, a step at a time."""
    engine = hf_paged.PagedEngine(job.model, job.config())

    def run(requests: Sequence[WorkloadRequest], until: float) -> Tokens:
        ids = [
            engine.add_request(list(request.prompt_ids), max_new_tokens=request.num_output_tokens)
            for request in requests
        ]
        tokens: dict[str, tuple[int, ...]] = {}
        while engine.has_unfinished_requests and time.monotonic() < until:
            for output in engine.step():
                tokens[output.request_id] = output.outputs[0].token_ids
        for request_id in ids if engine.has_unfinished_requests else ():
            if request_id in engine.core.requests:
                engine.abort(request_id)
        return [list(tokens.get(request_id, ())) for request_id in ids]

    return run, engine.close


def run_hook(job: Job) -> tuple[Run, Callable[[], None]]:
    """One padded call of `generate` with our cache."""

    def run(requests: Sequence[WorkloadRequest], until: float) -> Tokens:
        return _generate(job.model, requests, until, cache_implementation="paged", cache_config=job.config())

    return run, functools.partial(hf_paged.release, job.model)


def run_generate(job: Job) -> tuple[Run, Callable[[], None]]:
    """Padded batches in arrival order."""

    def run(requests: Sequence[WorkloadRequest], until: float) -> Tokens:
        tokens: Tokens = []
        for begin in range(0, len(requests), STOCK_BATCH_SIZE):
            batch = requests[begin : begin + STOCK_BATCH_SIZE]
            tokens += _generate(job.model, batch, until) if time.monotonic() < until else [[] for _ in batch]
        return tokens

    return run, lambda: None


class _Ends(StoppingCriteria):
    """Ends each row at a length of its own, as an end-of-sequence token would, and all rows at a moment."""

    eos_token_id = torch.tensor([-1])  # stock pads a row behind its end where a criterion has this attribute

    def __init__(self, lengths: torch.Tensor, until: float) -> None:
        self._lengths = lengths  # [B], prompt and padding included
        self._until = until

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if time.monotonic() >= self._until:
            return torch.ones_like(self._lengths, dtype=torch.bool)
        return self._lengths <= input_ids.shape[1]


def _generate(model: PreTrainedModel, requests: Sequence[WorkloadRequest], until: float, **options: Any) -> Tokens:
    """One padded call of `generate`; rows hold at most what was wanted of them."""
    ids, mask = (tensor.to(model.device) for tensor in left_padded(requests))
    lengths = torch.tensor([request.num_output_tokens for request in requests], device=model.device)
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=int(lengths.max()),
        stopping_criteria=StoppingCriteriaList([_Ends(ids.shape[1] + lengths, until)]),
        **options,
    )
    rows = output[:, ids.shape[1] :].tolist()
    return [row[: request.num_output_tokens] for row, request in zip(rows, requests, strict=True)]


def run_generate_batch(job: Job) -> tuple[Run, Callable[[], None]]:
    """Transformers' own continuous batching, with room for all requests at once."""
    config = ContinuousBatchingConfig(
        num_blocks=job.num_tokens // PAGE_SIZE + 2 * len(job.requests),
        max_batch_tokens=job.max_batch_tokens,
        **sdpa_pages(PAGE_SIZE),
    )
    hints = WorkloadHints(
        max_prompt_length=max(len(request.prompt_ids) for request in job.requests),
        max_generated_length=max(request.num_output_tokens for request in job.requests),
        num_requests=len(job.requests),
    )
    manager = job.model.init_continuous_batching(continuous_batching_config=config, workload_hints=hints)
    manager.start()

    def run(requests: Sequence[WorkloadRequest], until: float) -> Tokens:
        ids = [
            manager.add_request(list(request.prompt_ids), max_new_tokens=request.num_output_tokens, eos_token_id=-1)
            for request in requests
        ]
        tokens: dict[str, list[int]] = {}
        finished: set[str] = set()
        while len(finished) < len(ids) and time.monotonic() < until:
            result = manager.get_result(timeout=0.2)
            if result is not None and result.error is not None:
                raise RuntimeError(f"generate_batch failed: {result.error}")
            if result is not None and result.is_finished():
                tokens[result.request_id] = list(result.generated_tokens)
                finished.add(result.request_id)
            elif result is None and not manager.is_running():
                raise RuntimeError("generate_batch's thread has ended before its requests.")
        if len(finished) < len(ids):
            processor = manager.batch_processor
            active = {} if processor is None else dict(processor.scheduler.active_requests)
            for request_id, state in active.items():
                tokens.setdefault(request_id, list(state.generated_tokens))
            for request_id in set(ids) - finished:
                manager.cancel_request(request_id)
        return [tokens.get(request_id, []) for request_id in ids]

    return run, functools.partial(manager.stop, block=True, timeout=20)
