"""``file://`` and plain paths: the local file system.

Objects are written under a temporary name and appear by ``link`` (create if absent) or ``rename``,
after their content is on the device; then the directory is synced too. Large aligned parts bypass
the page cache (O_DIRECT) where the file system takes that, which is faster on every device and
leaves the training job's own cache alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from ckptio.backend import (
    Backend,
    Buffer,
    Limits,
    ObjectInfo,
    PutMode,
    Upload,
    check_key,
    check_match,
)
from ckptio.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidKeyError,
    InvalidOptionError,
    InvalidURIError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
)
from ckptio.hooks import hookimpl
from ckptio_backends.file_space import reserve

__all__ = ["LocalBackend"]

_TEMPORARY = ".ckptio-tmp-"
_PAGE = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)
_MAX_WRITE = 1 << 30  # one system call moves less than 2 GiB

_ERRORS: dict[int | None, tuple[type[StorageError], str]] = {
    errno.ENOENT: (NotFoundError, "does not exist"),
    errno.EEXIST: (AlreadyExistsError, "already exists"),
    errno.EACCES: (PermissionDeniedError, "permission denied"),
    errno.EPERM: (PermissionDeniedError, "operation not permitted"),
    errno.EROFS: (PermissionDeniedError, "the file system is read-only"),
    errno.ENOSPC: (StorageFullError, "no space left on the device"),
    errno.EDQUOT: (StorageFullError, "the disk quota is used up"),
    errno.EFBIG: (StorageFullError, "larger than the file system or a limit allows"),
    errno.ENOTDIR: (InvalidKeyError, "one of its directories is a file"),
    errno.EISDIR: (InvalidKeyError, "is a directory"),
    errno.ENAMETOOLONG: (InvalidKeyError, "the name is too long for this file system"),
}


class LocalBackend(Backend):
    """Files below one directory."""

    limits = Limits(
        part_size=4 << 20,
        max_parts=1 << 31,
        max_part_size=1 << 30,
        max_put=1 << 30,
        read_size=4 << 20,
        read_gap=64 << 10,
        concurrency=4,
        spare=4,
    )

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._root = _directory(uri)

    def put(
        self, key: str, data: Buffer, *, mode: PutMode = "overwrite", if_match: str | None = None
    ) -> ObjectInfo:
        upload = self.start_upload(key, len(data), self.limits.max_part_size)
        try:
            upload.write_part(0, data)
            return upload.publish(create=mode == "create", if_match=if_match)
        finally:
            upload.abort()

    def start_upload(self, key: str, size: int, part_size: int) -> _LocalUpload:
        return _LocalUpload(self, key, self._path(key), size, part_size)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        path = self._path(key)
        with self.errors(key):
            done = _read_direct(path, start, buffer)
            if done < len(buffer):
                done += _read_buffered(path, start + done, buffer[done:])
        if done < len(buffer):
            raise CorruptionError(
                f"{self.describe(key)} ends at byte {start + done}, "
                f"before byte {start + len(buffer)}"
            )

    def head(self, key: str) -> ObjectInfo:
        with self.errors(key):
            found = os.stat(self._path(key))
            if stat.S_ISDIR(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, "is a directory")
        return _info(key, found)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        top = self._path(prefix, prefix=True)
        with self.errors(prefix):
            yield from sorted(_walk(top, f"{prefix}/" if prefix else ""), key=lambda i: i.key)

    def list_children(self, prefix: str = "") -> Iterator[str]:
        with self.errors(prefix):
            try:
                with os.scandir(self._path(prefix, prefix=True)) as entries:
                    names = [
                        entry.name + "/" * entry.is_dir()
                        for entry in entries
                        if not entry.name.startswith(_TEMPORARY)
                    ]
            except (FileNotFoundError, NotADirectoryError):
                return
        yield from sorted(names)

    def delete(self, keys: Iterable[str]) -> None:
        parents = set()
        for key in keys:
            path = self._path(key)
            with self.errors(key), suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)
            parents.add(os.path.dirname(path))
        # Deepest first. What is empty goes, as in an object store; the rest says so and stays.
        for parent in sorted(parents, key=len, reverse=True):
            directory = parent
            with suppress(OSError):
                while len(directory) >= len(self._root):
                    os.rmdir(directory)
                    directory = os.path.dirname(directory)

    def discard_uploads(self, older_than: float) -> int:
        limit, count = time.time() - older_than, 0
        for directory, _, names in os.walk(self._root):
            for name in names:
                path = os.path.join(directory, name)
                if name.startswith(_TEMPORARY) and os.stat(path).st_mtime <= limit:
                    with self.errors(os.path.relpath(path, self._root)):
                        os.unlink(path)
                    count += 1
        return count

    def _path(self, key: str, *, prefix: bool = False) -> str:
        check_key(key, prefix=prefix)
        if os.path.basename(key).startswith(_TEMPORARY):
            raise InvalidKeyError(f"names of files cannot begin with {_TEMPORARY!r}: {key!r}")
        return os.path.join(self._root, key) if key else self._root

    @contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """Turn what the operating system raises into the contract's errors."""
        try:
            yield
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            kind, text = _ERRORS.get(error.errno, (StorageError, str(error)))
            raise kind(f"{self.describe(key)}: {text}") from error


