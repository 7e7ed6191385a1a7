"""`FaultyBackend`: a real backend that counts its calls and fails where a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptio.backend import Backend, Buffer, Fill, ObjectInfo, PutMode, Sink, Upload

__all__ = ["Call", "FaultyBackend"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call that reached the backend.

    Attributes
    ----------
    index : int
        From 0, in the order of arrival.
    method : str
        ``put`` (for `put_through` too), ``read_into`` (for `read_through` too), ``head``,
        ``list``, ``list_children``, ``delete``, ``start_upload``, ``write_part``, ``complete``,
        ``abort``.
    key : str
        Or prefix; the first one of a batch.
    start, nbytes : int
        The bytes that are moved, if any are.
    """

    index: int
    method: str
    key: str
    start: int = 0
    nbytes: int = 0


Script = Callable[[Call], None]


class FaultyBackend(Backend):
    """Wraps a backend; a script sees every call before it is carried out, and after.

    Parameters
    ----------
    inner : Backend
        Does the work.
    before : callable, optional
        Gets each `Call`; what it raises keeps the call from being carried out.
    after : callable, optional
        The same after the call succeeded: an answer that was lost on the way.

    Attributes
    ----------
    calls : list of Call
        All so far, in order.

    Examples
    --------
    >>> from ckptio import open_backend
    >>> backend = FaultyBackend(open_backend("memory://doc/faulty"))
    >>> _ = backend.put("a", b"123")
    >>> [(call.method, call.key, call.nbytes) for call in backend.calls]
    [('put', 'a', 3)]
    """

    def __init__(
        self, inner: Backend, before: Script | None = None, after: Script | None = None
    ) -> None:
        super().__init__(inner.uri)
        self.inner = inner
        self.limits = inner.limits
        self.before = before
        self.after = after
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def count(self, method: str) -> int:
        """Return how many calls of a method there were."""
        return sum(call.method == method for call in self.calls)

    def nbytes(self, method: str) -> int:
        """Return how many bytes calls of a method moved."""
        return sum(call.nbytes for call in self.calls if call.method == method)

    @contextmanager
    def _call(self, method: str, key: str, start: int = 0, nbytes: int = 0) -> Iterator[None]:
        with self._lock:
            call = Call(len(self.calls), method, key, start, nbytes)
            self.calls.append(call)
        if self.before:
            self.before(call)
        yield
        if self.after:
            self.after(call)

    def put(
        self, key: str, data: Buffer, *, mode: PutMode = "overwrite", if_match: str | None = None
    ) -> ObjectInfo:
        with self._call("put", key, 0, len(data)):
            return self.inner.put(key, data, mode=mode, if_match=if_match)

    def put_through(self, key: str, size: int, buffer: memoryview, fill: Fill) -> ObjectInfo:
        with self._call("put", key, 0, size):
            return self.inner.put_through(key, size, buffer, fill)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        with self._call("read_into", key, start, len(buffer)):
            self.inner.read_into(key, start, buffer)

    def read_through(self, key: str, start: int, size: int, buffer: memoryview, sink: Sink) -> None:
        with self._call("read_into", key, start, size):
            self.inner.read_through(key, start, size, buffer, sink)

    def head(self, key: str) -> ObjectInfo:
        with self._call("head", key):
            return self.inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._call("list", prefix):
            return self.inner.list(prefix)

    def list_children(self, prefix: str = "") -> Iterator[str]:
        with self._call("list_children", prefix):
            return self.inner.list_children(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        keys = [*keys]
        with self._call("delete", keys[0] if keys else ""):
            self.inner.delete(keys)

    def start_upload(self, key: str, size: int, part_size: int) -> Upload:
        with self._call("start_upload", key, 0, size):
            upload = self.inner.start_upload(key, size, part_size)
        return _FaultyUpload(self, key, upload)

    def discard_uploads(self, older_than: float) -> int:
        with self._call("discard_uploads", ""):
            return self.inner.discard_uploads(older_than)

    def close(self) -> None:
        self.inner.close()


class _FaultyUpload(Upload):
    def __init__(self, backend: FaultyBackend, key: str, inner: Upload) -> None:
        self._backend = backend
        self._key = key
        self._inner = inner

    def write_part(self, offset: int, data: Buffer) -> None:
        with self._backend._call("write_part", self._key, offset, len(data)):
            self._inner.write_part(offset, data)

    def complete(self) -> ObjectInfo:
        with self._backend._call("complete", self._key):
            return self._inner.complete()

    def abort(self) -> None:
        with self._backend._call("abort", self._key):
            self._inner.abort()
