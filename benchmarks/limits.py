"""What the machine can do at best: the device, memory copies, and first touches of memory."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.meter import metered, settle

MIB = 1 << 20
THREADS = (2, 4, 8)
BLOCKS = (4 * MIB, 16 * MIB)
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Way:
    """A way to use the device.

    Attributes
    ----------
    direct : bool
        Past the page cache.
    threads, block : int
        Threads, and bytes of each system call; the threads take blocks in turn.
    huge : bool
        In memory marked for huge pages. Which are faster to touch for the first time depends on
        what a hypervisor did with them, so reading tries both.
    reserved : bool
        Writing into space that was reserved for the file, instead of into a hole.
    """

    direct: bool
    threads: int
    block: int
    huge: bool = True
    reserved: bool = False

    def __str__(self) -> str:
        how = "O_DIRECT" if self.direct else "buffered"
        pages = "" if self.huge else ", small pages"
        space = ", space reserved" if self.reserved else ""
        return f"{how}, {self.threads} × {self.block // MIB} MiB{pages}{space}"


_GRID = [*itertools.product((True, False), THREADS, BLOCKS, (True, False))]
WAYS = {
    # What is written comes from one small buffer, whose pages make no difference.
    "save": [Way(direct, threads, block, True, space) for direct, threads, block, space in _GRID],
    "restore": [Way(*choice) for choice in _GRID],
}


def write(path: Path, nbytes: int, way: Way) -> float:
    """Write a file durably; return the seconds. Its size is known before, as a saver knows it."""
    source = fresh_memory(way.block)
    source[:] = np.random.default_rng(0).bytes(way.block)
    path.unlink(missing_ok=True)
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | (_DIRECT if way.direct else 0), 0o666)
    try:
        if way.reserved:
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.truncate(fd, nbytes)
        _each_block(nbytes, way, lambda at: _expect(os.pwrite(fd, source, at), way.block))
        os.fsync(fd)
    finally:
        os.close(fd)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    return time.perf_counter() - began


def read(path: Path, nbytes: int, way: Way) -> float:
    """Read a file, which is in no cache, into fresh memory; return the seconds."""
    began = time.perf_counter()
    out = fresh_memory(nbytes, huge=way.huge)
    fd = os.open(path, os.O_RDONLY | (_DIRECT if way.direct else 0))
    try:
        _each_block(
            nbytes,
            way,
            lambda at: _expect(os.preadv(fd, [out[at : at + way.block]], at), way.block),
        )
    finally:
        os.close(fd)
    return time.perf_counter() - began


def fresh_memory(nbytes: int, *, huge: bool = True) -> memoryview:
    """Return page-aligned memory that nothing has touched, in huge pages where the kernel has them.

    Private: what `mmap` gives by default is shared memory, whose first touch costs twice as much.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _each_block(nbytes: int, way: Way, move: Callable[[int], None]) -> None:
    if nbytes % way.block:
        raise ValueError(f"{nbytes} bytes are not whole blocks of {way.block}")
    with ThreadPoolExecutor(way.threads) as pool:
        for _ in pool.map(move, range(0, nbytes, way.block)):
            pass


def _expect(done: int, wanted: int) -> None:
    if done != wanted:
        raise OSError(f"{done} of {wanted} bytes were moved")


def memory_copy(nbytes: int, repeat: int = 5) -> float:
    """Return the bytes a second of copying memory that was touched before, by one thread."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return nbytes / _best(lambda: np.copyto(target, source), repeat)


def first_touch(nbytes: int, repeat: int = 5) -> float:
    """Return the bytes a second of touching fresh memory in small pages, by one thread."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

    def touch() -> None:
        np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)[:: mmap.PAGESIZE] = 1

    return nbytes / _best(touch, repeat)


def _best(function: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure in a fresh process what `request` names."""
    if request["what"] == "memory":
        settle()
        touched = first_touch(request["nbytes"])
        return {
            "memory copy": memory_copy(request["nbytes"]),
            "first touch": touched,
            "page faults": touched / mmap.PAGESIZE,
        }
    function = {"save": write, "restore": read}[request["what"]]
    way = Way(**request["way"])
    settle()
    with metered() as cost:
        seconds = function(Path(request["path"]), request["nbytes"], way)
    result = request["nbytes"] if request["what"] == "restore" else 0
    return cost.as_json(result) | {"seconds": seconds}


def best_ways(
    measured: Callable[[str, Way], float], ways: Mapping[str, Sequence[Way]] = WAYS
) -> Iterable[tuple[str, Way, float]]:
    """Yield the fastest way to save and to restore, and the seconds that it took."""
    for verb, able in ways.items():
        times = {way: measured(verb, way) for way in able}
        best = min(times, key=times.__getitem__)
        yield verb, best, times[best]


def as_json(way: Way) -> dict[str, Any]:
    """Return a way as `measure` takes it."""
    return asdict(way)
