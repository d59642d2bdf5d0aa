"""Proves once, for every model, that a packed step gives the logits that the model gives alone.

A model may depend on something that packing hides: positions it counts itself, a bias of its own, a frequency chosen
from the longest sequence in the batch. None of this raises. So two short prompts are run both ways before the first
request, in a pool of a few blocks that is thrown away. It is never quantised: what rounding K and V costs would hide
what packing does, and packing is the same whatever the pool holds.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.config import PagedConfig
from hf_paged.engine.attention_swap import paged_attention
from hf_paged.engine.model_runner import ModelRunner
from hf_paged.engine.prompt_positions import check_prompt_positions
from hf_paged.engine.stock_windows import check_stock_windows
from hf_paged.errors import PagedError, UnsupportedModelError
from hf_paged.request import Request, Sequence
from hf_paged.scheduler.output import ScheduledSequence, SchedulerOutput

# Largest difference of logits, relative to the largest logit. Float32 runs differ by 1e-6; a neighbour's token in the
# context, or a position off by one, moves them by more than a tenth. Half types need room for rounding.
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 8e-2

_PROMPT_LENGTHS = (6, 4)  # the last token of each as if it had been generated


def check_packed_step(runner: ModelRunner, model: Any, config: PagedConfig) -> None:
    """Compares packed logits with those of each prompt alone. Hold the model's lock.

    Raises:
        UnsupportedModelError: they differ.
    """
    check_prompt_positions(model, runner.device)
    check_stock_windows(model, runner.layout)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    prompts = [[(11 * index + 7 * length) % vocab_size for index in range(length)] for length in _PROMPT_LENGTHS]
    alone = torch.stack([_solo_logits(runner, model, prompt) for prompt in _compared(runner, prompts)])
    tolerance = _HALF_TOLERANCE if _rounds(runner, model) else _TOLERANCE
    difference = _difference(runner, model, config, prompts, alone)
    if not difference <= tolerance and runner.mode == "by row":
        runner.prefills_whole = all(group.window is None for group in runner.layout.groups)
        if runner.prefills_whole:  # perhaps its scan can't start from a state
            difference = min(difference, _difference(runner, model, config, prompts, alone))
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{type(model).__name__} can't run packed. Its logits in a packed step differ from those of the prompt "
            f"alone by {difference:.1e} of the largest."
        )


def _compared(runner: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    # whose last logits are compared: each prompt, and where a token is computed in another way, one token more
    shorter = [prompt[:-1] for prompt in prompts]
    return shorter if runner.mode == "direct" else shorter + prompts


def _difference(
    runner: ModelRunner, model: Any, config: PagedConfig, prompts: list[list[int]], alone: torch.Tensor
) -> float:
    try:
        packed = _packed_logits(runner, config, prompts)
    except torch.OutOfMemoryError:
        raise
    except (PagedError, RuntimeError) as error:  # a graph compiled whole, for one, that our attention can't be part of
        reason = str(error).strip().split("\n")[0]
        raise UnsupportedModelError(f"{type(model).__name__} can't run packed: {reason}") from error
    packed, alone = packed.to(alone.device), alone.to(packed.dtype)
    scale = alone.abs().amax().clamp_min(1e-6)
    return float(((packed - alone).abs().amax() / scale).item())


def _rounds(runner: ModelRunner, model: Any) -> bool:
    # whether weights, K, V or what autocast makes of them are of a half type
    specs = [runner.stored_spec(index, quantised=False) for index in runner.layout.layers]
    types = {model.dtype, *(spec.key_dtype for spec in specs), *(spec.value_dtype for spec in specs)}
    return any(dtype.itemsize < 4 for dtype in types) or torch.is_autocast_enabled(runner.device.type)


def _packed_logits(runner: ModelRunner, config: PagedConfig, prompts: list[list[int]]) -> torch.Tensor:
    allocator = BlockAllocator(
        runner.layout.groups,
        config.block_size,
        num_blocks=sum(-(-length // config.block_size) for length in _PROMPT_LENGTHS),
        max_batch_tokens=max(_PROMPT_LENGTHS),
        max_sequences=len(prompts),
        enable_prefix_caching=False,
    )
    first, second = (Request(f"check-{index}", prompt[:-1], 2).sequences[0] for index, prompt in enumerate(prompts))
    runner.allocate_pool(allocator, allocator.num_blocks, quantised=False)
    try:
        _run(runner, allocator, [(first, 3)])  # the first prompt's second chunk shares a step with the second prompt
        logits = _run(runner, allocator, [(first, 2), (second, 3)])
        if runner.mode == "direct":  # a decode is a chunk of one token
            return logits
        for sequence, prompt in zip((first, second), prompts, strict=True):
            sequence.token_ids.append(prompt[-1])
        return torch.cat([logits, _run(runner, allocator, [(first, 1), (second, 1)])])
    finally:
        runner.cache = None


def _run(runner: ModelRunner, allocator: BlockAllocator, work: list[tuple[Sequence, int]]) -> torch.Tensor:
    for sequence, num_tokens in work:
        if not sequence.block_tables:
            allocator.admit(sequence, allocator.find_prefix(sequence))
        allocator.allocate(sequence, num_tokens)
    scheduled = tuple(ScheduledSequence(sequence, num_tokens) for sequence, num_tokens in work)
    logits, _ = runner.run(SchedulerOutput(scheduled, ((),) * len(allocator.groups), sum(item[1] for item in work)))
    for sequence, num_tokens in work:
        sequence.num_computed_tokens += num_tokens
    return logits


def _solo_logits(runner: ModelRunner, model: Any, prompt: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt], device=runner.device)
    positions = {"position_ids": torch.arange(len(prompt), device=runner.device)[None]}
    with torch.no_grad(), paged_attention((), model):
        output = model(
            input_ids=ids, use_cache=False, return_dict=True, **(positions if runner.takes_positions else {})
        )
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits
