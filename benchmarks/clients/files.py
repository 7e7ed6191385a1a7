"""Plain files: what a few lines of Python do, through the page cache and past it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.clients import Range
from benchmarks.limits import fresh_memory

A = TypeVar("A")
T = TypeVar("T")

THREADS = 8
_STEP = 4 << 20
_PAGE = 4096


def _parallel(function: Callable[[A], T], items: Sequence[A]) -> list[T]:
    with ThreadPoolExecutor(THREADS) as pool:
        return [*pool.map(function, items)]


class BufferedClient:
    """``write`` and ``fsync``; ``pread`` through the page cache."""

    takes_bytes = False

    flags = 0

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        self._root = Path(uri)
        self._root.mkdir(parents=True, exist_ok=True)

    def write(self, objects: Mapping[str, memoryview]) -> None:
        for key in objects:
            (self._root / key).parent.mkdir(parents=True, exist_ok=True)
        _parallel(self._write, [*objects.items()])
        for directory in {(self._root / key).parent for key in objects}:
            fd = os.open(directory, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def _write(self, item: tuple[str, memoryview]) -> None:
        key, data = item
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self.flags
        fd = os.open(self._root / key, flags, 0o666)
        try:
            for at in range(0, len(data), _STEP):
                if os.write(fd, data[at : at + _STEP]) != len(data[at : at + _STEP]):
                    raise OSError(f"{key}: a short write")
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, ranges: Sequence[Range]) -> Sequence[memoryview]:
        return _parallel(self._read, ranges)

    def _read(self, wanted: Range) -> memoryview:
        out = fresh_memory(wanted.stop - wanted.start)
        fd = os.open(self._root / wanted.key, os.O_RDONLY | self.flags)
        try:
            for at in range(0, len(out), _STEP):
                piece = out[at : at + _STEP]
                if os.preadv(fd, [piece], wanted.start + at) != len(piece):
                    raise OSError(f"{wanted.key}: a short read")
        finally:
            os.close(fd)
        return out

    def close(self) -> None:
        """Nothing is held."""


class DirectClient(BufferedClient):
    """The same past the page cache, which wants whole pages at whole pages."""

    flags = getattr(os, "O_DIRECT", 0)
