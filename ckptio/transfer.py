"""Bounded parallel I/O: a few threads, each with one reusable buffer; retries, deadlines.

A task is one part to write or one range to read. Tasks are drawn from an iterator by threads that
own a page-aligned buffer each, so memory is bounded by threads times buffer size whatever the
checkpoint's size, and Python does a few calls for every few megabytes.
"""

from __future__ import annotations

import logging
import mmap
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckptio.errors import DeadlineExceededError, StoreUnavailableError

__all__ = ["Deadline", "Transfer"]

T = TypeVar("T")
A = TypeVar("A")

Task = Callable[[memoryview], T]

_log = logging.getLogger("ckptio")

PATIENCE = 60.0
"""Seconds for which one request is tried again while the store is unavailable."""
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 10.0


class Deadline:
    """A moment by which the whole operation has to be done.

    Parameters
    ----------
    seconds : float or None
        From now; None is never.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        """Return the seconds that are left, None if there is no end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def error(self, doing: str) -> DeadlineExceededError:
        """Return the error that says what was being done when time was up."""
        return DeadlineExceededError(f"not done within {self.seconds:g} s: {doing}")


class Transfer:
    """Runs tasks in parallel, and retries what they ask it to.

    Parameters
    ----------
    doing : str
        What is being done to which URI, for messages: ``saving to s3://…``.
    concurrency : int
        Threads, unless memory allows fewer.
    memory : int
        Bytes of buffers at the most; one buffer is always allowed.
    deadline : Deadline
        For everything that runs through here.
    """

    def __init__(self, doing: str, *, concurrency: int, memory: int, deadline: Deadline) -> None:
        self._doing = doing
        self._concurrency = concurrency
        self._memory = memory
        self._deadline = deadline
        self._stop = threading.Event()

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
        fit = self._memory // buffer_size if buffer_size else self._concurrency
        results: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
        source, drawing = iter(tasks), threading.Lock()

        def work() -> None:
            buffer = memoryview(mmap.mmap(-1, buffer_size)) if buffer_size else memoryview(b"")
            try:
                while not self._stop.is_set():
                    with drawing:
                        task = next(source, None)
                    if task is None:
                        break
                    results.put((task(buffer),))
            except BaseException as error:
                self._stop.set()
                results.put(error)
            else:
                results.put(None)

        threads = [
            threading.Thread(target=work, name=f"ckptio-{i}", daemon=True)
            for i in range(max(1, min(self._concurrency, fit)))
        ]
        for thread in threads:
            thread.start()
        running = len(threads)
        failure: BaseException | None = None
        try:
            while running:
                try:
                    item = results.get(timeout=self._deadline.remaining())
                except queue.Empty:
                    # A thread may be stuck in the store's client: it is not waited for.
                    raise self._deadline.error(self._doing) from failure
                if isinstance(item, tuple):
                    if failure is None:
                        yield item[0]
                else:
                    running -= 1
                    failure = failure or item
            if failure is not None:
                raise failure
        finally:
            if running:
                self._stop.set()
            for thread in threads:
                thread.join(timeout=self._deadline.remaining() if running else None)
            self._stop.clear()

    def map(self, function: Callable[[A], T], items: Iterable[A]) -> Iterator[T]:
        """Yield ``function(item)`` for each item, in no order; no more threads than items."""
        pending = list(items)
        if len(pending) == 1:
            yield function(pending[0])
        elif pending:
            yield from self.run(_ignoring_buffer(function, item) for item in pending)

    def retry(self, call: Callable[[], T]) -> T:
        """Call, and call again while the store is unavailable, with growing, jittered pauses.

        Jitter keeps many processes that failed together from coming back together.
        """
        give_up = time.monotonic() + PATIENCE
        delay = _FIRST_DELAY
        while True:
            try:
                return call()
            except StoreUnavailableError as error:
                remaining = self._deadline.remaining()
                pause = delay * random.uniform(0.5, 1.5)
                if time.monotonic() + pause > give_up or self._stop.is_set():
                    raise
                if remaining is not None and pause > remaining:
                    raise self._deadline.error(f"{self._doing}: {error}") from error
                _log.info("trying again in %.1f s: %s", pause, error)
                self._stop.wait(pause)
                delay = min(delay * 2, _LONGEST_DELAY)


def _ignoring_buffer(function: Callable[[A], T], item: A) -> Task[T]:
    return lambda _: function(item)
