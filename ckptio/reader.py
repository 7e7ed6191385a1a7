"""Byte ranges in: read, verify each block, and hand on to the boxes that want them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ckptio.backend import Backend, Limits
from ckptio.block_check import BlockCheck
from ckptio.dtypes import Units
from ckptio.errors import CorruptionError, NotFoundError
from ckptio.manifest import BLOCK, Manifest
from ckptio.operation import Operation
from ckptio.options import RestoreOptions
from ckptio.placing import by_chunk, scatter
from ckptio.restore_plan import Read, Want, plan_reads
from ckptio.retry import RetryingBackend
from ckptio.transfer import Transfer

__all__ = ["Reader"]

_LEAST_SHARE = 8 << 20  # bytes for which a request of their own is worth it


class Reader:
    """Reads one checkpoint's data.

    Parameters
    ----------
    verify : bool
        Whether every byte read is checked against its block's checksum; reads then begin and end
        at blocks.
    """

    def __init__(
        self,
        backend: Backend,
        manifest: Manifest,
        options: RestoreOptions,
        *,
        verify: bool = True,
        count: Callable[[int], None] = lambda _: None,
    ) -> None:
        operation = Operation(f"reading {backend.uri}", options.deadline)
        self._backend = RetryingBackend(backend, operation)
        self._manifest = manifest
        self._verify = verify
        self._count = count
        self._read_size = read_size(backend.limits, options)
        self._transfer = Transfer.of_data(operation, backend.limits, options)

    def plan(self, wants: Sequence[Want]) -> list[Read]:
        """Plan the reads for some boxes: large ones, unless that left threads without work."""
        reads = self._planned(wants, self._read_size)
        if len(reads) < (threads := self._transfer.threads):
            share = sum(read.stop - read.start for read in reads) / threads
            size = max(_LEAST_SHARE, math.ceil(share / BLOCK) * BLOCK)
            if any(read.stop - read.start > size for read in reads):
                return self._planned(wants, size)
        return reads

    def _planned(self, wants: Sequence[Want], size: int) -> list[Read]:
        return plan_reads(
            self._manifest,
            wants,
            align=BLOCK if self._verify else 1,
            gap=self._backend.limits.read_gap,
            size=size,
        )

    def run(self, reads: Sequence[Read], outs: Sequence[Units]) -> Iterable[Read]:
        """Carry reads out in parallel; yield each when its bytes are where they belong.

        Parameters
        ----------
        outs : sequence of ndarray
            For each wanted box, its units: see `StoredDtype.units_shape`.
        """

        def task(read: Read) -> Callable[[memoryview], Read]:
            def carry_out(buffer: memoryview) -> Read:
                self._fetch(read, buffer, outs)
                return read

            return carry_out

        largest = max((read.stop - read.start for read in reads), default=0)
        size = math.ceil(largest / BLOCK) * BLOCK
        if through := self._backend.limits.read_buffer:
            size = min(size, through)
        yield from self._transfer.run(map(task, reads), size)

    def check_sizes(self, objects: Iterable[int]) -> None:
        """Compare the sizes of objects (by their numbers) with the manifest's, in parallel.

        Raises
        ------
        CorruptionError
            If one is missing, or longer or shorter than it was.
        """

        def check(number: int) -> None:
            entry = self._manifest.objects[number]
            try:
                info = self._backend.head(entry.key)
            except NotFoundError as error:
                raise self._missing(number, 0, entry.size) from error
            if info.size != entry.size:
                raise CorruptionError(
                    f"{self._backend.describe(entry.key)} has {info.size} bytes, was saved with "
                    f"{entry.size}; it holds {self._leaves_at(number, 0, entry.size)}"
                )

        for _ in self._transfer.map(check, sorted(objects)):
            pass

    def verify(self, objects: Iterable[int]) -> Iterable[int]:
        """Read every block of some objects and check it; yield the bytes of each read."""
        reads = [
            Read(number, start, min(start + self._read_size, size))
            for number in objects
            for size in [self._manifest.objects[number].size]
            for start in range(0, size, self._read_size)
        ]
        return (read.stop - read.start for read in self.run(reads, ()))

    def _fetch(self, read: Read, buffer: memoryview, outs: Sequence[Units]) -> None:
        key = self._manifest.objects[read.object].key
        at, suspect = read.start, (read.start, read.stop)
        check = None
        if self._verify:
            check = BlockCheck(self._manifest.checksums[read.object], read.start, read.stop)
        fed = by_chunk(read.pieces)

        def take(data: memoryview) -> None:
            nonlocal at, suspect
            self._count(len(data))
            if check is not None and (block := check.damaged(data)):
                suspect = block
                raise CorruptionError(
                    f"{self._backend.describe(key)} is damaged: the checksum of bytes "
                    f"{block[0]}:{block[1]} does not match"
                )
            # Before all of its block is checked: nobody is given arrays of a failed read.
            scatter(fed, at, np.frombuffer(data, np.uint8), outs)
            at += len(data)

        try:
            if self._backend.limits.read_buffer:
                with self._transfer.turn:
                    self._backend.read_through(key, at, read.stop - at, buffer, take)
            else:
                data = buffer[: read.stop - at]
                with self._transfer.turn:
                    self._backend.read_into(key, at, data)
                take(data)
        except NotFoundError as error:
            raise self._missing(read.object, read.start, read.stop) from error
        except CorruptionError as error:
            leaves = self._leaves_at(read.object, *suspect)
            raise CorruptionError(f"{error}; it holds {leaves}") from error

    def _missing(self, number: int, start: int, stop: int) -> CorruptionError:
        key = self._manifest.objects[number].key
        return CorruptionError(
            f"{self._backend.describe(key)} is missing, which the manifest names; it held "
            f"{self._leaves_at(number, start, stop)}"
        )

    def _leaves_at(self, number: int, start: int, stop: int) -> str:
        """Name the leaves that have bytes in a range of an object."""
        table, leaves = self._manifest.chunks, self._manifest.leaves
        owner = np.repeat(np.arange(len(leaves)), table.counts)
        bits = np.fromiter((leaf.stored.bits for leaf in leaves), np.int64)[owner]
        ends = table.offsets + -(-table.volumes * bits // 8)
        hit = (table.objects == number) & (table.offsets < stop) & (ends > start)
        names = [repr(leaves[i].path) for i in np.unique(owner[hit])]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return f"leaf {', '.join(names[:4])}{more}" if names else "no leaf's data"


def read_size(limits: Limits, options: RestoreOptions) -> int:
    """Return the bytes of one read at the most: whole blocks."""
    return max(1, (options.read_size or limits.read_size) // BLOCK) * BLOCK
