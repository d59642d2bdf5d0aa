"""Models whose rotary frequencies depend on the length of what is computed: "longrope", and "dynamic".

A longrope model has two sets of frequencies. Stock takes the long one for a whole forward whose largest position has
passed the length that the model was first trained on. A packed step has sequences on both sides, so each token gets the
set that it would get if its sequence ran alone:

    limit 8                      positions           0 1 2 3 4 5 6 7 8 9
    prompt of 5, 5 new tokens    KEEPS               s s s s s s s s L L     what is cached stays as it was rotated
    prompt of 5, 5 new tokens    RESTARTS            L L L L L L L L L L     phi3: computed anew from the 9th token on
    prompt of 9, 1 new token     both                L L L L L L L L L L     one forward, however it is cut into chunks

It depends on nothing but the sequence and the position, so chunks, preemptions and batches change nothing. Prefixes are
shared by sequences of one kind only.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_paged.compat import CACHE_KEYWORD
from hf_paged.engine.probe import frequency_limit
from hf_paged.linears.stand_in import StandIn
from hf_paged.request import Sequence
from hf_paged.scheduler.output import ScheduledSequence
from hf_paged.scheduler.scheduler import Scheduler


class Crossing(enum.Enum):
    """What stock's `generate` does with the cache when a sequence passes the limit."""

    KEEPS = "keeps"  # it stays as it is
    RESTARTS = "restarts"  # all tokens are computed again
    FORGETS = "forgets"  # it is dropped, and the tokens too
    UNKNOWN = "unknown"  # frequencies are not two sets, or are chosen in another way


@dataclass(frozen=True)
class RotaryRegimes:
    """When a sequence's tokens get which frequencies. `limit` is None for models that have but one set."""

    limit: int | None = None
    crossing: Crossing = Crossing.KEEPS

    def why_stock(self, num_prompt_tokens: int, max_tokens: int) -> str | None:
        """Why sequences of up to `max_tokens` tokens, the shortest prompt given, can't run packed; None if they can."""
        if self.limit is None or max_tokens <= self.limit:
            return None
        if self.crossing is Crossing.UNKNOWN:
            return f"rotary frequencies that change past position {self.limit} need stock's loop"
        if self.crossing is Crossing.FORGETS and num_prompt_tokens <= self.limit:
            where = f"at position {self.limit}, where the model drops its cache"
            return f"rotary frequencies that change {where}, need stock's loop"
        return None

    def passes(self, max_tokens: int) -> bool:
        """Whether sequences of `max_tokens` tokens get other frequencies than short ones."""
        return self.limit is not None and max_tokens > self.limit

    def prefix_key(self, sequence: Sequence) -> bool:
        """Sequences with equal keys and equal tokens have equal K: whether the first tokens get long frequencies."""
        if self.limit is None:
            return False
        restarts = self.crossing is Crossing.RESTARTS
        return (len(sequence.token_ids) if restarts else sequence.request.num_prompt_tokens) > self.limit

    def mark(self, scheduled: SequenceOf[ScheduledSequence]) -> None:
        """Notes which frequencies the sequences of a step are computed with."""
        if self.limit is not None:
            for item in scheduled:
                item.sequence.has_long_frequencies = self.prefix_key(item.sequence)

    def rewritten_buffers(self, model: nn.Module) -> frozenset[int]:
        """The ids of the model's buffers that hold the frequencies of the last forward, whichever those were."""
        if self.limit is None:
            return frozenset()
        return frozenset(
            id(buffer)
            for module in rotary_modules(model)
            for name, buffer in module.named_buffers(recurse=False)
            if name.endswith("inv_freq")  # on some versions one tensor under two names
        )

    def settle(self, scheduler: Scheduler) -> None:
        """Before a step: sequences that have passed a limit where they restart lose their blocks."""
        if self.limit is None or self.crossing is not Crossing.RESTARTS:
            return
        for sequence in list(scheduler.running):
            if sequence.request.num_prompt_tokens > self.limit or sequence.has_long_frequencies:
                continue
            if sequence.num_tokens > self.limit:
                if sequence.num_computed_tokens:
                    scheduler.recompute(sequence)
            elif sequence.draft_token_ids:  # a guess must not be checked with other frequencies than it will get
                room = self.limit - sequence.num_tokens
                sequence.draft_token_ids = sequence.draft_token_ids[:room]
                sequence.draft_probs = None if sequence.draft_probs is None else sequence.draft_probs[:room]

    def long_tokens(self, scheduled: SequenceOf[ScheduledSequence], device: torch.device) -> torch.Tensor | None:
        """Which tokens of a packed step get long frequencies: `[T]` bool. None if stock's choice is right for all."""
        if self.limit is None or self.crossing is Crossing.UNKNOWN:
            return None
        parts, last = [], 0
        for item in scheduled:
            sequence, start = item.sequence, item.sequence.num_computed_tokens
            positions = np.arange(start, start + item.num_new_tokens)
            is_long = self.prefix_key(sequence)
            parts.append(np.full(len(positions), True) if is_long else positions >= self.limit)
            last = max(last, int(positions[-1]))
        mask = np.concatenate(parts)
        if not mask.any() or (mask.all() and last >= self.limit):
            return None
        return torch.from_numpy(mask).to(device, non_blocking=True)


