"""Parallel I/O is bounded, stops at the first error, and never hangs."""

from __future__ import annotations

import threading

import pytest

from ckptio import DeadlineExceededError
from ckptio.operation import Operation
from ckptio.transfer import Transfer


def make(*, concurrency=4, memory=1 << 20, spare=0, seconds=None):
    operation = Operation("testing", seconds)
    return Transfer(operation, concurrency=concurrency, memory=memory, spare=spare)


def test_every_task_runs_once_and_every_result_comes():
    results = make().run((lambda _, i=i: i) for i in range(100))
    assert sorted(results) == [*range(100)]


def test_threads_are_no_more_than_the_memory_allows():
    busy, most, lock = 0, 0, threading.Lock()

    def task(buffer):
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        buffer[0] = 1
        with lock:
            busy -= 1
        return len(buffer)

    sizes = [*make(concurrency=16, memory=3 * 4096).run([task] * 50, buffer_size=4096)]
    assert sizes == [4096] * 50
    assert most <= 3
    assert [*make(memory=1).run([task], buffer_size=1 << 20)] == [1 << 20], "one buffer always"


def test_spare_threads_get_ready_while_no_more_requests_are_made_than_wanted():
    transfer = make(concurrency=2, spare=3, seconds=60)
    all_ready = threading.Barrier(5)
    inside, most, lock = 0, 0, threading.Lock()

    def task(_):
        nonlocal inside, most
        all_ready.wait(30)
        with transfer.turn:
            with lock:
                inside += 1
                most = max(most, inside)
            with lock:
                inside -= 1
        return True

    assert [*transfer.run([task] * 100)] == [True] * 100
    assert most <= 2


def test_the_first_error_stops_everything_and_is_raised():
    started = []

    def tasks():
        for i in range(1000):
            started.append(i)
            yield lambda _, i=i: 1 // (i != 5)

    with pytest.raises(ZeroDivisionError):
        [*make(concurrency=2).run(tasks())]
    assert len(started) < 1000


def test_an_error_of_the_iterator_is_raised_too():
    def tasks():
        yield lambda _: 1
        raise OSError("drawn too far")

    with pytest.raises(OSError, match="drawn too far"):
        [*make().run(tasks())]


def test_a_stuck_task_is_reported_when_time_is_up():
    release = threading.Event()
    try:
        with pytest.raises(DeadlineExceededError, match=r"0\.2 s: testing"):
            [*make(seconds=0.2).run([lambda _: release.wait(60)])]
    finally:
        release.set()


def test_no_thread_is_left_behind():
    [*make().run((lambda _: 1) for _ in range(20))]
    run = make().run((lambda _: 1) for _ in range(20))
    next(run)
    run.close()
    with pytest.raises(ZeroDivisionError):
        [*make().run([lambda _: 1 // 0])]
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptio-")]


def test_map_keeps_one_item_in_the_calling_thread():
    assert [*make().map(lambda _: threading.current_thread(), [1])] == [threading.current_thread()]
    assert sorted(make().map(lambda x: x * x, range(5))) == [0, 1, 4, 9, 16]
    assert [*make().map(lambda x: x, [])] == []
