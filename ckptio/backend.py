"""The contract between the core and a store: `Backend`, `Upload`, `ObjectInfo`, `Limits`.

A driver moves bytes and never knows what a checkpoint is. Its methods are synchronous and
thread-safe; concurrency, retries and deadlines belong to the core. Five methods are required
(`put`, `read_into`, `head`, `list`, `delete`); the rest have working defaults that a driver
overrides where its store can do better. `ckptio.testing.BackendContract` tests all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from ckptio.errors import InvalidKeyError, NotFoundError, PreconditionFailedError

__all__ = [
    "Backend",
    "Buffer",
    "Fill",
    "Limits",
    "ObjectInfo",
    "PutMode",
    "Sink",
    "Upload",
    "check_key",
]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

Buffer = bytes | bytearray | memoryview
Sink = Callable[[memoryview], None]
Fill = Callable[[int, memoryview], object]
PutMode = Literal["overwrite", "create"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows of one object.

    Attributes
    ----------
    key : str
        Relative to the backend's URI.
    size : int
        In bytes.
    etag : str
        Changes whenever the content does; opaque.
    modified : float
        Seconds since the epoch.
    """

    key: str
    size: int
    etag: str
    modified: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a store allows and prefers. Sizes in bytes.

    Attributes
    ----------
    object_size : int
        Preferred size of a data object.
    put_size : int
        Data objects up to this size are written with one `Backend.put_through` each, where that is
        better than several parts. 0 where it is not.
    part_size : int
        Preferred size of a part of an upload.
    min_part_size, max_part_size, max_parts : int
        What the store accepts; the last part of an upload may be smaller.
    max_put : int
        Largest object that one `put` may write.
    read_size : int
        Preferred size of one ranged read.
    read_gap : int
        Two wanted ranges closer than this are cheaper to read as one.
    read_buffer : int
        Memory that one read needs: for a driver whose `Backend.read_through` passes an answer of
        any size through less. 0 where it takes as much as is read.
    concurrency : int
        Requests worth having in flight.
    spare : int
        Threads beyond those, which meanwhile gather the next parts or place what came. For a
        device that is at its full rate with few requests: those that begin together end together,
        and it would wait while all their threads are busy with something else.
    """

    object_size: int = 512 * MIB
    put_size: int = 0
    part_size: int = 8 * MIB
    min_part_size: int = 1
    max_part_size: int = 5 * GIB
    max_parts: int = 10_000
    max_put: int = 5 * GIB
    read_size: int = 8 * MIB
    read_gap: int = 1 * MIB
    read_buffer: int = 0
    concurrency: int = 16
    spare: int = 0


class Upload(ABC):
    """One object on its way; nothing of it is visible before `complete`.

    `write_part` may be called from any thread, in any order, and repeated for the same offset
    after a failure. A driver must not keep a reference to a part's buffer after the call.
    """

    @abstractmethod
    def write_part(self, offset: int, data: Buffer) -> None:
        """Store the part at `offset`, a multiple of the upload's part size."""

    @abstractmethod
    def complete(self) -> ObjectInfo:
        """Make the object visible, whole and durable, replacing one of the same key.

        Called once every part is written; may be repeated after a failure.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give up and leave nothing behind. May follow anything but a successful `complete`."""


