"""The lock that threads take turns in."""

from __future__ import annotations

import threading
import time

import pytest

from hf_paged.engine.fair_lock import FairLock


def _wait_until_waiting(lock: FairLock, count: int) -> None:
    """Until `count` threads stand in line behind the holder."""
    deadline = time.monotonic() + 10
    while lock._next_ticket - lock._serving - 1 < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _start_in_line(lock: FairLock, names: str, order: list[str]) -> list[threading.Thread]:
    """Threads that stand in line in the order of their names; the caller holds the lock."""

    def take(name: str) -> None:
        with lock:
            order.append(name)

    threads = []
    first = lock._next_ticket - lock._serving  # places in line that are taken, the holder's included
    for position, name in enumerate(names, start=first):
        thread = threading.Thread(target=take, args=(name,), daemon=True)
        thread.start()
        threads.append(thread)
        _wait_until_waiting(lock, position)
    return threads


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_waiters_are_served_in_the_order_they_came() -> None:
    lock, order = FairLock(), []
    with lock:
        threads = _start_in_line(lock, "abcdef", order)
    _join(threads)
    assert order == list("abcdef")


def test_who_released_it_stands_in_line_again_behind_those_that_wait() -> None:
    lock, order = FairLock(), []
    with lock:
        threads = _start_in_line(lock, "ab", order)
    with lock:
        order.append("again")
    _join(threads)
    assert order == ["a", "b", "again"]


def test_the_holder_may_take_it_again_and_keeps_it_until_the_last_release() -> None:
    lock, order = FairLock(), []
    with lock:
        with lock, lock:
            threads = _start_in_line(lock, "a", order)
        time.sleep(0.02)
        assert order == []
    _join(threads)
    assert order == ["a"]


def test_an_exception_inside_releases_it() -> None:
    lock = FairLock()
    with pytest.raises(ValueError, match="inside"), lock:
        raise ValueError("inside")
    order: list[str] = []
    with lock:
        threads = _start_in_line(lock, "a", order)
    _join(threads)
    assert order == ["a"]


def test_only_one_thread_is_inside() -> None:
    lock, inside, most = FairLock(), [0], [0]

    def work() -> None:
        for _ in range(50):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    _join(threads)
    assert (inside[0], most[0]) == (0, 1)


def test_two_threads_alternate() -> None:
    """A thread that takes the lock in a loop doesn't keep the other one out."""
    lock, order, start = FairLock(), [], threading.Barrier(2)

    def work(name: str) -> None:
        start.wait()
        for _ in range(30):
            with lock:
                order.append(name)
                time.sleep(0.001)  # long enough for the other one to stand in line

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in "ab"]
    for thread in threads:
        thread.start()
    _join(threads)
    longest = max(len(run) for run in "".join(order).replace("ab", "a b").replace("ba", "b a").split())
    assert longest <= 5, order


def test_a_waiter_that_is_interrupted_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, order = FairLock(), []
    real_wait = lock._condition.wait

    def interrupted_wait(timeout: float | None = None) -> bool:
        if threading.current_thread().name == "interrupted":
            real_wait(0.05)
            raise KeyboardInterrupt
        return real_wait(timeout)

    monkeypatch.setattr(lock._condition, "wait", interrupted_wait)
    caught: list[BaseException] = []

    def take() -> None:
        try:
            with lock:
                order.append("interrupted")
        except KeyboardInterrupt as error:
            caught.append(error)

    with lock:
        before = _start_in_line(lock, "a", order)
        victim = threading.Thread(target=take, name="interrupted", daemon=True)
        victim.start()
        _wait_until_waiting(lock, 2)
        victim.join(10)  # it has left, and its turn hasn't come yet
        after = _start_in_line(lock, "bc", order)
    _join([*before, *after])
    assert [type(error) for error in caught] == [KeyboardInterrupt]
    assert order == ["a", "b", "c"]
    with lock:
        pass
