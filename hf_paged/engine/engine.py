"""PagedEngine: continuous batching of many requests over one model and one block pool.

add_request, generate, stream  ─▶  EngineCore.step(), a step at a time under one fair lock
                                     │ snapshots of what changed
                 step()'s caller  ◀──┴──▶  the queue of each request that someone waits for
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged.config import PagedConfig
from hf_paged.engine.consumer import Consumer, raise_failure
from hf_paged.engine.core import EngineCore
from hf_paged.engine.draft_source import Assistant, DraftSource
from hf_paged.engine.fair_lock import FairLock
from hf_paged.engine.params import RequestResolver, spread
from hf_paged.engine.sizing import engine_blocks
from hf_paged.engine.unwrap import refuse_learned_prompts, unwrap_model
from hf_paged.errors import (
    CapacityError,
    EngineClosedError,
    PagedError,
    RequestError,
    UnknownRequestError,
    UnsupportedModelError,
)
from hf_paged.request import Request, RequestOutput


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
        refuse_learned_prompts(model)
        model = unwrap_model(model)
        self._setup(lambda: model, PagedConfig.from_any(config), tokenizer)
        core = self.core
        core.reserve(
            core.config.num_blocks or engine_blocks(core.runner, core.allocator, core.config, core.max_context)
        )

    @classmethod
    def on_demand(cls, get_model: Callable[[], PreTrainedModel], config: PagedConfig) -> PagedEngine:
        """An engine that doesn't hold its model and whose pool starts empty; `reserve` makes it as large as needed."""
        engine = cls.__new__(cls)
        engine._setup(get_model, config, None)
        engine.core.runner.rows_on_demand = True
        return engine

    def _setup(self, get_model: Callable[[], PreTrainedModel], config: PagedConfig, tokenizer: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.core = EngineCore(get_model, config)
        self.lock = FairLock()
        self._resolver = RequestResolver(get_model(), tokenizer, self.core.vocab_size)
        self._queues: dict[str, deque[RequestOutput]] = {}
        self._unclaimed: dict[str, RequestOutput] = {}
        self._ids = itertools.count()
        self._is_closed = False
        self._process = os.getpid()

    # -- requests ---------------------------------------------------------------------------------------------------

    def add_request(self, prompt: Any, **keywords: Any) -> str:
        """Queues a request; its outputs come from `step()`.

        Args:
            prompt: token ids (a list, or a 1-D tensor), text if the engine has a tokenizer, or embeddings
                `[tokens, hidden]`, whose `prompt_token_ids` are zeros.
            **keywords: fields of GenerationConfig, and seed, logit_bias, presence_penalty and frequency_penalty
                (of generated tokens only), bad_words (text, with and without a space before it), logprobs,
                prompt_logprobs, cache_salt, priority, request_id, logits_processor, stopping_criteria,
                generation_config, adapter (the name of a LoRA adapter, "__base__" for none; None for the model's
                active ones), prefix_allowed_tokens_fn (called with 0, or the prompt's index in `generate`),
                negative_prompt_ids beside guidance_scale, and one of regex, json_schema and ebnf, which the text then
                matches. None switches a field off; one that is absent has the model's default.
                prompt_lookup_num_tokens, or an assistant_model of the same vocabulary, guess tokens that are checked
                together, which changes the time and not the tokens.

        Returns:
            The request's id.

        Raises:
            RequestError: a bad prompt or keyword.
            CapacityError: the request can never fit, or the queue is full.
            EngineClosedError: after `close()`.
        """
        request = self._make_request(prompt, keywords)
        with self.lock:
            self.core.notice_weights()
            self.admit(request)
        return request.request_id

    def _make_request(self, prompt: Any, keywords: Mapping[str, Any]) -> Request:
        self._require_open()
        if keywords.get("assistant_model") is not None:
            keywords = {**keywords, "assistant_model": unwrap_model(keywords["assistant_model"])}
        embeds = self._embeds(prompt) if isinstance(prompt, torch.Tensor) and prompt.is_floating_point() else None
        if embeds is None:
            token_ids = self._token_ids(prompt)
            resolved = self._resolver.resolve(self.core.get_model(), len(token_ids), keywords)
        else:
            token_ids = [0] * len(embeds)
            resolved = self._resolver.resolve(self.core.get_model(), 0, keywords, num_embedded=len(embeds))
        adapter = keywords.get("adapter")
        if adapter is not None:
            self.core.runner.require_adapter(adapter)
        if resolved.sampling.draft_source is not None:
            self._prepare(resolved.sampling.draft_source)
        request_id = keywords.get("request_id")
        request = Request(
            self._new_id() if request_id is None else str(request_id),
            token_ids,
            resolved.max_new_tokens,
            num_sequences=resolved.num_sequences,
            priority=resolved.priority,
            cache_salt=resolved.cache_salt
            if embeds is None
            else uuid.uuid4().hex,  # zeros say nothing about the prompt
            adapter=adapter,
            prompt_embeds=embeds,
            sampling=resolved.sampling,
            wants_logprobs=resolved.sampling.num_logprobs is not None,
            wants_prompt_logprobs=resolved.sampling.num_prompt_logprobs is not None,
        )
        self._check_fits(request)
        return request

    def _prepare(self, source: DraftSource) -> None:
        if not self.core.can_take_back:
            raise RequestError("A model with recurrent states can't take drafts back; leave assisted decoding out.")
        try:
            with self.lock:
                if isinstance(source, Assistant):
                    self.core.speculator.drafter(source.model)
        except UnsupportedModelError as error:
            raise RequestError(f"The assistant_model can't draft in an engine: {error}") from error

    def _new_id(self) -> str:
        while (request_id := f"request-{next(self._ids)}") in self.core.requests:  # a caller may have named one so
            pass
        return request_id

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "A prompt of text needs a tokenizer: PagedEngine(model, config, tokenizer=tokenizer)."
                )
            prompt = self.tokenizer(prompt)["input_ids"]
        try:
            ids = torch.as_tensor(prompt).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(f"A prompt is a list or a tensor of token ids, or text, not {prompt!r:.80}.") from error
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.dim() != 1:
            raise RequestError(f"A prompt is one row of token ids, not a tensor of shape {tuple(ids.shape)}.")
        if len(ids) == 0:
            raise RequestError("A prompt cannot be empty; give at least one token, such as the bos token.")
        if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
            raise RequestError(f"Token ids are integers; this prompt is of type {ids.dtype}.")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.core.vocab_size:
            wrong = low if low < 0 else high
            raise RequestError(
                f"The prompt has token id {wrong}; the model's ids go from 0 to {self.core.vocab_size - 1}."
            )
        return ids.tolist()

    def _embeds(self, prompt: torch.Tensor) -> torch.Tensor:
        reason = self.core.runner.why_no_embeds()
        if reason is not None:
            raise RequestError(f"A prompt can't be embeddings here: {reason}.")
        width = self.core.get_model().get_input_embeddings().weight.shape[1]
        if prompt.dim() == 3 and prompt.shape[0] == 1:
            prompt = prompt[0]
        if prompt.dim() != 2 or prompt.shape[1] != width or not len(prompt):
            raise RequestError(
                f"A prompt of embeddings has shape [tokens, {width}] and at least one token, not {tuple(prompt.shape)}."
            )
        return prompt.detach()

    def _check_fits(self, request: Request) -> None:
        prompt, new = request.num_prompt_tokens, request.max_new_tokens
        if self.core.position_limit is not None and request.max_computed_tokens > self.core.position_limit:
            raise CapacityError(
                f"A prompt of {prompt} tokens and {new} new ones pass the model's {self.core.position_limit} positions;"
                f" at most {max(0, self.core.position_limit - prompt + 1)} new tokens fit after this prompt."
            )
        if self.core.regimes.why_stock(prompt, prompt + new) is not None:
            raise CapacityError(
                f"A prompt of {prompt} tokens and {new} new ones pass position {self.core.regimes.limit}; there this "
                "model's rotary frequencies change in a way that the engine can't follow, so run it in model.generate."
            )
        limit = self.core.allocator.max_tokens_per_sequence
        if limit is not None and request.max_computed_tokens > limit:
            raise CapacityError(
                f"A prompt of {prompt} tokens and {new} new ones don't fit into the pool of {limit} tokens; "
                f"at most {max(0, limit - prompt + 1)} new tokens fit after this prompt, or raise "
                "PagedConfig.num_blocks or memory_fraction."
            )

    def admit(self, request: Request) -> None:
        """Queues a request that is made already. Hold the lock.

        Raises:
            RequestError: its id is in use.
            CapacityError: the queue is full.
        """
        self._require_open()
        if request.request_id in self.core.requests:
            raise RequestError(f"A request {request.request_id!r} is running already; choose another request_id.")
        queue_size = self.config.max_queue_size
        if queue_size is not None and self.core.scheduler.num_waiting >= queue_size:
            raise CapacityError(
                f"{queue_size} requests are waiting already (PagedConfig.max_queue_size); try again later, or raise it."
            )
        request.arrive()
        self.core.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; its last output says "abort".

        Raises:
            UnknownRequestError: no such request is unfinished.
        """
        with self.lock:
            request = self.core.requests.get(request_id)
            if request is None:
                raise UnknownRequestError(f"No unfinished request {request_id!r}.")
            self.core.abort(request)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Runs one step, if there is anything to run.

        Returns:
            A snapshot of each request that changed since the last call, whoever else waits for it.
        """
        with self.lock:
            self._require_open()
            self.core.step()
            outputs = {output.request_id: output for output in self._publish()}
            unclaimed, self._unclaimed = self._unclaimed, {}
            return list({**unclaimed, **outputs}.values())

    def advance(self) -> bool:
        """Runs a step for everybody, by a waiter that holds the lock; False if nothing ran and nothing changed."""
        self._require_open()
        ran = self.core.step()
        return bool(self._publish()) or ran

    def _publish(self) -> list[RequestOutput]:
        # snapshots of what changed go to whoever waits for them, and the others' latest wait for the next step()
        read = (request for request in self.core.changed.values() if not request.is_external | request.is_abandoned)
        outputs = [request.snapshot() for request in read]
        self.core.changed.clear()
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.append(output)
            else:
                self._unclaimed[output.request_id] = output
        return outputs

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.core.requests)

    def open_queue(self, request_id: str) -> deque[RequestOutput]:
        """A queue that gets every output of a request from now on, for someone who waits for it."""
        return self._queues.setdefault(request_id, deque())

    def close_queue(self, request_id: str) -> None:
        """Nobody waits for the request any more."""
        self._queues.pop(request_id, None)

    # -- whole calls ------------------------------------------------------------------------------------------------

    def generate(self, prompts: SequenceOf[Any], **keywords: Any) -> list[RequestOutput]:
        """Runs prompts to their end, those with the most new tokens first: the call lasts as long as its last one.

        Args:
            prompts: one prompt each, as in `add_request`.
            **keywords: as in `add_request`. A list with one value a prompt is taken for fields that are one value by
                nature (max_new_tokens, temperature, seed, ...), and for generation_config.

        Returns:
            The final outputs, in the order of the prompts.

        Raises:
            RequestError: one of the requests is malformed; none has run.
            GenerationFailedError: a request ended with an error; the others ran to their end, see `outputs`.
        """
        per_prompt = spread(keywords, len(prompts))
        requests = [self._make_request(prompt, options) for prompt, options in zip(prompts, per_prompt, strict=True)]
        return self.run(requests)

    def run(self, requests: SequenceOf[Request]) -> list[RequestOutput]:
        """Runs requests that are made already to their end; returns and raises as `generate` does."""
        final: dict[str, RequestOutput] = {}
        # a long one that starts late runs alone at the end, when a step costs as much for one row as for eight
        longest_first = sorted(requests, key=lambda request: -request.max_new_tokens)
        with Consumer(self, longest_first) as queues:
            while len(final) < len(requests):
                with self.lock:
                    for queue in queues:
                        while queue:
                            output = queue.popleft()
                            if output.finished:
                                final[output.request_id] = output
                    if len(final) < len(requests):
                        self._advance()
        outputs = [final[request.request_id] for request in requests]
        raise_failure(outputs)
        return outputs

    def stream(self, prompt: Any, **keywords: Any) -> Iterator[RequestOutput]:
        """Yields an output a step of one request; the last is finished. Leaving early aborts it."""
        request = self._make_request(prompt, keywords)
        with Consumer(self, [request]) as (queue,):
            while True:
                with self.lock:
                    if not queue:
                        self._advance()
                while queue:
                    output = queue.popleft()
                    raise_failure([output])
                    yield output
                    if output.finished:
                        return

    def _advance(self) -> None:
        if not self.advance():
            raise PagedError("The engine has unfinished requests but nothing to run; its scheduler has a defect.")

    # -- the pool -----------------------------------------------------------------------------------------------------

    def reserve(self, num_blocks: int) -> int:
        """Makes the pool hold `num_blocks` blocks if the config and the memory allow; returns how many there are."""
        with self.lock:
            return self.core.reserve(num_blocks)

    def room(self) -> int:
        """Blocks that the pool could have: those of the config, or what memory allows."""
        with self.lock:
            return self.core.room()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Requests that run keep their blocks."""
        with self.lock:
            self.core.allocator.reset_prefix_cache()

    def check(self) -> None:
        """Proves the pool's invariants against every unfinished sequence.

        Raises:
            PagedError: naming the first thing that is wrong.
        """
        with self.lock:
            self.core.check()

    def stats(self) -> dict[str, Any]:
        """Counters over the engine's life, and its state now. Blocks are those of the first layer group."""
        with self.lock:
            pool = self.core.allocator.pools[0]
            cache = self.core.runner.cache
            return {
                "num_steps": self.core.counters.num_steps,
                "num_packed_tokens": self.core.counters.num_packed_tokens,
                "num_attention_calls": self.core.runner.backend.num_calls,
                "num_running": len(self.core.scheduler.running),
                "num_waiting": self.core.scheduler.num_waiting,
                "num_finished": self.core.counters.num_finished,
                "num_failed": self.core.counters.num_failed,
                "num_aborted": self.core.counters.num_aborted,
                "num_preemptions": self.core.scheduler.num_preemptions,
                "num_fallbacks": self.core.counters.num_fallbacks,
                "num_draft_checks": self.core.speculator.num_checks,
                "num_draft_tokens": self.core.speculator.num_draft_tokens,
                "num_accepted_tokens": self.core.speculator.num_accepted_tokens,
                "prefix_query_tokens": self.core.scheduler.prefix_query_tokens,
                "prefix_hit_tokens": self.core.scheduler.prefix_hit_tokens,
                "num_blocks": pool.num_blocks,
                "peak_blocks": pool.peak_referenced,
                "free_blocks": pool.num_free + pool.num_cached_unreferenced,
                "cached_blocks": pool.num_cached_unreferenced,
                "pool_bytes": cache.num_bytes if cache is not None else 0,
                "token_occupancy": self.core.counters.token_occupancy,
            }

    @property
    def mode(self) -> str:
        """How the model runs: "direct" and "gather" with all sequences packed in one row, "by row" in a row each.

        "gather": the model changes K or V after the cache, so the past is handed out to it in every step. "by row": it
        has recurrent states, which are kept beside the block pool, and prefixes are not cached.
        """
        return self.core.runner.mode

    # -- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Aborts what runs and gives the pool's memory back. Closing twice does nothing."""
        with self.lock:
            if self._is_closed:
                return
            for request in list(self.core.requests.values()):
                self.core.end(request, "abort")
            self._publish()
            self._is_closed = True
            self.core.runner.cache = None

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