def find_regimes(model: PreTrainedModel) -> RotaryRegimes:
    """The regimes of a model, from its config, its rotary modules, and what it prepares past the limit."""
    limit = frequency_limit(model.config)
    if limit is None:
        return RotaryRegimes()
    modules = rotary_modules(model)
    config = model.config.get_text_config(decoder=True)
    is_known = bool(modules) and all(_limits(module) == {limit} for module in modules)
    if not is_known or getattr(config, "original_max_position_embeddings", None) not in (None, limit):
        return RotaryRegimes(limit, Crossing.UNKNOWN)
    return RotaryRegimes(limit, _crossing(model, limit))


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that choose between short and long frequencies as Transformers' own decorator does."""
    return [
        module
        for module in model.modules()
        if "longrope" in _rope_types(module).values() and hasattr(type(module).forward, "__wrapped__")
    ]


def _rope_types(module: nn.Module) -> dict[str | None, str]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return kind
    return {None: kind} if isinstance(kind, str) else {}


def _limits(module: nn.Module) -> set[Any]:
    # a layer type with frequencies of a third kind is no limit that is known
    parameters: Any = getattr(module, "config", None)
    parameters = getattr(parameters, "rope_parameters", None) or {}
    limits = set()
    for layer_type, kind in _rope_types(module).items():
        if kind == "longrope":
            own = parameters if layer_type is None else parameters.get(layer_type, {})
            limits.add(own.get("original_max_position_embeddings"))
        elif "dynamic" in kind:
            limits.add(None)
    return limits


class _CacheOf(DynamicCache):
    """Says that it holds so many tokens."""

    def __init__(self, config: Any, num_tokens: int) -> None:
        super().__init__(config=config)
        self.num_tokens = num_tokens

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self.num_tokens


def _crossing(model: PreTrainedModel, limit: int) -> Crossing:
    """What the model prepares for the first token past the limit."""
    cache = _CacheOf(model.config, limit)
    ids = torch.zeros((1, limit + 1), dtype=torch.int64)
    keywords: dict[str, Any] = {CACHE_KEYWORD: cache, "attention_mask": torch.ones_like(ids), "use_cache": True}
    try:
        prepared = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **keywords)
        num_ids = prepared["input_ids"].shape[1]
    except Exception:
        return Crossing.FORGETS
    if prepared.get(CACHE_KEYWORD) is cache:
        return Crossing.KEEPS if num_ids == 1 else Crossing.FORGETS
    return Crossing.RESTARTS if num_ids == limit + 1 else Crossing.FORGETS


class _Local(threading.local):
    long_tokens: torch.Tensor | None = None


_local = _Local()


class _StandIn(StandIn[nn.Module]):
    """In the place of a rotary module's `forward`: each token of a packed forward gets its own frequencies."""

    def __init__(self, module: nn.Module, limit: int) -> None:
        super().__init__(module)
        self.limit = limit
        own = vars(module).get("forward")  # of accelerate's hooks, for one
        self.forward: Callable[..., Any] = own or functools.partial(type(module).forward, module)

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = _local.long_tokens
        if mask is None:
            return self.forward(x, position_ids, *args, **kwargs)
        # stock chooses for all positions that it is handed: so one call that stays below the limit, and one beyond it
        is_long = mask.to(position_ids.device).view(-1, position_ids.shape[-1])
        beyond = torch.full_like(position_ids[..., :1], self.limit)
        short = self.forward(x, position_ids.clamp_max(self.limit - 1), *args, **kwargs)
        long = self.forward(x, torch.cat([position_ids, beyond], dim=-1), *args, **kwargs)
        if isinstance(short, torch.Tensor):
            return _chosen(is_long, long, short)
        return tuple(_chosen(is_long, theirs, ours) for theirs, ours in zip(long, short, strict=True))


def _chosen(is_long: torch.Tensor, long: torch.Tensor, short: torch.Tensor) -> torch.Tensor:
    # is_long [B, n]; short [..., n, D], long [..., n + 1, D]
    return torch.where(is_long[..., None].to(short.device), long[..., :-1, :], short)


@contextmanager
def own_frequencies(model: nn.Module, limit: int | None, long_tokens: torch.Tensor | None) -> Iterator[None]:
    """Inside, the model's rotary modules give this thread's tokens the frequencies of `long_tokens`; None: stock's."""
    if long_tokens is None or limit is None:
        yield
        return
    placed: list[tuple[dict[str, Any], Any, Any]] = []
    try:
        for module in rotary_modules(model):
            namespace, stand_in = vars(module), _StandIn(module, limit)
            placed.append((namespace, namespace.get("forward"), stand_in))
            namespace["forward"] = stand_in
        _local.long_tokens = long_tokens
        yield
    finally:
        _local.long_tokens = None
        for namespace, previous, stand_in in placed:
            if namespace.get("forward") is stand_in:
                if previous is None:
                    del namespace["forward"]
                else:
                    namespace["forward"] = previous
