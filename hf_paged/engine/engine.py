"""PagedEngine: continuous batching of many requests over one model and one block pool.

    add_request ─▶ inbox ─▶ Scheduler ─▶ ModelRunner ─▶ choose ─▶ append, stop, free ─▶ RequestOutput snapshots
                                 ▲                                        │
                                 └────────────────────────────────────────┘   one step(); whoever waits drives it
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.config import PagedConfig
from hf_paged.engine.batch import LogitsRows
from hf_paged.engine.fair_lock import FairLock
from hf_paged.engine.model_runner import ModelRunner
from hf_paged.engine.params import LIST_FIELDS, RequestResolver
from hf_paged.engine.probe import position_limit
from hf_paged.engine.returned_cache import copy_rows
from hf_paged.engine.sampler import Choice, SamplerRow, choose, token_logprobs
from hf_paged.engine.selfcheck import check_packed_step
from hf_paged.engine.sizing import blocks_in_memory, engine_blocks
from hf_paged.engine.stats import EngineCounters
from hf_paged.engine.stopping import finish_of
from hf_paged.engine.unwrap import unwrap_model
from hf_paged.engine.weights import weights_fingerprint
from hf_paged.errors import (
    CapacityError,
    EngineClosedError,
    GenerationFailedError,
    PagedError,
    RequestError,
    UnknownRequestError,
)
from hf_paged.request import Request, RequestOutput, Sequence, SequenceState
from hf_paged.scheduler.output import SchedulerOutput
from hf_paged.scheduler.scheduler import Scheduler


class PagedEngine:
    """Runs requests that join and leave at every step.

    Any thread may add, stream and abort. Whoever waits for an output drives the loop, a step at a time, under one lock
    that is served in order; every step advances everybody's requests. A context manager.

    Args:
        model: a causal language model; PEFT and compiled wrappers are unwrapped.
        config: the settings; None for the defaults.
        tokenizer: needed for prompts given as text, and for `stop_strings`.

    Raises:
        UnsupportedModelError: the model can't run packed; the message says why.
        PoolMemoryError: the pool doesn't fit.
    """

    def __init__(self, model: Any, config: PagedConfig | None = None, tokenizer: Any = None) -> None:
        model = unwrap_model(model)
        self._setup(lambda: model, PagedConfig.from_any(config), tokenizer)
        if self.config.num_blocks is None:
            context = self._max_positions or getattr(
                model.config.get_text_config(decoder=True), "max_position_embeddings", None
            )
            self._allocator.grow(engine_blocks(self._runner, self._allocator, self.config, context))
        self._runner.allocate_pool(self._allocator)

    @classmethod
    def on_demand(cls, get_model: Callable[[], PreTrainedModel], config: PagedConfig) -> PagedEngine:
        """An engine that doesn't hold its model and whose pool starts empty; `reserve` makes it as large as needed."""
        engine = cls.__new__(cls)
        engine._setup(get_model, config, None)
        return engine

    def _setup(self, get_model: Callable[[], PreTrainedModel], config: PagedConfig, tokenizer: Any) -> None:
        model = get_model()
        self.config = config
        self.tokenizer = tokenizer
        self._get_model = get_model
        self._runner = ModelRunner(get_model, config)
        self._vocab_size = model.get_input_embeddings().weight.shape[0]
        self._max_positions = position_limit(model)
        with self._runner.lock:
            check_packed_step(self._runner, model, config, self._vocab_size)
        self._allocator = BlockAllocator(
            self._runner.layout.groups,
            config.block_size,
            config.num_blocks or 0,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_requests_per_batch,
            enable_prefix_caching=config.enable_prefix_caching,
            prefix_cache_fraction=config.prefix_cache_fraction,
        )
        self._scheduler = Scheduler(self._allocator, config.max_batch_tokens, config.max_requests_per_batch)
        self._resolver = RequestResolver(model, tokenizer, self._vocab_size)
        self._counters = EngineCounters()
        self._lock = FairLock()
        self._requests: dict[str, Request] = {}
        self._queues: dict[str, deque[RequestOutput]] = {}
        self._changed: dict[str, Request] = {}
        self._ids = itertools.count()
        self._weights: Any = None
        self._is_closed = False
        self._process = os.getpid()

    # -- requests ---------------------------------------------------------------------------------------------------

    def add_request(self, prompt: Any, **keywords: Any) -> str:
        """Queues a request; its outputs come from `step()`.

        Args:
            prompt: token ids (a list, or a 1-D tensor), or text if the engine has a tokenizer.
            **keywords: fields of GenerationConfig, and seed, logit_bias, logprobs, prompt_logprobs, cache_salt,
                priority, request_id, logits_processor, stopping_criteria, generation_config. None switches a field
                off; one that is absent has the model's default.

        Returns:
            The request's id.

        Raises:
            RequestError: a bad prompt or keyword.
            CapacityError: the request can never fit, or the queue is full.
            EngineClosedError: after `close()`.
        """
        request = self._make_request(prompt, keywords)
        with self._lock:
            self._add(request)
        return request.request_id

    def _make_request(self, prompt: Any, keywords: Mapping[str, Any]) -> Request:
        self._require_open()
        token_ids = self._token_ids(prompt)
        resolved = self._resolver.resolve(self._get_model(), len(token_ids), keywords)
        request_id = keywords.get("request_id")
        request = Request(
            f"request-{next(self._ids)}" if request_id is None else str(request_id),
            token_ids,
            resolved.max_new_tokens,
            num_sequences=resolved.num_sequences,
            priority=resolved.priority,
            cache_salt=resolved.cache_salt,
            sampling=resolved.sampling,
            wants_logprobs=resolved.sampling.num_logprobs is not None,
            wants_prompt_logprobs=resolved.sampling.num_prompt_logprobs is not None,
        )
        self._check_fits(request)
        return request

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("A prompt of text needs a tokenizer: PagedEngine(model, config, tokenizer=tokenizer).")
            prompt = self.tokenizer(prompt)["input_ids"]
        ids = torch.as_tensor(prompt, dtype=torch.int64).cpu()
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.dim() != 1:
            raise RequestError(f"A prompt is one row of token ids, not a tensor of shape {tuple(ids.shape)}.")
        if len(ids) == 0:
            raise RequestError("A prompt cannot be empty; give at least one token, such as the bos token.")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise RequestError(f"The prompt has token id {wrong}; the model's ids go from 0 to {self._vocab_size - 1}.")
        return ids.tolist()

    def _check_fits(self, request: Request) -> None:
        prompt, new = request.num_prompt_tokens, request.max_new_tokens
        if self._max_positions is not None and request.max_computed_tokens > self._max_positions:
            raise CapacityError(
                f"A prompt of {prompt} tokens and {new} new ones pass the model's {self._max_positions} positions; at most "
                f"{max(0, self._max_positions - prompt + 1)} new tokens fit after this prompt."
            )
        limit = self._allocator.max_tokens_per_sequence
        if limit is not None and request.max_computed_tokens > limit:
            raise CapacityError(
                f"A prompt of {prompt} tokens and {new} new ones don't fit into the pool of {limit} tokens; "
                f"at most {max(0, limit - prompt + 1)} new tokens fit after this prompt, or raise PagedConfig.num_blocks "
                "or memory_fraction."
            )

    def _add(self, request: Request) -> None:
        self._require_open()
        if request.request_id in self._requests:
            raise RequestError(f"A request {request.request_id!r} is running already; choose another request_id.")
        queue_size = self.config.max_queue_size
        if queue_size is not None and self._scheduler.num_waiting >= queue_size:
            raise CapacityError(
                f"{queue_size} requests are waiting already (PagedConfig.max_queue_size); try again later, or raise it."
            )
        if not self._requests:
            self._notice_new_weights()
        self._requests[request.request_id] = request
        self._scheduler.add(request.sequences[0])

    def _notice_new_weights(self) -> None:
        if not self.config.enable_prefix_caching:
            return
        weights = weights_fingerprint(self._get_model())
        if weights is None or weights != self._weights:
            self.reset_prefix_cache()
        self._weights = weights

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; its last output says "abort".

        Raises:
            UnknownRequestError: no such request is unfinished.
        """
        with self._lock:
            request = self._requests.get(request_id)
            if request is None:
                raise UnknownRequestError(f"No unfinished request {request_id!r}.")
            self._counters.num_aborted += 1
            self._end(request, "abort")

    def _end(self, request: Request, finish_reason: str, error: BaseException | None = None) -> None:
        # ends every sequence of a request that hasn't ended
        request.error = error
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._finish(sequence, finish_reason, None)

    def _finish(self, sequence: Sequence, finish_reason: str, stop_reason: int | str | None) -> None:
        sequence.finish_reason, sequence.stop_reason = finish_reason, stop_reason
        self._scheduler.finish(sequence)
        request = sequence.request
        self._changed[request.request_id] = request
        if request.is_finished:
            request.finished_time = time.monotonic()
            self._requests.pop(request.request_id, None)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Runs one step, if there is anything to run.

        Returns:
            A snapshot of each request that changed since the last call, whoever else waits for it.
        """
        with self._lock:
            self._require_open()
            self._step()
            return self._publish()

    def _step(self) -> bool:
        output = self._scheduler.schedule()
        if not output.scheduled:
            return False
        try:
            self._runner.copy_blocks(output.copies)
            for part, logits, rows in self._run(output):
                self._take(part, logits, rows)
        except BaseException:  # interrupted: what was allocated for this step may not be written, so compute it again
            for item in output.scheduled:
                if item.sequence.state is SequenceState.RUNNING:
                    self._scheduler.preempt(item.sequence)
            raise
        self._counters.count_step(output.num_tokens, self._scheduler.running, self._allocator)
        return True

    def _run(self, output: SchedulerOutput) -> Iterator[tuple[SchedulerOutput, torch.Tensor, tuple[LogitsRows, ...]]]:
        """Runs a step whole. If its forward raises, each sequence runs alone, and only those that raise again end."""
        try:
            logits, rows = self._runner.run(output)
        except Exception as error:
            if len(output.scheduled) == 1:
                self._fail(output.scheduled[0].sequence.request, error)
                return
        else:
            yield output, logits, rows
            return
        for item in output.scheduled:
            if not item.sequence.is_finished:  # a sibling may have ended the request
                yield from self._run(SchedulerOutput((item,), ((),) * len(output.copies), item.num_new_tokens))

    def _take(self, output: SchedulerOutput, logits: torch.Tensor, rows: tuple[LogitsRows, ...]) -> None:
        for item in output.scheduled:
            item.sequence.num_computed_tokens += item.num_new_tokens
            self._allocator.commit(item.sequence)
        sampler_rows: list[SamplerRow] = []
        for span in rows:
            self._take_prompt_logprobs(span.sequence, logits[span.start : span.stop], span.first_position)
            if span.is_last_chunk:
                sampler_rows += self._rows_of(span.sequence, span.stop - 1, logits)
        if sampler_rows:
            for row, choice in zip(sampler_rows, choose(sampler_rows, logits), strict=True):
                self._append(row.sequence, choice)

    def _rows_of(self, sequence: Sequence, row: int, logits: torch.Tensor) -> list[SamplerRow]:
        # the sequences that take their next token from this row: itself, and siblings born when its prompt is computed
        request = sequence.request
        sequences = [sequence]
        if len(request.sequences) < request.num_sequences:
            for index in range(1, request.num_sequences):
                child = Sequence(request, index, list(request.prompt_token_ids))
                request.sequences.append(child)
                self._scheduler.fork(sequence, child)
                sequences.append(child)
        if request.sampling.is_external:
            for each in sequences:
                each.next_logits = logits[row]
            return []
        return [SamplerRow(each, row) for each in sequences]

    def _append(self, sequence: Sequence, choice: Choice) -> None:
        request = sequence.request
        if sequence.is_finished:  # a sibling's error has ended the request
            return
        if choice.error is not None:
            self._fail(request, choice.error)
            return
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        sequence.token_ids.append(choice.token_id)
        if choice.logprobs is not None:
            sequence.logprobs.append(choice.logprobs)
        self._changed[request.request_id] = request
        try:
            finish = finish_of(sequence)
        except Exception as error:
            self._fail(request, error)
            return
        if finish is not None:
            self._finish(sequence, *finish)
            self._counters.num_finished += request.is_finished

    def _take_prompt_logprobs(self, sequence: Sequence, logits: torch.Tensor, first_position: int) -> None:
        request = sequence.request
        if not request.wants_prompt_logprobs or sequence.index or first_position + 1 < len(request.prompt_logprobs):
            return
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)  # nothing stands before the first token
        targets = request.prompt_token_ids[first_position + 1 : first_position + 1 + len(logits)]
        counts = [request.sampling.num_prompt_logprobs or 0] * len(targets)
        if targets:
            request.prompt_logprobs += token_logprobs(logits[: len(targets)], list(targets), counts)

    def _fail(self, request: Request, error: Exception) -> None:
        self._counters.num_failed += 1
        self._end(request, "error", error)

    def _publish(self) -> list[RequestOutput]:
        outputs = [request.snapshot() for request in self._changed.values()]
        self._changed.clear()
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.append(output)
        return outputs

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    # -- whole calls ------------------------------------------------------------------------------------------------

    def generate(self, prompts: SequenceOf[Any], **keywords: Any) -> list[RequestOutput]:
        """Runs prompts to their end.

        Args:
            prompts: one prompt each, as in `add_request`.
            **keywords: as in `add_request`. A list with one value a prompt is taken for fields that are one value by
                nature (max_new_tokens, temperature, seed, ...), and for generation_config.

        Returns:
            The final outputs, in the order of the prompts.

        Raises:
            RequestError: one of the requests is malformed; none has run.
            GenerationFailedError: a request ended with an error; the others ran to their end, and its `outputs` has all.
        """
        per_prompt = _spread(keywords, len(prompts))
        requests = [self._make_request(prompt, options) for prompt, options in zip(prompts, per_prompt, strict=True)]
        return self.run(requests)

    def run(self, requests: SequenceOf[Request]) -> list[RequestOutput]:
        """Runs requests that are made already to their end; returns and raises as `generate` does."""
        final: dict[str, RequestOutput] = {}
        with self._consumer(requests) as queues:
            while len(final) < len(requests):
                with self._lock:
                    for queue in queues:
                        while queue:
                            output = queue.popleft()
                            if output.finished:
                                final[output.request_id] = output
                    if len(final) < len(requests):
                        self._drive()
        outputs = [final[request.request_id] for request in requests]
        _raise_failure(outputs)
        return outputs

    def stream(self, prompt: Any, **keywords: Any) -> Iterator[RequestOutput]:
        """Yields an output a step of one request; the last is finished. Leaving early aborts it."""
        request = self._make_request(prompt, keywords)
        with self._consumer([request]) as (queue,):
            while True:
                with self._lock:
                    if not queue:
                        self._drive()
                while queue:
                    output = queue.popleft()
                    _raise_failure([output])
                    yield output
                    if output.finished:
                        return

    def _consumer(self, requests: SequenceOf[Request]) -> _Consumer:
        return _Consumer(self, requests)

    def _drive(self) -> None:
        # under the lock, by someone whose requests are not finished
        self._require_open()
        advanced = self._step()
        if not self._publish() and not advanced:
            raise PagedError("The engine has unfinished requests but nothing to run; this is a defect of the scheduler.")

    # -- rows driven from outside -------------------------------------------------------------------------------------

    def add_external(self, request: Request) -> None:
        """Queues a request whose tokens are chosen outside: see `external_logits` and `append_tokens`.

        Its `max_new_tokens` may be more than fits: most rows end long before. `append_tokens` raises if one doesn't.
        """
        with self._lock:
            self._add(request)

    def external_logits(self, requests: SequenceOf[Request], active: SequenceOf[int]) -> list[torch.Tensor]:
        """Logits `[vocab]` float32 for the next token of the sequences `active` (indices over all of the requests').

        Runs steps, for everybody, until they are there. Raises what ended a request early.
        """
        while True:
            with self._lock:
                sequences = _all_sequences(requests)
                for request in requests:
                    if request.error is not None:
                        raise request.error
                if all(len(r.sequences) == r.num_sequences for r in requests):
                    found = [sequences[index].next_logits for index in active]
                    if all(logits is not None for logits in found):
                        return found
                self._drive_external()

    def _drive_external(self) -> None:
        self._require_open()
        if not self._step() and not self._publish():
            raise PagedError("The engine has rows without logits but nothing to run; this is a defect of the scheduler.")
        self._publish()

    def append_tokens(self, sequences: SequenceOf[Sequence], token_ids: SequenceOf[int]) -> None:
        """Gives external sequences their next tokens.

        Raises:
            CapacityError: a sequence alone has outgrown the pool, or the model's positions.
        """
        limits = [limit for limit in (self._max_positions, self._allocator.max_tokens_per_sequence) if limit is not None]
        limit = min(limits, default=None)
        with self._lock:
            for sequence, token_id in zip(sequences, token_ids, strict=True):
                if limit is not None and sequence.num_tokens >= limit:
                    raise CapacityError(
                        f"A row has {sequence.num_tokens} tokens and no room for more: the pool, or the model's positions, "
                        f"hold {limit}. Lower max_new_tokens, or raise memory_fraction or num_blocks of the cache_config."
                    )
                sequence.token_ids.append(token_id)
                sequence.next_logits = None
                if sequence.state is SequenceState.IDLE:
                    self._scheduler.add(sequence)

    def finish_external(self, sequences: SequenceOf[Sequence]) -> None:
        """Ends external sequences and takes their blocks; those that have ended are left alone."""
        with self._lock:
            for sequence in sequences:
                if not sequence.is_finished:
                    sequence.next_logits = None
                    self._finish(sequence, "stop", None)

    def copy_rows(self, sequences: SequenceOf[Sequence]) -> PagedKVCache | None:
        """The K and V of external sequences as a cache of their own; None if one of them was preempted."""
        with self._lock:
            if self._runner.cache is None:
                return None
            return copy_rows(self._runner.cache, self._get_model().config, sequences)

    # -- the pool -----------------------------------------------------------------------------------------------------

    def reserve(self, num_blocks: int, num_blocks_at_least: int) -> int:
        """Grows the pool, if nothing runs, to `num_blocks` blocks or as many as memory allows.

        Returns:
            The blocks there are now.

        Raises:
            PoolMemoryError: fewer than `num_blocks_at_least` fit.
        """
        with self._lock:
            if self.config.num_blocks is not None:
                num_blocks = self.config.num_blocks
            elif num_blocks > self._allocator.num_blocks:
                held = self._runner.cache.num_bytes if self._runner.cache is not None else 0
                num_blocks = min(num_blocks, blocks_in_memory(self._runner, self._allocator, self.config, held))
            num_blocks = max(num_blocks, min(num_blocks_at_least, self._allocator.num_blocks))
            if num_blocks > self._allocator.num_blocks or self._runner.cache is None:
                self._allocator.grow(num_blocks)
                self._runner.allocate_pool(self._allocator)
            return self._allocator.num_blocks

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Requests that run keep their blocks."""
        with self._lock:
            self._allocator.reset_prefix_cache()

    def check(self) -> None:
        """Proves the pool's invariants against every unfinished sequence.

        Raises:
            PagedError: naming the first thing that is wrong.
        """
        with self._lock:
            self._allocator.check(
                sequence for request in self._requests.values() for sequence in request.sequences
            )

    def stats(self) -> dict[str, Any]:
        """Counters over the engine's life, and its state now. Blocks are those of the first layer group."""
        with self._lock:
            pool = self._allocator.pools[0]
            cache = self._runner.cache
            return {
                "num_steps": self._counters.num_steps,
                "num_packed_tokens": self._counters.num_packed_tokens,
                "num_attention_calls": self._runner.backend.num_calls,
                "num_running": len(self._scheduler.running),
                "num_waiting": self._scheduler.num_waiting,
                "num_finished": self._counters.num_finished,
                "num_failed": self._counters.num_failed,
                "num_aborted": self._counters.num_aborted,
                "num_preemptions": self._scheduler.num_preemptions,
                "num_fallbacks": self._counters.num_fallbacks,
                "prefix_query_tokens": self._scheduler.prefix_query_tokens,
                "prefix_hit_tokens": self._scheduler.prefix_hit_tokens,
                "num_blocks": pool.num_blocks,
                "peak_blocks": pool.peak_referenced,
                "free_blocks": pool.num_free + pool.num_cached_unreferenced,
                "cached_blocks": pool.num_cached_unreferenced,
                "pool_bytes": cache.num_bytes if cache is not None else 0,
                "token_occupancy": self._counters.token_occupancy,
            }

    def count_fallback(self) -> None:
        """Notes that a call ran stock's loop instead."""
        with self._lock:
            self._counters.num_fallbacks += 1

    # -- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Aborts what runs and gives the pool's memory back. Closing twice does nothing."""
        with self._lock:
            if self._is_closed:
                return
            for request in list(self._requests.values()):
                self._end(request, "abort")
            self._publish()
            self._is_closed = True
            self._runner.cache = None

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("This engine is closed; make a new PagedEngine.")
        if self._process != os.getpid():
            raise EngineClosedError("This engine was made before the process forked; make a PagedEngine in the child.")

    def __enter__(self) -> PagedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Consumer:
    """Queues of one caller's requests, from before they are added until it leaves; what it leaves behind is aborted."""

    def __init__(self, engine: PagedEngine, requests: SequenceOf[Request]) -> None:
        self._engine = engine
        self._requests = requests
        self._added: list[Request] = []

    def __enter__(self) -> list[deque[RequestOutput]]:
        queues = []
        with self._engine._lock:
            try:
                for request in self._requests:
                    self._engine._add(request)
                    self._added.append(request)
                    queue = self._engine._queues[request.request_id] = deque()
                    queues.append(queue)
            except BaseException:
                self._leave()
                raise
        return queues

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._engine._lock:
            self._leave()

    def _leave(self) -> None:
        for request in self._added:
            self._engine._queues.pop(request.request_id, None)
            if self._engine._requests.get(request.request_id) is request:
                self._engine._end(request, "abort")


def _all_sequences(requests: SequenceOf[Request]) -> list[Sequence]:
    return [sequence for request in requests for sequence in request.sequences]


def _spread(keywords: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    spread: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in keywords.items():
        is_list = isinstance(value, list | tuple) and name not in LIST_FIELDS
        if is_list and len(value) != count:
            raise RequestError(f"{name} has {len(value)} values for {count} prompts; give one value, or one a prompt.")
        for index, options in enumerate(spread):
            options[name] = value[index] if is_list else value
    return spread


def _raise_failure(outputs: SequenceOf[RequestOutput]) -> None:
    failed = [output for output in outputs if output.error is not None]
    if failed:
        error = failed[0].error
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise GenerationFailedError(
            f"Request {failed[0].request_id!r}{others} failed: {type(error).__name__}: {error}", outputs
        ) from error