class _LocalUpload(Upload):
    """A file under a temporary name beside the one it becomes."""

    def __init__(
        self, backend: LocalBackend, key: str, path: str, size: int, part_size: int
    ) -> None:
        self._backend = backend
        self._key = key
        self._path = path
        self._directory = os.path.dirname(path)
        self._temporary = os.path.join(self._directory, _TEMPORARY + secrets.token_hex(8))
        self._size = size
        self._lock = threading.Lock()
        self._direct = -1
        self._made: list[str] = []
        with backend.errors(key):
            self._fd = self._create()
            try:
                # The file has its size from the start, so that parts may come in any order.
                (reserve if size > part_size else os.truncate)(self._fd, size)
                if _DIRECT and size >= _PAGE:
                    with suppress(OSError):  # not every file system takes it
                        self._direct = os.open(self._temporary, os.O_WRONLY | _DIRECT)
            except BaseException:
                self.abort()
                raise

    def _create(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            try:
                self._made += _make_directories(self._directory)
            except FileNotFoundError as error:
                raise StorageError(
                    f"{self._backend.describe(self._key)}: the directory {self._directory} cannot "
                    f"be made: {error.strerror}"
                ) from error
            with suppress(FileNotFoundError):  # somebody removed the empty directory in between
                return os.open(self._temporary, flags, 0o666)

    def write_part(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        with self._backend.errors(self._key):
            done = 0
            if self._direct >= 0 and offset % _PAGE == 0 and _address(view) % _PAGE == 0:
                done = self._write_direct(offset, view[: len(view) // _PAGE * _PAGE])
            _write(self._fd, offset + done, view[done:])

    def _write_direct(self, offset: int, view: memoryview) -> int:
        try:
            return _write(self._direct, offset, view)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0  # this file system wants another alignment: through the page cache, then

    def complete(self) -> ObjectInfo:
        with self._lock:
            if self._fd < 0:
                return self._backend.head(self._key)  # completed before
            return self.publish(create=False, if_match=None)

    def publish(self, *, create: bool, if_match: str | None) -> ObjectInfo:
        with self._backend.errors(self._key):
            os.fsync(self._fd)
            info = _info(self._key, os.fstat(self._fd))
            if create:
                self._link()
            elif if_match is not None:
                self._swap(if_match)
            else:
                os.replace(self._temporary, self._path)
            for directory in {self._directory, *map(os.path.dirname, self._made)}:
                _sync_directory(directory)
            self._close()
            return info

    def _link(self) -> None:
        try:
            os.link(self._temporary, self._path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            # No hard links here: whoever creates the name may fill it.
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.replace(self._temporary, self._path)

    def _swap(self, if_match: str) -> None:
        # Writers of this machine take turns by a lock on the directory itself.
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            try:
                found = self._backend.head(self._key)
            except NotFoundError:
                found = None
            check_match(found, if_match, self._backend.describe(self._key))
            os.replace(self._temporary, self._path)
        finally:
            os.close(directory)

    def abort(self) -> None:
        self._close()
        with suppress(FileNotFoundError), self._backend.errors(self._key), suppress(OSError):
            os.unlink(self._temporary)

    def _close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1


def _directory(uri: str) -> str:
    """Return the directory that a path or a ``file://`` URI (percent-decoded) means."""
    if not uri.startswith("file://"):
        return os.path.abspath(uri)
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise InvalidURIError(
            f"{uri!r} names the host {parts.netloc!r}: a local file URI has three slashes"
        )
    if parts.query or parts.fragment:
        raise InvalidURIError(f"{uri!r}: write '?' as %3F and '#' as %23 in a file URI")
    return os.path.abspath(unquote(parts.path))


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    etag = f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"
    return ObjectInfo(key, found.st_size, etag, found.st_mtime)


def _walk(top: str, prefix: str) -> Iterator[ObjectInfo]:
    try:
        entries = os.scandir(top)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file() and not entry.name.startswith(_TEMPORARY):
                with suppress(FileNotFoundError):  # deleted while we look
                    yield _info(prefix + entry.name, entry.stat())


def _address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _write(fd: int, offset: int, view: memoryview) -> int:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _MAX_WRITE], offset + done)
    return done


def _read_direct(path: str, start: int, buffer: memoryview) -> int:
    """Read what can be read past the page cache: whole pages into aligned memory."""
    length = len(buffer) // _PAGE * _PAGE
    if not _DIRECT or not length or start % _PAGE or _address(buffer) % _PAGE:
        return 0
    try:
        fd = os.open(path, os.O_RDONLY | _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    try:
        return _read(fd, start, buffer[:length])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        os.close(fd)


def _read_buffered(path: str, start: int, buffer: memoryview) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return _read(fd, start, buffer)
    finally:
        os.close(fd)


def _read(fd: int, start: int, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done : done + _MAX_WRITE]], start + done)
        if not count:
            break
        done += count
    return done


def _make_directories(directory: str) -> list[str]:
    """Make a directory and those above it; return the ones that were not there."""
    missing = []
    above = directory
    while not os.path.isdir(above) and above != os.path.dirname(above):
        missing.append(above)
        above = os.path.dirname(above)
    os.makedirs(directory, exist_ok=True)
    return missing


def _sync_directory(directory: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@hookimpl
def ckptio_open_backend(
    uri: str, scheme: str, storage_options: Mapping[str, Any]
) -> LocalBackend | None:
    """Open a local directory; there are no storage options."""
    if scheme != "file":
        return None
    if storage_options:
        raise InvalidOptionError(f"local paths take no storage options: {sorted(storage_options)}")
    return LocalBackend(uri)
