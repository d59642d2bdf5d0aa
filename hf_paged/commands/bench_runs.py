"""The engine's run of a user's prompts, with any settings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_paged import PagedConfig, PagedEngine
from hf_paged.commands.demo_runs import Run
from hf_paged.commands.prompt_file import Prompt
from hf_paged.errors import GenerationFailedError, PoolMemoryError, RequestError


@dataclass(frozen=True)
class Workload:
    """Prompts of a file, their token ids, and the most tokens of each answer."""

    source: Path
    prompts: Sequence[Prompt]
    ids: Sequence[list[int]]
    limits: Sequence[int]

    def first(self, count: int, most_tokens: int) -> Workload:
        """The first prompts, with answers of so many tokens at most."""
        limits = [min(most_tokens, limit) for limit in self.limits[:count]]
        return Workload(self.source, self.prompts[:count], self.ids[:count], limits)

    def pool_tokens(self, num_running: int) -> int:
        """Tokens of the longest `num_running` prompts and answers, or half as many: they come and go."""
        lengths = [len(ids) + limit for ids, limit in zip(self.ids, self.limits, strict=True)]
        longest = sorted(lengths)[-num_running:]
        return max(longest[-1], sum(longest) // 2)


def run_engine(model: Any, workload: Workload, config: PagedConfig) -> Run:
    """All prompts at once through an engine of these settings. Setting it up isn't in the time, but in the details.

    Raises:
        RequestError: a prompt can't run; its line is named.
        UnsupportedModelError: the model can't run packed.
        GenerationFailedError: a request ended with an error.
    """
    rows: dict[str, list[int]] = {}
    start = time.perf_counter()
    with _make_engine(model, workload, config) as engine:
        setup_seconds, start = time.perf_counter() - start, time.perf_counter()
        order = [_add(engine, workload, index) for index in range(len(workload.ids))]
        while engine.has_unfinished_requests:
            for output in engine.step():
                if output.error is not None:
                    raise GenerationFailedError(f"A request ended with an error: {output.error}") from output.error
                if output.finished:
                    rows[output.request_id] = list(output.token_ids)
        seconds = time.perf_counter() - start
        stats = engine.stats()
    names = ("num_steps", "num_blocks", "peak_blocks", "num_preemptions", "prefix_query_tokens", "prefix_hit_tokens")
    return Run(
        rows=[rows[request_id] for request_id in order],
        seconds=seconds,
        kv_bytes=stats["pool_bytes"],
        occupancy=stats["token_occupancy"],
        details={
            "block_size": config.block_size,
            "max_batch_tokens": config.max_batch_tokens,
            "setup_seconds": setup_seconds,
            **{name: stats[name] for name in names},
        },
    )


def _make_engine(model: Any, workload: Workload, config: PagedConfig) -> PagedEngine:
    num_blocks = -(-workload.pool_tokens(config.max_requests_per_batch) // config.block_size) + 1
    try:
        return PagedEngine(model, config.with_options(num_blocks=num_blocks))
    except PoolMemoryError:
        return PagedEngine(model, config)  # a pool of what memory there is; requests wait for room


def _add(engine: PagedEngine, workload: Workload, index: int) -> str:
    try:
        return engine.add_request(workload.ids[index], max_new_tokens=workload.limits[index], do_sample=False)
    except RequestError as error:
        raise RequestError(f"{workload.source}, line {workload.prompts[index].line}: {error}") from error
