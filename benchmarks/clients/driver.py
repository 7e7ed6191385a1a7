"""ckptio's own drivers, moved by the core's `Transfer` as a save and a restore do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ckptio
from benchmarks.clients import Range
from benchmarks.limits import fresh_memory
from ckptio.backend import Backend
from ckptio.manifest import BLOCK
from ckptio.operation import Operation
from ckptio.options import RestoreOptions, SaveOptions
from ckptio.reader import read_size
from ckptio.transfer import Transfer
from ckptio.writer import part_size

Task = Callable[[memoryview], None]


class DriverClient:
    """The driver that the URI selects."""

    takes_bytes = False

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        self._backend = ckptio.open_backend(uri, storage_options)

    def write(self, objects: Mapping[str, memoryview]) -> None:
        def parts() -> Iterator[Task]:
            for key, data in objects.items():
                if len(data) <= self._backend.limits.put_size:
                    yield partial(self._put, key, data)
                    continue
                size = part_size(self._backend.limits, None, len(data))
                yield from _Object(self._backend, key, data, size).parts()

        buffer_size = BLOCK if self._backend.limits.put_size else 0
        for _ in self._transfer(SaveOptions().memory).run(parts(), buffer_size):
            pass

    def _put(self, key: str, data: memoryview, buffer: memoryview) -> None:
        def fill(start: int, piece: memoryview) -> None:
            piece[:] = data[start : start + len(piece)]

        self._backend.put_through(key, len(data), buffer, fill)

    def read(self, ranges: Sequence[Range]) -> Sequence[memoryview]:
        outs = [fresh_memory(r.stop - r.start) for r in ranges]
        step = read_size(self._backend.limits, RestoreOptions())

        def pieces() -> Iterator[Task]:
            for (key, start, _), out in zip(ranges, outs, strict=True):
                for at in range(0, len(out), step):
                    yield partial(self._read, key, start + at, out[at : at + step])

        for _ in self._transfer(RestoreOptions().memory).run(pieces()):
            pass
        return outs

    def _read(self, key: str, start: int, out: memoryview, _: memoryview) -> None:
        self._backend.read_into(key, start, out)

    def _transfer(self, memory: int) -> Transfer:
        limits = self._backend.limits
        return Transfer(Operation("a benchmark"), concurrency=limits.concurrency, memory=memory)

    def close(self) -> None:
        self._backend.close()


class _Object:
    """One object on its way: whoever writes its last part completes it, as in a save."""

    def __init__(self, backend: Backend, key: str, data: memoryview, part: int) -> None:
        self._upload = backend.start_upload(key, len(data), part)
        self._data = data
        self._part = part
        self._left = -(-len(data) // part)
        self._lock = threading.Lock()

    def parts(self) -> Iterator[Task]:
        for offset in range(0, len(self._data), self._part):
            yield partial(self._write, offset)

    def _write(self, offset: int, _: memoryview) -> None:
        self._upload.write_part(offset, self._data[offset : offset + self._part])
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._upload.complete()


class PluginClient(DriverClient):
    """The obstore plugin, for the same store."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        scheme, _, place = uri.partition("://")
        super().__init__(f"{scheme}+obstore://{place}", storage_options)
