"""The generic driver: any scheme that fsspec knows and no driver claims (sftp, ftp, smb, hdfs, …).

It can promise what the file system behind fsspec lets it:

- **An object appears whole.** It is written under a temporary name and renamed, where the file
  system has a rename; where that cannot replace a file, the old one steps aside, and for a
  moment the key is missing. Without a rename (fsspec would copy and delete) the object is written
  in place: whole at once in an object store, where one request writes it.
- **Create-if-absent** is exact where the file system refuses to create a name that exists (mode
  ``xb``; a small trial finds out). Elsewhere, the name is looked up and then written: two writers
  in the same moment may both succeed, the later one replacing the other. Replacing only what was
  seen (``if_match``) is never exact. Both say so in one `BestEffortWarning` per scheme.
- An etag is made of what the file system tells about a file (an inode, a checksum, the time of the
  last change); with nothing but a coarse time, two changes of equal size in one tick look alike.
- A file system that only reads (most of http, github, …) can be restored from; a save raises.
- An upload is held in memory until it is complete.

Caches of fsspec are off. A file system that is not asynchronous is used by one thread at a time;
each gets its own connection, dropped after an error.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import secrets
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptio.backend import (
    Backend,
    Buffer,
    Limits,
    ObjectInfo,
    PutMode,
    check_key,
    check_match,
)
from ckptio.errors import (
    AlreadyExistsError,
    CkptioError,
    CorruptionError,
    DriverUnavailableError,
    InvalidKeyError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    StoreUnavailableError,
)
from ckptio.hooks import hookimpl
from ckptio_backends.fsspec_errors import translate
from ckptio_backends.fsspec_files import modified, object_info

try:
    import fsspec
except ImportError as _error:
    raise DriverUnavailableError("this scheme needs fsspec: pip install fsspec") from _error

__all__ = ["BestEffortWarning", "FsspecBackend"]

_TEMPORARY = ".ckptio-tmp-"
_TRIES = 10
"""Replacing a file where a rename does not: each time that fails, another writer has come first."""
_PASSWORD = re.compile(r"(?<=://)([^/@:]*):[^/@]*@")

_warned: set[str] = set()


class BestEffortWarning(UserWarning):
    """A file system cannot decide a race between two writers."""


class FsspecBackend(Backend):
    """Files below one directory of an fsspec file system.

    Parameters
    ----------
    uri : str
        As fsspec reads it; a password in it appears in no message.
    storage_options : mapping
        Of the file system's constructor.
    """

    limits = Limits(
        part_size=8 << 20,
        max_put=1 << 30,
        max_part_size=1 << 30,
        read_size=8 << 20,
        read_gap=256 << 10,
        concurrency=4,
    )

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        super().__init__(_PASSWORD.sub(r"\1@", uri))
        self._full_uri = uri.rstrip("/")
        self._options = dict(storage_options)
        self._scheme = uri.partition("://")[0]
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._idle: list[Any] = []
        self._inherited: list[Any] = []
        self._exclusive: bool | None = None
        kind = fsspec.get_filesystem_class(self._scheme)
        self._root = kind._strip_protocol(self._full_uri).rstrip("/")
        self._renames = kind.mv is not fsspec.AbstractFileSystem.mv

    def __reduce__(self) -> tuple[type[FsspecBackend], tuple[str, dict[str, Any]]]:
        return type(self), (self._full_uri, self._options)

    # Contract

    def put(
        self, key: str, data: Buffer, *, mode: PutMode = "overwrite", if_match: str | None = None
    ) -> ObjectInfo:
        path = self._path(key)
        target = self._temporary(path) if self._renames else path
        with self._file_system(key) as fs:
            if not self._renames:
                self._check(fs, key, path, mode, if_match)
            self._write(fs, target, bytes(data))
            try:
                info = object_info(key, fs.info(target))
                if info.size != len(data):
                    raise StoreUnavailableError(
                        f"{self.describe(key)}: wrote {len(data)} bytes, {info.size} arrived"
                    )
                if self._renames:
                    self._check(fs, key, path, mode, if_match)
                    self._publish(fs, key, target, path, mode, if_match)
            except BaseException:
                if self._renames:
                    with contextlib.suppress(Exception):  # the first error is the one to tell
                        fs.rm_file(target)
                raise
        return info

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        path, end = self._path(key), start + len(buffer)
        with self._file_system(key) as fs:
            size = self._find(fs, key, path).size if not len(buffer) else None
            data = fs.cat_file(path, start, end) if len(buffer) else b""
            if len(data) != len(buffer) or (size is not None and start > size):
                size = self._find(fs, key, path).size
                if end <= size:
                    raise StoreUnavailableError(
                        f"{self.describe(key)}: asked for {len(buffer)} bytes, got {len(data)}"
                    )
                raise CorruptionError(f"{self.describe(key)} ends at byte {size}, before {end}")
        buffer[:] = data

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._file_system(key) as fs:
            return self._find(fs, key, path)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        top = self._path(prefix, prefix=True)
        skip = len(self._root) + 1
        with self._file_system(prefix) as fs:
            found = fs.find(top, detail=True) if fs.isdir(top) else {}
        infos = [
            object_info(name[skip:], entry)
            for name, entry in found.items()
            if not posixpath.basename(name).startswith(_TEMPORARY)
        ]
        yield from sorted(infos, key=lambda info: info.key)

    def list_children(self, prefix: str = "") -> Iterator[str]:
        top = self._path(prefix, prefix=True)
        with self._file_system(prefix) as fs:
            found = fs.ls(top, detail=True) if fs.isdir(top) else []
        names = (
            posixpath.basename(entry["name"].rstrip("/")) + "/" * (entry["type"] == "directory")
            for entry in found
        )
        yield from sorted(name for name in names if not name.startswith(_TEMPORARY))

    def delete(self, keys: Iterable[str]) -> None:
        paths = {key: self._path(key) for key in keys}
        for key, path in paths.items():
            with self._file_system(key) as fs:
                try:
                    fs.rm_file(path)
                except Exception:
                    # Absent is fine, and not every file system says it in a way of its own.
                    self._forget(fs)
                    if fs.isfile(path):
                        raise
        for parent in sorted({posixpath.dirname(p) for p in paths.values()}, key=len, reverse=True):
            self._remove_empty(parent)

    def discard_uploads(self, older_than: float) -> int:
        limit, count = time.time() - older_than, 0
        with self._file_system("") as fs:
            found = fs.find(self._root, detail=True) if fs.isdir(self._root) else {}
            for name, entry in found.items():
                ours = posixpath.basename(name).startswith(_TEMPORARY)
                if ours and modified(entry) <= limit:
                    fs.rm_file(name)
                    count += 1
        return count

    def close(self) -> None:
        with self._lock:
            self._idle.clear()

    # How it is done

    def _path(self, key: str, *, prefix: bool = False) -> str:
        check_key(key, prefix=prefix)
        if posixpath.basename(key).startswith(_TEMPORARY):
            raise InvalidKeyError(f"names of files cannot begin with {_TEMPORARY!r}: {key!r}")
        return f"{self._root}/{key}" if key else self._root or "/"

    def _temporary(self, path: str) -> str:
        return f"{posixpath.dirname(path)}/{_TEMPORARY}{secrets.token_hex(8)}"

    def _write(self, fs: Any, path: str, data: bytes) -> None:
        parent = posixpath.dirname(path)
        for last in (False, True):  # the directory may be removed as empty right after it was made
            try:
                if not fs.isdir(parent):
                    with contextlib.suppress(Exception):  # somebody else may make it: seen below
                        fs.makedirs(parent, exist_ok=True)
                    self._forget(fs)
                fs.pipe_file(path, data)
                self._forget(fs)
                return
            except Exception as error:
                self._forget(fs)
                if last or fs.isdir(parent):
                    if isinstance(error, FileNotFoundError) and error.__cause__ is None:
                        raise OSError(f"nothing can be written to {path}") from error
                    raise

    def _check(self, fs: Any, key: str, path: str, mode: PutMode, if_match: str | None) -> None:
        if mode == "overwrite" and if_match is None:
            return
        try:
            found = self._find(fs, key, path)
        except FileNotFoundError:
            found = None
        if mode == "create" and found is not None:
            raise AlreadyExistsError(f"{self.describe(key)} already exists")
        if if_match is not None:
            check_match(found, if_match, self.describe(key))
        if if_match is not None or not self._is_exclusive(fs, path):
            _warn_once(self._scheme)

    def _publish(
        self, fs: Any, key: str, temporary: str, path: str, mode: PutMode, if_match: str | None
    ) -> None:
        create = mode == "create"
        claimed = create and self._is_exclusive(fs, path)
        if claimed:
            # Whoever creates the name may fill it.
            with fs.open(path, "xb"):
                pass
        try:
            fs.mv(temporary, path)
        except Exception:
            self._forget(fs)
            if claimed:
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    fs.rm_file(path)
            if claimed or not fs.isfile(temporary) or (create and not fs.isfile(path)):
                raise
            # This rename does not replace.
            if create:
                raise AlreadyExistsError(f"{self.describe(key)} already exists") from None
            self._step_aside(fs, key, temporary, path, if_match)
        finally:
            self._forget(fs)

    def _step_aside(
        self, fs: Any, key: str, temporary: str, path: str, if_match: str | None
    ) -> None:
        """Move the old file away and the new one there, as other writers may do meanwhile."""
        aside = self._temporary(path)
        for tries_left in reversed(range(_TRIES)):
            old = False
            try:
                if fs.isfile(path):
                    fs.mv(path, aside)
                    old = True
                fs.mv(temporary, path)
            except BaseException as error:
                self._forget(fs)
                replaced, old = fs.isfile(path), fs.isfile(aside)
                if old:
                    with contextlib.suppress(Exception):  # the first error is the one to tell
                        if replaced:
                            fs.rm_file(aside)
                        else:
                            fs.mv(aside, path)
                if old and replaced and if_match is not None:
                    raise PreconditionFailedError(
                        f"{self.describe(key)} changed: another writer replaced it"
                    ) from error
                # Where the old file stepped aside and nobody else came, the rename does not work.
                if not isinstance(error, Exception) or not tries_left or (old and not replaced):
                    raise
            else:
                if old:
                    fs.rm_file(aside)
                return

    def _is_exclusive(self, fs: Any, path: str) -> bool:
        """Whether a name can be claimed by creating it, and then be renamed over."""
        if self._exclusive is None:
            self._exclusive = self._renames and self._try_claiming(fs, path)
            self._forget(fs)
        return self._exclusive

    def _try_claiming(self, fs: Any, path: str) -> bool:
        first, second = self._temporary(path), self._temporary(path)
        try:
            for trial in (first, second):
                with fs.open(trial, "xb"):
                    pass
            try:
                with fs.open(first, "xb"):
                    pass
                return False  # it takes xb for wb
            except FileExistsError:
                fs.mv(second, first)
                return True
        except (NotImplementedError, ValueError, OSError):
            return False
        finally:
            for trial in (first, second):
                with contextlib.suppress(Exception):  # moved away, or never made
                    fs.rm_file(trial)

    def _remove_empty(self, directory: str) -> None:
        with contextlib.suppress(StorageError), self._file_system("") as fs:
            while len(directory) >= len(self._root) and directory.strip("/"):
                self._forget(fs)
                if fs.ls(directory):
                    break
                fs.rmdir(directory)
                directory = posixpath.dirname(directory)

    def _find(self, fs: Any, key: str, path: str) -> ObjectInfo:
        self._forget(fs)
        found = fs.info(path)
        if found["type"] == "directory":
            raise NotFoundError(f"{self.describe(key)} does not exist")
        return object_info(key, found)

    @staticmethod
    def _forget(fs: Any) -> None:
        # Not every file system honours use_listings_cache.
        fs.invalidate_cache()

    @contextlib.contextmanager
    def _file_system(self, key: str) -> Iterator[Any]:
        """Lend a connection, and turn what any file system raises into the contract's errors."""
        fs = None
        try:
            fs = self._take()
            self._forget(fs)
            yield fs
        except (CkptioError, Warning, FileNotFoundError, FileExistsError) as error:
            # The answer may be no, but the connection is good.
            self._give_back(fs)
            if isinstance(error, (CkptioError, Warning)):
                raise
            raise translate(error, self.describe(key)) from error
        except Exception as error:
            raise translate(error, self.describe(key)) from error
        else:
            self._give_back(fs)

    def _take(self) -> Any:
        if self._pid != os.getpid():
            # A forked child. The parent's connections are neither used nor closed here.
            self._inherited += self._idle
            self._lock, self._idle, self._pid = threading.Lock(), [], os.getpid()
        with self._lock:
            if self._idle:
                return self._idle[-1] if self._idle[-1].async_impl else self._idle.pop()
        fs, _ = fsspec.url_to_fs(
            self._full_uri, skip_instance_cache=True, use_listings_cache=False, **self._options
        )
        return fs

    def _give_back(self, fs: Any) -> None:
        with self._lock:
            if fs is not None and not (fs.async_impl and fs in self._idle):
                self._idle.append(fs)


def _warn_once(scheme: str) -> None:
    if scheme not in _warned:
        _warned.add(scheme)
        warnings.warn(
            f"{scheme}:// cannot decide a race between two writers: if two processes save to one "
            "URI in the same moment, the later one wins",
            BestEffortWarning,
            stacklevel=2,
        )


@hookimpl
def ckptio_open_backend(
    uri: str, scheme: str, storage_options: Mapping[str, Any]
) -> FsspecBackend | None:
    """Open a directory of whatever file system fsspec has for the scheme."""
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        return None  # unknown to fsspec too
    except ImportError as error:
        raise DriverUnavailableError(f"{scheme}://: {error}") from error
    return FsspecBackend(uri, storage_options)
