"""A step of the scheduler with 1,000 running sequences, and 10,000 that wait."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.host import add_waiting, finish_step, make_sequence, running
from hf_paged.scheduler.output import SchedulerOutput

NUM_SEQUENCES = 1_000
NUM_WAITING = 10_000
MAX_ROUNDS = 50


def test_a_decode_step(benchmark: BenchmarkFixture) -> None:
    scheduler = running(NUM_SEQUENCES, num_tokens=64, num_blocks=10_000)

    def step() -> SchedulerOutput:
        output = scheduler.schedule()
        finish_step(scheduler, output)
        return output

    # pedantic: every step adds tokens, and the pool holds only so many
    output = benchmark.pedantic(step, rounds=MAX_ROUNDS)
    assert output.num_tokens == len(output.scheduled) == NUM_SEQUENCES
    assert scheduler.num_preemptions == 0
    scheduler.allocator.check(scheduler.running)


def test_a_step_in_which_a_sequence_leaves_and_another_comes(benchmark: BenchmarkFixture) -> None:
    scheduler = running(NUM_SEQUENCES, num_tokens=64, num_blocks=10_000)
    newcomers = iter(range(NUM_SEQUENCES, NUM_SEQUENCES + MAX_ROUNDS))

    def step() -> SchedulerOutput:
        scheduler.finish(scheduler.running[NUM_SEQUENCES // 2])
        scheduler.add(make_sequence(next(newcomers), 64))
        output = scheduler.schedule()
        finish_step(scheduler, output)
        return output

    output = benchmark.pedantic(step, rounds=MAX_ROUNDS)
    assert output.num_tokens == NUM_SEQUENCES - 1 + 64
    assert len(scheduler.running) == NUM_SEQUENCES


def test_a_step_whose_queue_is_ten_thousand_long_and_whose_pool_is_full(benchmark: BenchmarkFixture) -> None:
    scheduler = running(NUM_SEQUENCES, num_tokens=62, num_blocks=4 * NUM_SEQUENCES)
    add_waiting(scheduler, NUM_WAITING, num_tokens=62)

    output = benchmark(scheduler.schedule)  # nothing is finished in between, so it is the same step every time
    assert len(output.scheduled) == NUM_SEQUENCES
    assert scheduler.num_waiting == NUM_WAITING


def test_a_step_in_which_one_of_ten_thousand_that_wait_comes_to_run(benchmark: BenchmarkFixture) -> None:
    scheduler = running(NUM_SEQUENCES, num_tokens=62, num_blocks=8 * NUM_SEQUENCES)
    scheduler.max_sequences = NUM_SEQUENCES
    add_waiting(scheduler, NUM_WAITING, num_tokens=62)
    oldest = iter(list(scheduler.running))

    def step() -> SchedulerOutput:
        scheduler.finish(next(oldest))
        output = scheduler.schedule()
        finish_step(scheduler, output)
        return output

    output = benchmark.pedantic(step, rounds=MAX_ROUNDS)
    assert len(output.scheduled) == len(scheduler.running) == NUM_SEQUENCES
    assert scheduler.num_preemptions == 0
    assert scheduler.num_waiting < NUM_WAITING


def test_queueing_and_dropping_behind_ten_thousand_that_wait(benchmark: BenchmarkFixture) -> None:
    scheduler = running(10, num_tokens=62, num_blocks=100)
    add_waiting(scheduler, NUM_WAITING, num_tokens=62)
    newcomer = make_sequence(2 * NUM_WAITING, 62)

    def add_and_drop() -> None:
        scheduler.add(newcomer)
        scheduler.finish(newcomer)

    benchmark(add_and_drop)
    assert scheduler.num_waiting == NUM_WAITING
