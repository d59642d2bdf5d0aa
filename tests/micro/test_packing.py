"""Packing a step, and planning its attention."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.host import BLOCK_SIZE, make_sequence, running
from hf_paged.engine.batch import PackedBatch, pack
from hf_paged.kernels.torch_plan import Plan, plan_of
from hf_paged.scheduler.output import SchedulerOutput

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decodes() -> SchedulerOutput:
    """256 sequences of 512 tokens, a token each."""
    return running(256, num_tokens=512, num_blocks=10_000).schedule()


@pytest.fixture(scope="module")
def chunks() -> SchedulerOutput:
    """Eight prompts of 512 tokens, all at once."""
    scheduler = running(8, num_tokens=512, num_blocks=10_000)
    for sequence in list(scheduler.running):
        scheduler.finish(sequence)
    for index in range(8, 16):
        scheduler.add(make_sequence(index, 512))
    return scheduler.schedule()


def _pack(output: SchedulerOutput) -> PackedBatch:
    return pack(output, BLOCK_SIZE, 1, CPU)


def _plan(output: SchedulerOutput) -> Plan:
    (metadata,) = _pack(output).metadata
    return plan_of(metadata, None, None)


def test_packing_256_decodes(benchmark: BenchmarkFixture, decodes: SchedulerOutput) -> None:
    batch = benchmark(_pack, decodes)
    assert batch.input_ids.shape == (1, 256)
    assert batch.metadata[0].kv_lens == (513,) * 256


def test_packing_4096_tokens_of_prompts(benchmark: BenchmarkFixture, chunks: SchedulerOutput) -> None:
    batch = benchmark(_pack, chunks)
    assert batch.input_ids.shape == (1, 8 * 512)
    assert len(set(batch.metadata[0].slot_mapping.tolist())) == 8 * 512


def test_packing_and_planning_256_decodes(benchmark: BenchmarkFixture, decodes: SchedulerOutput) -> None:
    assert [group.num_segments for group in benchmark(_plan, decodes).groups] == [256]
