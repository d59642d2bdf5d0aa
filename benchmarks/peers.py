"""Who is compared in this environment; `benchmarks/runners` has those of others.

    stock generate               the usual script: left-padded batches in arrival order, each as long as its longest row
    stock generate, batches of 8
    stock generate, by length    the careful script: prompts sorted by length before they are cut into batches
    stock generate_batch         Transformers' own continuous batching
    hf_paged engine              PagedEngine.generate
    hf_paged engine, no prefixes the same without prefix caching
    hf_paged hook                one call of model.generate(..., cache_implementation="paged"); a row leaves when it has
                                 enough

Each runs a whole workload, greedy unless a prompt wants several answers, and returns exactly the tokens that it wants.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.continuous_batching.utils import WorkloadHints

from benchmarks.peer import Peer, Report, Settings, Tokens
from benchmarks.workloads import WorkloadRequest, answers_of


class StockGenerate:
    """Padded batches. What a row gets beyond its own length is cut off.

    Args:
        batch_size: rows of a batch; None for the settings'.
        by_length: prompts are sorted by length before they are cut into batches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[WorkloadRequest],
        settings: Settings,
        *,
        batch_size: int | None = None,
        by_length: bool = False,
    ) -> None:
        self._model = model
        self._batch_size = batch_size or settings.batch_size
        self._by_length = by_length

    def close(self) -> None:
        pass

    def run(self, requests: Sequence[WorkloadRequest]) -> tuple[Tokens, Report]:
        start = time.monotonic()
        order = list(range(len(requests)))
        if self._by_length:
            order.sort(key=lambda index: len(requests[index].prompt_ids))
        tokens: list[list[list[int]]] = [[] for _ in requests]
        done = [0.0] * len(requests)
        most_slots = held = allocated = num_steps = 0
        count = requests[0].num_sequences
        size = max(1, self._batch_size // count)
        for begin in range(0, len(requests), size):
            indices = order[begin : begin + size]
            batch = [requests[index] for index in indices]
            ids, mask = left_padded(batch)
            longest = max(request.num_output_tokens for request in batch)
            several = {"num_return_sequences": count} if count > 1 else {}
            output = self._model.generate(ids, attention_mask=mask, max_new_tokens=longest, **several)
            rows = output[:, ids.shape[1] :].tolist()
            for place, index in enumerate(indices):
                wanted = requests[index].num_output_tokens
                tokens[index] = [row[:wanted] for row in rows[place * count : (place + 1) * count]]
                done[index] = time.monotonic() - start
            # The last token of a row is never fed back, so a step s has the prompt and s tokens in its cache.
            most_slots = max(most_slots, len(rows) * (ids.shape[1] + longest - 1))
            num_steps += longest
            for step in range(longest):
                allocated += len(rows) * (ids.shape[1] + step)
                held += count * sum(len(item.prompt_ids) + min(step, item.num_output_tokens - 1) for item in batch)
        report = Report(
            kv_bytes=most_slots * kv_bytes_per_token(self._model),
            token_occupancy=held / allocated,
            done_seconds=tuple(done),
            first_token_seconds=tuple(done),  # nothing leaves before its batch is complete
            num_steps=num_steps,
        )
        return [answer for answers in tokens for answer in answers], report


class StockGenerateBatch:
    """The manager behind `generate_batch`, which takes a length a request where `generate_batch` takes one for all."""

    PAGE_SIZE = 32

    def __init__(self, model: PreTrainedModel, requests: Sequence[WorkloadRequest], settings: Settings) -> None:
        config = ContinuousBatchingConfig(
            num_blocks=settings.kv_tokens // self.PAGE_SIZE,
            max_batch_tokens=settings.max_batch_tokens,
            **sdpa_pages(self.PAGE_SIZE),
        )
        hints = WorkloadHints(
            max_prompt_length=max(len(request.prompt_ids) for request in requests),
            max_generated_length=max(request.num_output_tokens for request in requests),
            num_requests=sum(request.num_sequences for request in requests),
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
            for _ in range(request.num_sequences)
        ]
        results: dict[str, Any] = {}
        done: dict[str, float] = {}
        while len(results) < len(ids):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"generate_batch failed: {result.error}")
                results[result.request_id] = result
                done[result.request_id] = time.monotonic() - start
            elif result is None and not self._manager.is_running():
                raise RuntimeError("generate_batch's thread has ended before its requests.")
        by_request = answers_of(requests, ids)
        first = {request_id: result.timestamps[0] - clock for request_id, result in results.items()}
        report = Report(
            kv_bytes=self._kv_bytes,
            token_occupancy=self._held / self._allocated if self._allocated else None,
            done_seconds=tuple(max(done[request_id] for request_id in members) for members in by_request),
            first_token_seconds=tuple(min(first[request_id] for request_id in members) for members in by_request),
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

    def __init__(
        self, model: PreTrainedModel, requests: Sequence[WorkloadRequest], settings: Settings, **options: Any
    ) -> None:
        import hf_paged

        config = hf_paged.PagedConfig(max_batch_tokens=settings.max_batch_tokens, **options)
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
            num_return_sequences=[request.num_sequences for request in requests],
        )
        stats = self._engine.stats()
        looked_up = stats["prefix_query_tokens"]
        metrics = [output.metrics for output in outputs]
        report = Report(
            kv_bytes=stats["pool_bytes"],
            token_occupancy=stats["token_occupancy"],
            done_seconds=tuple((item.finished_time or start) - start for item in metrics),
            first_token_seconds=tuple((item.first_token_time or start) - start for item in metrics),
            num_steps=stats["num_steps"] - before["num_steps"],
            num_preemptions=stats["num_preemptions"] - before["num_preemptions"],
            num_fallbacks=stats["num_fallbacks"],
            prefix_hit_rate=stats["prefix_hit_tokens"] / looked_up if looked_up else None,
        )
        return [list(answer.token_ids) for output in outputs for answer in output.outputs], report


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
        count = requests[0].num_sequences
        wanted = [request.num_output_tokens for request in requests for _ in range(count)]
        lengths = torch.tensor(wanted)
        several = {"num_return_sequences": count} if count > 1 else {}
        output = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=int(lengths.max()),
            stopping_criteria=StoppingCriteriaList([_RowLength(ids.shape[1] + lengths)]),
            cache_implementation="paged",
            cache_config=self._config,
            **several,
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
        return [row[:length] for row, length in zip(rows, wanted, strict=True)], report


class _RowLength(StoppingCriteria):
    """Ends each row at a length of its own, as an end-of-sequence token would."""

    # stock pads a row behind its end, instead of decoding it on, where a criterion has this attribute
    eos_token_id = torch.tensor([-1])

    def __init__(self, lengths: torch.Tensor) -> None:
        self._lengths = lengths  # [B], prompt and padding included

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return self._lengths.to(input_ids.device) <= input_ids.shape[1]


# A peer is made of the model, the requests that it will get, and the settings.
PEERS: dict[str, Callable[[PreTrainedModel, Sequence[WorkloadRequest], Settings], Peer]] = {
    "stock generate": StockGenerate,
    "stock generate, batches of 8": functools.partial(StockGenerate, batch_size=8),
    "stock generate, by length": functools.partial(StockGenerate, by_length=True),
    "stock generate_batch": StockGenerateBatch,
    "hf_paged engine": PagedEnginePeer,
    "hf_paged engine, no prefixes": functools.partial(PagedEnginePeer, enable_prefix_caching=False),
    "hf_paged hook": PagedHookPeer,
}


def sdpa_pages(size: int) -> dict[str, Any]:
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
