"""`RetryingBackend`: the same store, asked again while it is unavailable.

Drivers try once. Everything in the core talks to them through this, so that one policy holds for
every request: pauses that grow and are jittered (many processes that failed together must not come
back together), within the operation's deadline.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckptio.backend import Backend, Buffer, Fill, ObjectInfo, PutMode, Sink, Upload
from ckptio.errors import StoreUnavailableError, StoreUnreachableError
from ckptio.operation import Operation

__all__ = ["RetryingBackend"]

T = TypeVar("T")

_log = logging.getLogger("ckptio")

PATIENCE = 60.0
"""Seconds for which one request is tried again."""
FIRST_CONTACT = 4.0
"""The same while nothing ever answered: then the address is likelier wrong than the store busy."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0


class RetryingBackend(Backend):
    """Wraps a backend for the length of one operation.

    Parameters
    ----------
    inner : Backend
        Does the work; closing it is left to whoever opened it.
    operation : Operation
        Ends the retries when its time is up, or when it is given up.
    """

    def __init__(self, inner: Backend, operation: Operation) -> None:
        super().__init__(inner.uri)
        self.limits = inner.limits
        self._inner = inner
        self._operation = operation
        self._answered = False

    def attempt(self, call: Callable[[], T]) -> T:
        """Call, and call again as long as it is worth it."""
        began = time.monotonic()
        pause = FIRST_PAUSE
        while True:
            try:
                result = call()
            except StoreUnavailableError as error:
                unreachable = isinstance(error, StoreUnreachableError) and not self._answered
                patience = FIRST_CONTACT if unreachable else PATIENCE
                wait = pause * random.uniform(0.5, 1.5)
                given_up = self._operation.given_up.is_set()
                if given_up or time.monotonic() + wait > began + patience:
                    raise
                remaining = self._operation.remaining()
                if remaining is not None and wait > remaining:
                    raise self._operation.too_late(error) from error
                _log.info("trying again in %.1f s: %s", wait, error)
                self._operation.given_up.wait(wait)
                pause = min(pause * 2, LONGEST_PAUSE)
            else:
                self._answered = True
                return result

    def put(
        self, key: str, data: Buffer, *, mode: PutMode = "overwrite", if_match: str | None = None
    ) -> ObjectInfo:
        return self.attempt(lambda: self._inner.put(key, data, mode=mode, if_match=if_match))

    def put_through(self, key: str, size: int, buffer: memoryview, fill: Fill) -> ObjectInfo:
        def fill_on(start: int, piece: memoryview) -> None:
            self._operation.check()  # nobody wants the rest of an operation that was given up
            fill(start, piece)

        return self.attempt(lambda: self._inner.put_through(key, size, buffer, fill_on))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self.attempt(lambda: self._inner.read_into(key, start, buffer))

    def read_through(self, key: str, start: int, size: int, buffer: memoryview, sink: Sink) -> None:
        done = 0

        def take(piece: memoryview) -> None:
            nonlocal done
            sink(piece)
            done += len(piece)

        def read_on() -> None:
            before = done
            try:
                self._inner.read_through(key, start + done, size - done, buffer, take)
            except StoreUnavailableError as error:
                if done == before or self._operation.given_up.is_set():
                    raise
                # It got on: what is left is asked for with patience anew, however long this took.
                _log.info("going on after %d of %d bytes: %s", done, size, error)

        while done < size:
            self.attempt(read_on)

    def read(self, key: str) -> bytes:
        return self.attempt(lambda: self._inner.read(key))

    def head(self, key: str) -> ObjectInfo:
        return self.attempt(lambda: self._inner.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from self.attempt(lambda: [*self._inner.list(prefix)])

    def list_children(self, prefix: str = "") -> Iterator[str]:
        yield from self.attempt(lambda: [*self._inner.list_children(prefix)])

    def delete(self, keys: Iterable[str]) -> None:
        doomed = [*keys]
        self.attempt(lambda: self._inner.delete(doomed))

    def start_upload(self, key: str, size: int, part_size: int) -> Upload:
        upload = self.attempt(lambda: self._inner.start_upload(key, size, part_size))
        return _RetryingUpload(self, upload)

    def discard_uploads(self, older_than: float) -> int:
        return self.attempt(lambda: self._inner.discard_uploads(older_than))


class _RetryingUpload(Upload):
    def __init__(self, backend: RetryingBackend, inner: Upload) -> None:
        self._attempt = backend.attempt
        self._inner = inner

    def write_part(self, offset: int, data: Buffer) -> None:
        self._attempt(lambda: self._inner.write_part(offset, data))

    def complete(self) -> ObjectInfo:
        return self._attempt(self._inner.complete)

    def abort(self) -> None:
        self._attempt(self._inner.abort)
