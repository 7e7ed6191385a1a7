"""One measurement of a store: in a fresh process, one client writes or reads a few objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from benchmarks import clients
from benchmarks.clients import Client, Range
from benchmarks.limits import fresh_memory
from benchmarks.meter import metered, settle


@dataclass(frozen=True)
class Task:
    """What to measure.

    Attributes
    ----------
    client, checker, verb : str
        Who, who reads back what was written, and ``"write"`` or ``"read"``.
    uri : str
        A prefix that is this measurement's own, or for reading one that was filled before.
    count, size : int
        Objects, and bytes of each.
    range_size : int
        Bytes that the caller asks for at once.
    seed : int
        Of the objects' bytes.
    """

    client: str
    checker: str
    verb: str
    uri: str
    storage_options: Mapping[str, Any]
    count: int
    size: int
    range_size: int
    seed: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def ranges(self) -> list[Range]:
        """Return what is read: everything, in ranges."""
        step = self.range_size
        return [
            Range(_key(i), start, min(start + step, self.size))
            for i in range(self.count)
            for start in range(0, self.size, step)
        ]


def _key(number: int) -> str:
    return f"data/object-{number:03}"


def _content(task: Task, number: int) -> bytes:
    return np.random.Generator(np.random.SFC64([task.seed, number])).bytes(task.size)


def _digests(pieces: Sequence[Any]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(piece) for piece in pieces]


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Carry a task out; its bytes are checked before anything is returned."""
    task = Task(**request)
    client = clients.make(task.client, task.uri, task.storage_options)
    _warm_up(client, task)
    found = (_write if task.verb == "write" else _read)(task, client)
    client.close()
    return found


def _warm_up(client: Client, task: Task) -> None:
    """Import everything, connect, and have the server allocate what it allocates first."""
    page = b"x" * 4096
    client.write({"data/warm-up": memoryview(page) if client.takes_bytes else _aligned(page)})
    client.read([Range("data/warm-up", 0, 4096)])


def _aligned(data: bytes) -> memoryview:
    memory = fresh_memory(len(data))
    memory[:] = data
    return memory


def _write(task: Task, client: Client) -> dict[str, Any]:
    contents = {_key(i): _content(task, i) for i in range(task.count)}
    expected = _digests([*contents.values()])
    # fsspec takes nothing but `bytes`; the others are given page-aligned memory, as by the core.
    objects = {k: memoryview(v) if client.takes_bytes else _aligned(v) for k, v in contents.items()}
    settle()
    with metered() as cost:
        client.write(objects)
    checker = clients.make(task.checker, task.uri, task.storage_options)
    back = checker.read([Range(key, 0, task.size) for key in objects])
    checker.close()
    if _digests(back) != expected:
        raise AssertionError(f"{task.client}: what was written does not come back")
    return cost.as_json()


def _read(task: Task, client: Client) -> dict[str, Any]:
    ranges = task.ranges()
    settle()
    with metered() as cost:
        found = client.read(ranges)
    digests = iter(_digests(found))
    for i in range(task.count):
        content = memoryview(_content(task, i))
        for wanted in (r for r in ranges if r.key == _key(i)):
            if xxhash.xxh3_64_intdigest(content[wanted.start : wanted.stop]) != next(digests):
                raise AssertionError(f"{task.client}: {wanted} is not what was written")
    return cost.as_json(task.count * task.size)
