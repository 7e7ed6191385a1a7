"""``memory://``: the reference backend, a dictionary that lives as long as the process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptio.backend import Backend, Buffer, Limits, ObjectInfo, PutMode, check_key, check_match
from ckptio.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidOptionError,
    InvalidURIError,
    NotFoundError,
)
from ckptio.hooks import hookimpl

__all__ = ["MemoryBackend"]

_lock = threading.Lock()
_objects: dict[str, tuple[bytes, ObjectInfo]] = {}
_etags = itertools.count(1)


class MemoryBackend(Backend):
    """Objects of this process, shared by all instances; for tests and examples."""

    limits = Limits(part_size=4 << 20, read_size=4 << 20, read_gap=64 << 10, concurrency=4)

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._root = self.uri.partition("://")[2].strip("/")
        if not self._root:
            raise InvalidURIError(f"{uri!r} names no place: write memory://name/…")

    def _path(self, key: str, *, prefix: bool = False) -> str:
        return f"{self._root}/{check_key(key, prefix=prefix)}"

    def put(
        self, key: str, data: Buffer, *, mode: PutMode = "overwrite", if_match: str | None = None
    ) -> ObjectInfo:
        path, content = self._path(key), bytes(data)
        with _lock:
            found = _objects.get(path)
            if mode == "create" and found is not None:
                raise AlreadyExistsError(f"{self.describe(key)} already exists")
            if if_match is not None:
                check_match(found[1] if found else None, if_match, self.describe(key))
            info = ObjectInfo(key, len(content), str(next(_etags)), time.time())
            _objects[path] = content, info
        return info

    def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        try:
            return _objects[self._path(key)]
        except KeyError:
            raise NotFoundError(f"{self.describe(key)} does not exist") from None

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        content = self._get(key)[0]
        if start + len(buffer) > len(content):
            raise CorruptionError(
                f"{self.describe(key)} ends at byte {len(content)}, "
                f"before byte {start + len(buffer)}"
            )
        buffer[:] = memoryview(content)[start : start + len(buffer)]

    def head(self, key: str) -> ObjectInfo:
        info = self._get(key)[1]
        return ObjectInfo(key, info.size, info.etag, info.modified)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        below = self._path(prefix, prefix=True).rstrip("/") + "/"
        skip = len(self._root) + 1
        with _lock:
            found = sorted((p, info) for p, (_, info) in _objects.items() if p.startswith(below))
        for path, info in found:
            yield ObjectInfo(path[skip:], info.size, info.etag, info.modified)

    def list_children(self, prefix: str = "") -> Iterator[str]:
        below = self._path(prefix, prefix=True).rstrip("/") + "/"
        skip, names = len(below), set()
        with _lock:
            for path in _objects:
                if path.startswith(below):
                    end = path.find("/", skip)
                    names.add(path[skip:] if end < 0 else path[skip : end + 1])
        yield from sorted(names)

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        with _lock:
            for path in paths:
                _objects.pop(path, None)


@hookimpl
def ckptio_open_backend(
    uri: str, scheme: str, storage_options: Mapping[str, Any]
) -> MemoryBackend | None:
    """Open ``memory://name/path``; it takes no storage options."""
    if scheme != "memory":
        return None
    if storage_options:
        raise InvalidOptionError(f"memory:// takes no storage options: {sorted(storage_options)}")
    return MemoryBackend(uri)
