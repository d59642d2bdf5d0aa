"""EngineCore: one step, and the lives of the requests in it. No locks, no keywords, no waiting.

add ─▶ Scheduler ─▶ ModelRunner ─▶ choose ─▶ append, stop, fork, free ─▶ changed
           ▲                                        │
           └────────────────────────────────────────┘   one step()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.config import PagedConfig
from hf_paged.engine.batch import LogitsRows
from hf_paged.engine.given_cache import load_given
from hf_paged.engine.model_runner import ModelRunner
from hf_paged.engine.probe import position_limit
from hf_paged.engine.rotary_regimes import RotaryRegimes
from hf_paged.engine.sampler import Choice, SamplerRow, choose, token_logprobs
from hf_paged.engine.selfcheck import check_packed_step
from hf_paged.engine.sizing import blocks_in_memory
from hf_paged.engine.speculative import Checked, Speculator, checked, rows_of_check
from hf_paged.engine.stats import EngineCounters
from hf_paged.engine.stopping import finish_of
from hf_paged.engine.weights import Fingerprint, active_adapters, weights_fingerprint
from hf_paged.errors import CapacityError
from hf_paged.request import Request, Sequence
from hf_paged.scheduler.output import SchedulerOutput
from hf_paged.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from hf_paged.engine.assistant import AssistantDrafter


class EngineCore:
    """The model, the pool, the scheduler, and every unfinished request. Whoever calls it holds the engine's lock.

    Args:
        get_model: returns the model; not held, so that an engine kept beside a model doesn't keep it.
        config: the engine's settings.

    Raises:
        UnsupportedModelError: the model can't run packed.
    """

    def __init__(self, get_model: Callable[[], PreTrainedModel], config: PagedConfig) -> None:
        self.config = config
        self.get_model = get_model
        self.runner = ModelRunner(get_model, config)
        model = get_model()
        with self.runner.lock:
            check_packed_step(self.runner, model, config)
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.position_limit = position_limit(model)
        self.regimes: RotaryRegimes = self.runner.regimes
        text_config = model.config.get_text_config(decoder=True)
        self.max_context: int | None = self.position_limit or getattr(text_config, "max_position_embeddings", None)
        self.allocator = BlockAllocator(
            self.runner.layout.groups,
            config.block_size,
            config.num_blocks or 0,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_requests_per_batch,
            enable_prefix_caching=config.enable_prefix_caching and not self.runner.layout.states,  # states have no past
            prefix_cache_fraction=config.prefix_cache_fraction,
        )
        self.allocator.prefix_key = self.regimes.prefix_key
        self.scheduler = Scheduler(self.allocator, config.max_batch_tokens, config.max_requests_per_batch)
        self.speculator = Speculator(self._make_drafter, self.position_limit)
        self.counters = EngineCounters()
        self.requests: dict[str, Request] = {}  # unfinished ones
        self.changed: dict[str, Request] = {}  # since they were last looked at
        self._weights: Fingerprint | None = None
        self._is_stepping = False
        self._to_abort: list[Request] = []

    @property
    def can_take_back(self) -> bool:
        """Whether computed tokens can be forgotten again: keys and values can, recurrent states have no past."""
        return not self.runner.layout.states

    def add(self, request: Request) -> None:
        """Queues a request whose id is free."""
        self.requests[request.request_id] = request
        self.speculator.add(request)
        self.scheduler.add(request.sequences[0])

    def notice_weights(self) -> None:
        """Once a call: starts a new tree of prefixes if the weights are not those of the last call.

        Sequences that run go on in the tree that they began in.
        """
        self.runner.look_at_linears()
        if not self.config.enable_prefix_caching:
            return
        weights = weights_fingerprint(self.get_model(), self.regimes.rewritten_buffers(self.get_model()))
        if weights is None or weights != self._weights:
            self.allocator.weights_version = self.allocator.weights_version + 1
            if not self.requests:
                self.allocator.reset_prefix_cache()  # nobody will ask for them again
        self._weights = weights

    def _notice_adapters(self) -> None:
        # an adapter that was switched while requests ran, and is switched back, left its blocks in the wrong tree
        if self._weights is not None and self._weights[-1] != active_adapters(self.get_model()):
            self._weights = None

    def abort(self, request: Request) -> None:
        """Ends a request that has not ended, or marks it to end with the step that runs.

        A step may be interrupted by a caller that leaves: a processor that aborts its own request, or a stream that is
        collected. Nothing may leave the scheduler's lists while it walks them.
        """
        if self._is_stepping:
            self._to_abort.append(request)
        elif self.requests.get(request.request_id) is request:
            self.counters.num_aborted += 1
            self.end(request, "abort")

    def end(self, request: Request, finish_reason: str, error: BaseException | None = None) -> None:
        """Ends every sequence of a request that hasn't ended; an error is its reason."""
        request.error = error
        for sequence in request.sequences:
            if not sequence.is_finished:
                self.finish(sequence, finish_reason, None)

    def finish(self, sequence: Sequence, finish_reason: str, stop_reason: int | str | None) -> None:
        """Ends a sequence and takes its blocks; the request with it, if it was the last."""
        sequence.finish_reason, sequence.stop_reason = finish_reason, stop_reason
        self.scheduler.finish(sequence)
        self.speculator.forget(sequence)
        request = sequence.request
        self.changed[request.request_id] = request
        if request.is_finished:
            request.finished_time = time.monotonic()
            self.requests.pop(request.request_id, None)
            if not self.requests:
                self._notice_adapters()

    def step(self) -> bool:
        """Runs one step. Returns False if there was nothing to run."""
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False
            while self._to_abort:
                self.abort(self._to_abort.pop())

    def _step(self) -> bool:
        self.speculator.propose(self.scheduler.running)
        self.regimes.settle(self.scheduler)
        try:
            output = self.scheduler.schedule()
        except BaseException:  # block copies that were planned already are lost with it
            self._restart({id(sequence) for sequence in self.scheduler.running})
            raise
        if not output.scheduled:
            return self._refuse_stuck()
        try:
            self.regimes.mark(output.scheduled)
            self.runner.copy_blocks(output.copies)
            load_given(self.runner, output.scheduled)
            for part, logits, rows in self._run(output):
                self._take(part, logits, rows)
        except BaseException:
            self._restart({id(item.sequence) for item in output.scheduled})
            raise
        self.counters.count_step(output.num_tokens, self.scheduler.running, self.allocator)
        return True

    def _refuse_stuck(self) -> bool:
        # A row of generate may ask for more than fits, since most end long before. One that did grow so large ends.
        sequence = self.scheduler.stuck_sequence()
        if sequence is None:
            return False
        self._fail(
            sequence.request,
            CapacityError(
                f"A sequence of {sequence.num_tokens} tokens is more than the pool of "
                f"{self.allocator.max_tokens_per_sequence} can ever hold; lower max_new_tokens, or raise num_blocks or "
                "memory_fraction of the cache_config."
            ),
        )
        return True

    def _restart(self, scheduled: set[int]) -> None:
        # An interrupted step may have left blocks unwritten, and sequences computed but without their next token,
        # siblings born in it included: all of them compute again.
        for sequence in list(self.scheduler.running):
            lacks_token = sequence.num_uncomputed_tokens == 0 and sequence.next_logits is None
            if id(sequence) in scheduled or lacks_token:
                self.scheduler.preempt(sequence)
                if lacks_token:  # idle now, and nobody outside will wake it
                    self.scheduler.add(sequence)

    def _run(self, output: SchedulerOutput) -> Iterator[tuple[SchedulerOutput, torch.Tensor, tuple[LogitsRows, ...]]]:
        """Runs a step whole. If its forward raises, each sequence runs alone, and only those that raise again end."""
        try:
            logits, rows = self.runner.run(output)
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
            item.sequence.num_computed_tokens += item.num_new_tokens - item.num_draft_tokens
            self.allocator.commit(item.sequence)
        sampler_rows: list[SamplerRow] = []
        for span in rows:
            self._take_prompt_logprobs(span.sequence, logits[span.start : span.stop], span.first_position)
            if span.is_last_chunk:
                sampler_rows += self._rows_of(span, logits)
        if sampler_rows:
            for result in checked(sampler_rows, choose(sampler_rows, logits)):
                self._append_all(result)

    def _rows_of(self, span: LogitsRows, logits: torch.Tensor) -> list[SamplerRow]:
        # the sequences that take their next token from this row: itself, and siblings born when its prompt is computed
        if span.num_draft_tokens:
            return rows_of_check(span)
        sequence, row = span.sequence, span.stop - 1
        request = sequence.request
        sequences = [sequence]
        if len(request.sequences) < request.num_sequences:
            for index in range(1, request.num_sequences):
                child = Sequence(request, index, list(request.prompt_token_ids))
                request.sequences.append(child)
                self.scheduler.fork(sequence, child)
                sequences.append(child)
        if request.sampling.is_external:
            for each in sequences:
                each.next_logits = logits[row]
            return []
        return [SamplerRow(each, row) for each in sequences]

    def _append_all(self, result: Checked) -> None:
        sequence, last = result.sequence, len(result.choices) - 1
        sequence.draft_token_ids, sequence.draft_probs = [], None
        self.speculator.learn(result)
        for index, choice in enumerate(result.choices):
            self._append(sequence, choice, is_computed=index < last)
        if result.num_drafts and not sequence.is_finished:
            self.allocator.trim(sequence)

    def _append(self, sequence: Sequence, choice: Choice, *, is_computed: bool = False) -> None:
        # a draft that stood is computed already
        request = sequence.request
        if sequence.is_finished or request in self._to_abort:  # by a sibling's error, or from inside the step
            return
        if choice.error is not None:
            self._fail(request, choice.error)
            return
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        sequence.token_ids.append(choice.token_id)
        sequence.num_computed_tokens += is_computed
        if choice.logprobs is not None:
            sequence.logprobs.append(choice.logprobs)
        self.changed[request.request_id] = request
        try:
            finish = finish_of(sequence)
        except Exception as error:
            self._fail(request, error)
            return
        if finish is not None:
            self.allocator.commit(sequence)  # with the drafts that stood in this step
            self.finish(sequence, *finish)
            self.counters.num_finished += request.is_finished

    def _take_prompt_logprobs(self, sequence: Sequence, logits: torch.Tensor, first_position: int) -> None:
        request = sequence.request
        if not request.wants_prompt_logprobs or sequence.index:
            return
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)  # nothing stands before the first token
        # a chunk that is computed again after a preemption may begin among those that are known
        position = len(request.prompt_logprobs)
        logits = logits[position - first_position - 1 :]
        targets = request.prompt_token_ids[position : position + len(logits)]
        if targets:
            counts = [request.sampling.num_prompt_logprobs or 0] * len(targets)
            request.prompt_logprobs += token_logprobs(logits[: len(targets)], list(targets), counts)

    def _make_drafter(self, model: PreTrainedModel) -> AssistantDrafter:
        from hf_paged.engine.assistant import AssistantDrafter  # which has an EngineCore of its own

        return AssistantDrafter(model, self.config, self.runner.device)

    def _fail(self, request: Request, error: Exception) -> None:
        self.counters.num_failed += 1
        self.end(request, "error", error)

    # -- the pool -----------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Blocks that the pool could have: those of the config, or those that it has and what memory allows."""
        if self.config.num_blocks is not None:
            return self.config.num_blocks
        held_bytes = self.runner.cache.num_bytes if self.runner.cache is not None else 0
        return blocks_in_memory(self.runner, self.allocator, self.config, held_bytes)

    def reserve(self, num_blocks: int) -> int:
        """Makes the pool hold `num_blocks` blocks, or what the config says, or as many as memory allows; never fewer.

        Sequences that run keep their blocks. Returns the blocks there are now.

        Raises:
            PoolMemoryError: not one block fits.
        """
        held = self.allocator.num_blocks if self.runner.cache is not None else 0
        if self.config.num_blocks is not None:
            num_blocks = self.config.num_blocks
        elif num_blocks > held:
            num_blocks = min(max(num_blocks, held + held // 4), self.room())  # some more, so that it seldom grows again
        if num_blocks > held:
            self.runner.allocate_pool(self.allocator, num_blocks)
            self.allocator.grow(num_blocks)
        return self.allocator.num_blocks

    def check(self) -> None:
        """Proves the pool's invariants against every unfinished sequence.

        Raises:
            PagedError: naming the first thing that is wrong.
        """
        self.allocator.check(sequence for request in self.requests.values() for sequence in request.sequences)
