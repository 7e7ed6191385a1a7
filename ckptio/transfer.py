"""Bounded parallel I/O: a few threads, each with one reusable buffer, and a deadline.

A task is one part to write or one range to read. Tasks are drawn from an iterator by threads that
own a page-aligned buffer each, so memory is bounded by threads times buffer size whatever the
checkpoint's size, and Python does a few calls for every few megabytes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

from ckptio.backend import Limits
from ckptio.operation import Operation
from ckptio.options import RestoreOptions, SaveOptions
from ckptio.pages import allocate

__all__ = ["Transfer"]

_WAKE = 0.5  # seconds between looks whether somebody gave the operation up
_STUCK = 5.0  # seconds that threads have to end once it was given up

T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A")

Task = Callable[[memoryview], T]


class Transfer:
    """Runs tasks in parallel.

    Parameters
    ----------
    operation : Operation
        What the tasks are part of; it ends when its time is up.
    concurrency : int
        Requests at once.
    memory : int
        Bytes of buffers at the most; one buffer is always allowed.
    spare : int
        Threads beyond `concurrency`, unless memory allows fewer.

    Attributes
    ----------
    threads : int
        At the most.
    turn : context manager
        Where there are spare threads, a task takes it for a request, and only for that.
    """

    def __init__(
        self, operation: Operation, *, concurrency: int, memory: int, spare: int = 0
    ) -> None:
        self.threads = concurrency + spare
        self.turn = threading.Semaphore(concurrency)
        self._operation = operation
        self._memory = memory

    @classmethod
    def of_data(
        cls, operation: Operation, limits: Limits, options: SaveOptions | RestoreOptions
    ) -> Self:
        """Return one that moves a checkpoint's data as a store and the user want it."""
        requests = options.concurrency or limits.concurrency
        return cls(
            operation,
            concurrency=requests,
            memory=options.memory,
            spare=min(limits.spare, requests),
        )

    def run(self, tasks: Iterable[Task[T]], buffer_size: int = 0) -> Iterator[T]:
        """Yield the tasks' results as they come; the first error stops everything.

        Parameters
        ----------
        tasks : iterable of callable
            Each is called in some thread with that thread's buffer, which it may use until it
            returns. The iterator is advanced under a lock.
        buffer_size : int
            Bytes, page-aligned.
        """
        fit = self._memory // buffer_size if buffer_size else self.threads
        results: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
        source, drawing = iter(tasks), threading.Lock()
        stop = self._operation.given_up

        def work() -> None:
            buffer = allocate(buffer_size).data if buffer_size else memoryview(b"")
            try:
                while not stop.is_set():
                    with drawing:
                        task = next(source, None)
                    if task is None:
                        break
                    results.put((task(buffer),))
            except BaseException as error:
                self._operation.give_up(error)
                results.put(error)
            else:
                results.put(None)

        threads = [
            threading.Thread(target=work, name=f"ckptio-{i}", daemon=True)
            for i in range(max(1, min(self.threads, fit)))
        ]
        for thread in threads:
            thread.start()
        running = len(threads)
        failure: BaseException | None = None
        try:
            while running:
                item = self._next(results, failure)
                if isinstance(item, tuple):
                    if failure is None:
                        yield item[0]
                else:
                    running -= 1
                    failure = failure or item
            if failure is not None:
                raise failure
            # Given up by somebody else: then not every task was run.
            self._operation.check()
        finally:
            if running:
                stop.set()  # the caller does not want the rest
            ends = time.monotonic() + _STUCK
            for thread in threads:
                left = max(0.0, ends - time.monotonic())
                remaining = self._operation.remaining()
                thread.join(left if remaining is None else min(left, remaining + 0.1))

    def _next(self, results: queue.SimpleQueue[R], failure: BaseException | None) -> R:
        """Wait for a thread's next word, as long as there is time."""
        given_up_at = None
        while True:
            remaining = self._operation.remaining()
            try:
                return results.get(timeout=_WAKE if remaining is None else min(remaining, _WAKE))
            except queue.Empty:
                # Threads may be stuck in the store's client: then they are not waited for.
                if remaining == 0:
                    raise self._operation.too_late() from failure
                if self._operation.given_up.is_set():
                    given_up_at = given_up_at or time.monotonic()
                    if time.monotonic() - given_up_at > _STUCK:
                        self._operation.check()

    def map(self, function: Callable[[A], T], items: Iterable[A]) -> Iterator[T]:
        """Yield ``function(item)`` for each item, in no order; no more threads than items."""
        pending = list(items)
        if len(pending) == 1:
            yield function(pending[0])
        elif pending:
            yield from self.run(_ignoring_buffer(function, item) for item in pending)


def _ignoring_buffer(function: Callable[[A], T], item: A) -> Task[T]:
    return lambda _: function(item)
