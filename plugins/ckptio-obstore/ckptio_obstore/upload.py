"""Streaming an object's parts through obstore, which takes them in their order only.

obstore has no call that uploads one part: its multipart upload pulls the whole object from an
iterator, sends several parts at once, and cleans up if the iterator raises. So a thread per upload
runs that call, and parts that come early wait in memory for their turn.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import xxhash
from ckptio import Buffer, ObjectInfo, StorageError, StoreUnavailableError, Upload

__all__ = ["StreamedUpload"]

_WINDOW = 4
"""Parts that may wait in line before those who bring more are held up."""

_running: weakref.WeakSet[StreamedUpload] = weakref.WeakSet()


class _AbortedError(Exception):
    """Raised into obstore, to make it drop the parts that it sent."""


class StreamedUpload(Upload):
    """One object on its way.

    A part may be written again; but once it was sent, with the same bytes only.

    Parameters
    ----------
    where : str
        The object's URI, for messages.
    send : callable
        Uploads the object that an iterator yields the parts of.
    """

    def __init__(
        self, where: str, size: int, part_size: int, send: Callable[[Iterator[bytes]], ObjectInfo]
    ) -> None:
        self._where = where
        self._size = size
        self._part_size = part_size
        self._send = send
        self._changed = threading.Condition()
        self._waiting: dict[int, bytes] = {}
        self._digests: dict[int, int] = {}
        self._next = 0
        self._aborted = False
        self._failure: BaseException | None = None
        self._result: ObjectInfo | None = None
        self._touched = time.monotonic()
        self._thread: threading.Thread | None = None

    def write_part(self, offset: int, data: Buffer) -> None:
        digest = xxhash.xxh3_64_intdigest(data)
        length = min(self._part_size, self._size - offset)
        if offset % self._part_size or len(data) != length:
            raise StorageError(
                f"{self._where}: {len(data)} bytes at offset {offset} are no part of {self._size} "
                f"bytes in parts of {self._part_size}"
            )
        with self._changed:
            self._touched = time.monotonic()
            self._check()
            if offset < self._next:
                if digest != self._digests[offset]:
                    raise StorageError(
                        f"{self._where}: the part at offset {offset} was sent already, with other "
                        "bytes; obstore cannot take it back. Begin a new upload"
                    )
                return
            self._waiting[offset] = bytes(data)
            self._digests[offset] = digest
            self._start()
            self._changed.notify_all()
            # Only those in line wait: they move on without anybody else's part.
            while offset >= self._next + _WINDOW * self._part_size and self._in_line(offset):
                self._changed.wait()
                self._check()

    def complete(self) -> ObjectInfo:
        with self._changed:
            for offset in range(self._next, self._size, self._part_size):
                if offset not in self._waiting:
                    raise StorageError(f"{self._where}: no part was written at offset {offset}")
            self._start()
            while self._result is None:
                self._check()
                self._changed.wait()
            return self._result

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    @property
    def idle(self) -> float:
        """Seconds since anything was written; 0 once the upload is over."""
        over = self._aborted or self._result is not None
        return 0.0 if over else time.monotonic() - self._touched

    def _check(self) -> None:
        if self._aborted:
            raise StorageError(f"{self._where}: the upload was aborted")
        if isinstance(self._failure, StoreUnavailableError):
            # obstore did its own retries; the parts that it took are gone, so more are in vain.
            raise StorageError(f"{self._failure}; the upload is lost") from self._failure
        if self._failure is not None:
            raise self._failure

    def _in_line(self, offset: int) -> bool:
        return all(o in self._waiting for o in range(self._next, offset + 1, self._part_size))

    def _start(self) -> None:
        if self._thread is None:
            _running.add(self)
            self._thread = threading.Thread(target=self._run, name="ckptio-obstore", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            result = self._send(self._parts())
        except _AbortedError:
            pass
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._waiting.clear()
                self._changed.notify_all()
        else:
            with self._changed:
                self._result = result
                self._changed.notify_all()

    def _parts(self) -> Iterator[bytes]:
        while self._next < self._size:
            with self._changed:
                while self._next not in self._waiting:
                    if self._aborted:
                        raise _AbortedError(self._where)
                    self._changed.wait()
                part = self._waiting.pop(self._next)
                self._next += len(part)
                self._changed.notify_all()
            yield part


@atexit.register
def _abort_what_runs() -> None:
    # The interpreter must not be taken down under a thread that waits inside of Rust.
    for upload in list(_running):
        if upload.idle:
            upload.abort()
