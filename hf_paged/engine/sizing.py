"""How many blocks a pool gets.

Two sizes of pool. The one behind `generate` follows the workload: a training loop that evaluates now and then keeps
its memory. Only an explicit engine takes what is left, and never more than its sequences could use.
"""

from __future__ import annotations

import torch

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.config import PagedConfig
from hf_paged.engine.model_runner import ModelRunner
from hf_paged.errors import PoolMemoryError

# Contexts longer than this are bounded by memory alone when a model names no longest one.
_DEFAULT_CONTEXT = 8192


def free_memory(device: torch.device) -> int:
    """Bytes that a new allocation on the device could get now, a container's limit respected."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    import psutil

    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit_file) as limit, open(used_file) as used:
                available = min(available, int(limit.read()) - int(used.read()))
        except (OSError, ValueError):  # no cgroup of this version, or no limit ("max")
            continue
    return max(0, available)


def blocks_in_memory(runner: ModelRunner, allocator: BlockAllocator, config: PagedConfig, held_bytes: int = 0) -> int:
    """Blocks of full context that `memory_fraction` of the free memory, and what the pool holds already, has room for.

    Raises:
        PoolMemoryError: not even one block fits.
    """
    budget = int((free_memory(runner.device) + held_bytes) * config.memory_fraction)
    num_blocks = _most_blocks(runner, allocator, budget)
    if num_blocks < 1:
        raise PoolMemoryError(
            f"{budget / 2**20:.0f} MiB (PagedConfig.memory_fraction={config.memory_fraction} of the free memory) holds "
            f"not one block of {config.block_size} tokens; free memory, or raise memory_fraction."
        )
    return num_blocks


def _most_blocks(runner: ModelRunner, allocator: BlockAllocator, budget: int) -> int:
    # bytes grow with the number of blocks, but not in proportion: window groups stop growing
    low, high = 0, max(1, budget // _cheapest_block_bytes(runner, allocator))
    while low < high:
        middle = (low + high + 1) // 2
        if runner.pool_bytes(allocator, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _cheapest_block_bytes(runner: ModelRunner, allocator: BlockAllocator) -> int:
    """Bytes that one more block costs at the least: those of the cheapest group."""
    groups = range(len(runner.layout.groups))
    return max(1, min(runner.group_bytes_per_block(group, allocator.block_size) for group in groups))


def engine_blocks(runner: ModelRunner, allocator: BlockAllocator, config: PagedConfig, max_context: int | None) -> int:
    """Blocks of an explicit engine: what its sequences could use, as far as memory goes after one measured step."""
    context = max_context or _DEFAULT_CONTEXT
    wanted = config.max_requests_per_batch * allocator.blocks_for(context)
    return min(wanted, blocks_in_memory(runner, allocator, config, -_step_bytes(runner, config)))


def _step_bytes(runner: ModelRunner, config: PagedConfig) -> int:
    # What a full step allocates besides the pool; measured where the allocator keeps count, which the CPU's doesn't.
    # This resets torch's peak statistics.
    if runner.device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    runner.probe(config.max_batch_tokens)
    return int(torch.cuda.max_memory_allocated(runner.device) - before)
