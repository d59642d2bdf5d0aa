"""Who is compared.

    stock generate        the usual script: left-padded batches in arrival order, each as long as its longest row
    stock generate_batch  Transformers' own continuous batching
    hf_paged engine       PagedEngine.generate
    hf_paged hook         one call of model.generate(..., cache_implementation="paged"); a row leaves when it has enough

Each runs a whole workload, greedy, and returns exactly the tokens that the workload wants.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.continuous_batching.utils import WorkloadHints

from benchmarks.workloads import WorkloadRequest

Tokens = list[list[int]]  # a request each
WARM_UP = (WorkloadRequest(tuple(range(10, 18)), 4), WorkloadRequest(tuple(range(20, 24)), 4))


@dataclass(frozen=True)
class Settings:
    """What peers that have such a setting share, so that they get the same room."""

    batch_size: int = 16  # rows of a padded batch
    kv_tokens: int = 8192  # tokens that a pool holds
    max_batch_tokens: int = 512  # tokens computed in a step


@dataclass(frozen=True)
class Report:
    """What a peer says of a run, besides its tokens. None: it has no way to tell, or it doesn't apply."""

    kv_bytes: int  # reserved for K and V
    token_occupancy: float | None  # slots that held tokens per slot allocated, over all steps
    done_seconds: tuple[float, ...]  # from the start until each request's last token was there
    first_token_seconds: tuple[float, ...] | None = None
    num_steps: int | None = None
    num_preemptions: int | None = None
    num_fallbacks: int | None = None


class Peer(Protocol):
    """Started once in a process of its own, then asked for one workload."""

    def __init__(self, model: PreTrainedModel, requests: Sequence[WorkloadRequest], settings: Settings) -> None:
        """Prepares everything that can be there before the first request."""

    def run(self, requests: Sequence[WorkloadRequest]) -> tuple[Tokens, Report]:
        """All requests at once."""

    def close(self) -> None:
        """Ends what runs in the background."""


class StockGenerate:
    """Padded batches in arrival order. What a row gets beyond its own length is cut off."""

    def __init__(self, model: PreTrainedModel, requests: Sequence[WorkloadRequest], settings: Settings) -> None:
        self._model = model
        self._batch_size = settings.batch_size

    def close(self) -> None:
        pass

    def run(self, requests: Sequence[WorkloadRequest]) -> tuple[Tokens, Report]:
        start = time.monotonic()
        tokens: Tokens = []
        done: list[float] = []
        most_slots = held = allocated = num_steps = 0
        for begin in range(0, len(requests), self._batch_size):
            batch = requests[begin : begin + self._batch_size]
            ids, mask = left_padded(batch)
            longest = max(request.num_output_tokens for request in batch)
            output = self._model.generate(ids, attention_mask=mask, max_new_tokens=longest)
            rows = output[:, ids.shape[1] :].tolist()
            tokens += [row[: request.num_output_tokens] for row, request in zip(rows, batch, strict=True)]
            done += [time.monotonic() - start] * len(batch)
            # The last token of a row is never fed back, so a step s has the prompt and s tokens in its cache.
            most_slots = max(most_slots, len(batch) * (ids.shape[1] + longest - 1))
            num_steps += longest
            for step in range(longest):
                allocated += len(batch) * (ids.shape[1] + step)
                held += sum(len(item.prompt_ids) + min(step, item.num_output_tokens - 1) for item in batch)
        report = Report(
            kv_bytes=most_slots * kv_bytes_per_token(self._model),
            token_occupancy=held / allocated,
            done_seconds=tuple(done),
            first_token_seconds=tuple(done),  # nothing leaves before its batch is complete
            num_steps=num_steps,
        )
        return tokens, report


class StockGenerateBatch:
    """The manager behind `generate_batch`, which takes a length a request where `generate_batch` takes one for all."""

    PAGE_SIZE = 32

    def __init__(self, model: PreTrainedModel, requests: Sequence[WorkloadRequest], settings: Settings) -> None:
        config = ContinuousBatchingConfig(
            num_blocks=settings.kv_tokens // self.PAGE_SIZE,
            max_batch_tokens=settings.max_batch_tokens,
            **_sdpa_pages(self.PAGE_SIZE),
        )
        hints = WorkloadHints(
            max_prompt_length=max(len(request.prompt_ids) for request in requests),
            max_generated_length=max(request.num_output_tokens for request in requests),
            num_requests=len(requests),
        )  # as generate_batch itself gives them
        self._manager = model.init_continuous_batching(continuous_batching_config=config, workload_hints=hints)
        self._manager.start()
        self._kv_bytes = settings.kv_tokens * kv_bytes_per_token(model)
        self._held = self._allocated = self._num_steps = 0
        self._is_watched = False

    def close(self) -> None:
        self._manager.stop(block=True)

    def run(self, requests: Sequence[WorkloadRequest]) -> tuple[Tokens, Report]:
        self._watch()
        self._held = self._allocated = self._num_steps = 0
        start, clock = time.monotonic(), time.perf_counter()  # its timestamps are perf_counter's
        ids = [
            self._manager.add_request(
                list(request.prompt_ids),
                max_new_tokens=request.num_output_tokens,
                eos_token_id=-1,
                record_timestamps=True,
            )
            for request in requests
        ]
        results: dict[str, Any] = {}
        done: dict[str, float] = {}
        while len(results) < len(requests):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"generate_batch failed: {result.error}")
                results[result.request_id] = result
                done[result.request_id] = time.monotonic() - start
            elif result is None and not self._manager.is_running():
                raise RuntimeError("generate_batch's thread has ended before its requests.")
        report = Report(
            kv_bytes=self._kv_bytes,
            token_occupancy=self._held / self._allocated if self._allocated else None,
            done_seconds=tuple(done[request_id] for request_id in ids),
            first_token_seconds=tuple(results[request_id].timestamps[0] - clock for request_id in ids),
            num_steps=self._num_steps or None,
        )
        return [results[request_id].generated_tokens for request_id in ids], report

    def _watch(self) -> None:
        """Counts how full its blocks are after each step, from the release that keeps its tables where we look."""
        while self._manager.batch_processor is None:  # its thread is about to make it
            time.sleep(0.01)
        processor = self._manager.batch_processor
        allocators = getattr(processor.cache, "cache_allocators", None)
        if self._is_watched or allocators is None:
            return
        self._is_watched = True
        (allocator,) = allocators.values()
        update = processor.update_batch

        def update_and_count() -> None:
            self._num_steps += 1
            self._held += sum(state.current_len() for state in processor.scheduler.active_requests.values())
            self._allocated += sum(map(len, allocator.block_table.values())) * self.PAGE_SIZE
            update()

        processor.update_batch = update_and_count


class PagedEnginePeer:
    """Our engine, with a pool of the same tokens and the same token budget as generate_batch has."""

    def __init__(self, model: PreTrainedModel, requests: Sequence[WorkloadRequest], settings: Settings) -> None:
        import hf_paged

        config = hf_paged.PagedConfig(max_batch_tokens=settings.max_batch_tokens)
        config = config.with_options(num_blocks=settings.kv_tokens // config.block_size)
        self._engine = hf_paged.PagedEngine(model, config)

    def close(self) -> None:
        self._engine.close()

    def run(self, requests: Sequence[WorkloadRequest]) -> tuple[Tokens, Report]:
        before = self._engine.stats()
        start = time.monotonic()
        outputs = self._engine.generate(
            [request.prompt_ids for request in requests],
            max_new_tokens=[request.num_output_tokens for request in requests],
        )
        stats = self._engine.stats()
        metrics = [output.metrics for output in outputs]
        report = Report(
            kv_bytes=stats["pool_bytes"],
            token_occupancy=stats["token_occupancy"],
            done_seconds=tuple((item.finished_time or start) - start for item in metrics),
            first_token_seconds=tuple((item.first_token_time or start) - start for item in metrics),
            num_steps=stats["num_steps"] - before["num_steps"],
            num_preemptions=stats["num_preemptions"] - before["num_preemptions"],
            num_fallbacks=stats["num_fallbacks"],
        )
        return [list(output.token_ids) for output in outputs], report


class PagedHookPeer:
    """Stock's script with two words more, and without the batches: all prompts in one padded call."""

    def __init__(self, model: PreTrainedModel, requests: Sequence[WorkloadRequest], settings: Settings) -> None:
        import hf_paged

        self._model = model
        self._paged = hf_paged
        self._config = hf_paged.PagedConfig(max_batch_tokens=settings.max_batch_tokens)

    def close(self) -> None:
        self._paged.release(self._model)

    def _stats(self) -> dict[str, Any]:
        engine = self._paged.get_engine(self._model)
        return {} if engine is None else engine.stats()

    def run(self, requests: Sequence[WorkloadRequest]) -> tuple[Tokens, Report]:
        before = self._stats()
        start = time.monotonic()
        ids, mask = left_padded(requests)
        lengths = torch.tensor([request.num_output_tokens for request in requests])
        output = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=int(lengths.max()),
            stopping_criteria=StoppingCriteriaList([_RowLength(ids.shape[1] + lengths)]),
            cache_implementation="paged",
            cache_config=self._config,
        )
        seconds = time.monotonic() - start
        rows = output[:, ids.shape[1] :].tolist()
        stats = self._stats()
        report = Report(
            kv_bytes=stats.get("pool_bytes", 0),
            token_occupancy=stats.get("token_occupancy"),
            done_seconds=(seconds,) * len(requests),
            first_token_seconds=(seconds,) * len(requests),  # a call of generate returns everything at its end
            num_steps=stats.get("num_steps", 0) - before.get("num_steps", 0),
            num_preemptions=stats.get("num_preemptions", 0) - before.get("num_preemptions", 0),
            # without an engine the call can only have run stock's loop
            num_fallbacks=stats.get("num_fallbacks", 1),
        )
        return [row[: request.num_output_tokens] for row, request in zip(rows, requests, strict=True)], report


class _RowLength(StoppingCriteria):
    """Ends each row at a length of its own, as an end-of-sequence token would."""

    # stock pads a row behind its end, instead of decoding it on, where a criterion has this attribute
    eos_token_id = torch.tensor([-1])

    def __init__(self, lengths: torch.Tensor) -> None:
        self._lengths = lengths  # [B], prompt and padding included

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return self._lengths.to(input_ids.device) <= input_ids.shape[1]


PEERS: dict[str, type[Peer]] = {
    "stock generate": StockGenerate,
    "stock generate_batch": StockGenerateBatch,
    "hf_paged engine": PagedEnginePeer,
    "hf_paged hook": PagedHookPeer,
}
OURS = "hf_paged engine"


def _sdpa_pages(size: int) -> dict[str, Any]:
    """Options whose names differ between the releases of Transformers: pages of `size` tokens, and sdpa kept."""
    names = {field.name for field in fields(ContinuousBatchingConfig)}
    options: dict[str, Any] = {"page_size" if "page_size" in names else "block_size": size}
    return {**options, "auto_switch_to_flash": False} if "auto_switch_to_flash" in names else options


def left_padded(requests: Sequence[WorkloadRequest]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts `[B, L]` and their mask `[B, L]`, padded on the left to the longest."""
    longest = max(len(request.prompt_ids) for request in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask[row, longest - len(request.prompt_ids) :] = 1
    return ids, mask


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of K and V of one token over all layers, for models whose layers are alike."""
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize)