class Backend(ABC):
    """One store, rooted at one URI; every key is relative to it.

    Guarantees that a driver gives:

    - `put` and `Upload.complete` are all or nothing: no reader ever sees part of an object, and
      what they returned from is durable.
    - A missing key is `NotFoundError` everywhere. Other failures are the `StorageError` that
      fits, raised ``from`` their cause, with URI and key in the message; a failure that may go
      away by itself is `StoreUnavailableError`.
    - `head`, `list` and `read_into` see every write that returned before they were called.
    - An instance can be pickled, and used after a fork by the child.
    """

    limits: Limits = Limits()

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")

    @abstractmethod
    def put(
        self, key: str, data: Buffer, *, mode: PutMode = "overwrite", if_match: str | None = None
    ) -> ObjectInfo:
        """Write one whole object atomically.

        Parameters
        ----------
        mode : {"overwrite", "create"}
            With ``"create"``, `AlreadyExistsError` if the key exists; of several concurrent
            creators exactly one succeeds.
        if_match : str, optional
            Overwrite only the object that has this etag, else `PreconditionFailedError`;
            a key that is gone counts as changed.
        """

    @abstractmethod
    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `start`.

        Exactly ``len(buffer)`` bytes, or an error: an object that ends earlier raises
        `CorruptionError` (it is not as long as whoever asks was told).
        """

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Look one object up."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below `prefix`, in the order of their keys.

        `prefix` is whole path segments: ``"a/b"`` lists ``a/b/c``, neither ``a/bc`` nor ``a/b``.
        A prefix that nothing is below lists nothing.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; absent keys are fine."""

    def read_through(self, key: str, start: int, size: int, buffer: memoryview, sink: Sink) -> None:
        """Pass the object's `size` bytes from `start` on, in order, through a buffer.

        The default asks for one buffer after the other. A driver that receives its answers bit by
        bit passes one of any size on as it comes, so that requests can be large while what is
        worked on stays in the processor's cache, and says so by `Limits.read_buffer`.

        Parameters
        ----------
        buffer : memoryview
            Filled, again and again, and left to the driver until the call returns.
        sink : callable
            Gets each piece, a part of `buffer`: full ones, and the rest. What it raises ends the
            call, and is raised by it.
        """
        for at in range(0, size, len(buffer)):
            piece = buffer[: min(len(buffer), size - at)]
            self.read_into(key, start + at, piece)
            sink(piece)

    def put_through(self, key: str, size: int, buffer: memoryview, fill: Fill) -> ObjectInfo:
        """Write one whole object of `size` bytes atomically, passed in order through a buffer.

        The default gathers the object in memory. A driver that sends a body bit by bit needs no
        more than the buffer, whatever the size, and says so by `Limits.put_size`.

        Parameters
        ----------
        buffer : memoryview
            Filled, again and again, and left to the driver until the call returns.
        fill : callable
            ``fill(start, piece)`` fills `piece`, a part of `buffer`, with the object's bytes from
            `start`: full ones in order, and the rest. What it raises ends the call, leaves the
            key as it was, and is raised.
        """
        whole = bytearray(size)
        for at in range(0, size, len(buffer)):
            piece = buffer[: min(len(buffer), size - at)]
            fill(at, piece)
            whole[at : at + len(piece)] = piece
        return self.put(key, whole)

    def start_upload(self, key: str, size: int, part_size: int) -> Upload:
        """Begin an object of `size` bytes, written as parts of `part_size` (the last one shorter).

        The default holds the whole object in memory until `Upload.complete` puts it.
        """
        return _BufferedUpload(self, key, size)

    def list_children(self, prefix: str = "") -> Iterator[str]:
        """Names one level below `prefix`, sorted; a name that has keys below it ends in ``/``.

        A store that knows directories may also yield empty ones.
        """
        skip = len(prefix) + 1 if prefix else 0
        last = None
        for info in self.list(prefix):
            name, slash, _ = info.key[skip:].partition("/")
            if (child := name + slash) != last:
                last = child
                yield child

    def discard_uploads(self, older_than: float) -> int:
        """Remove what uploads left that were neither completed nor aborted; return how many.

        Parameters
        ----------
        older_than : float
            Seconds; younger uploads may still be at work and are left alone.
        """
        return 0

    def close(self) -> None:  # noqa: B027  # a store without connections has nothing to release
        """Release connections. Closing twice is fine."""

    # Conveniences, derived from the above.

    def read(self, key: str) -> bytes:
        """Return one whole object."""
        data = bytearray(self.head(key).size)
        self.read_into(key, 0, memoryview(data))
        return bytes(data)

    def exists(self, key: str) -> bool:
        """Whether an object has that key."""
        try:
            self.head(key)
        except NotFoundError:
            return False
        return True

    def describe(self, key: str = "") -> str:
        """Return the URI of a key, for messages."""
        return f"{self.uri}/{key}" if key else self.uri

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.uri}>"


class _BufferedUpload(Upload):
    """Parts gathered in memory, for a store that can only put whole objects."""

    def __init__(self, backend: Backend, key: str, size: int) -> None:
        self._backend = backend
        self._key = check_key(key)
        self._data = bytearray(size)

    def write_part(self, offset: int, data: Buffer) -> None:
        self._data[offset : offset + len(data)] = data

    def complete(self) -> ObjectInfo:
        return self._backend.put(self._key, self._data)

    def abort(self) -> None:
        self._data = bytearray()


def check_key(key: str, *, prefix: bool = False) -> str:
    """Return `key` if it is a relative path of plain segments, else raise `InvalidKeyError`.

    Parameters
    ----------
    prefix : bool
        Whether the empty string is allowed too.
    """
    if prefix and not key:
        return key
    if "\0" in key or any(segment in ("", ".", "..") for segment in key.split("/")):
        raise InvalidKeyError(
            f"not a valid key: {key!r} (a key is a relative path without empty, '.' or '..' "
            "segments)"
        )
    return key


def check_match(found: ObjectInfo | None, if_match: str, where: str) -> None:
    """Raise `PreconditionFailedError` unless the object found has the wanted etag."""
    if found is None or found.etag != if_match:
        state = "is gone" if found is None else f"has etag {found.etag!r}"
        raise PreconditionFailedError(f"{where} changed: wanted etag {if_match!r}, it {state}")
