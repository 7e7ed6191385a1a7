"""Byte ranges in: read, verify each block, and scatter to the boxes that want them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptio.backend import Backend, Limits
from ckptio.boxes import intersect, range_boxes
from ckptio.dtypes import Units
from ckptio.errors import CorruptionError, NotFoundError
from ckptio.manifest import BLOCK, Manifest
from ckptio.operation import Operation
from ckptio.options import RestoreOptions
from ckptio.restore_plan import Piece, Read, Want, plan_reads
from ckptio.retry import RetryingBackend
from ckptio.transfer import Transfer

__all__ = ["Reader"]


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
        self._transfer = Transfer(
            operation,
            concurrency=options.concurrency or backend.limits.concurrency,
            memory=options.memory,
        )

    def plan(self, wants: Sequence[Want]) -> list[Read]:
        """Plan the reads for some boxes."""
        return plan_reads(
            self._manifest,
            wants,
            align=BLOCK if self._verify else 1,
            gap=self._backend.limits.read_gap,
            size=self._read_size,
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
                data = self._fetch(read, buffer)
                for piece in read.pieces:
                    _scatter(piece, read, data, outs[piece.want])
                return read

            return carry_out

        size = max((read.stop - read.start for read in reads), default=0)
        yield from self._transfer.run(map(task, reads), -(-size // BLOCK) * BLOCK)

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

    def _fetch(self, read: Read, buffer: memoryview) -> npt.NDArray[np.uint8]:
        entry = self._manifest.objects[read.object]
        data = buffer[: read.stop - read.start]
        try:
            self._backend.read_into(entry.key, read.start, data)
        except NotFoundError as error:
            raise self._missing(read.object, read.start, read.stop) from error
        except CorruptionError as error:
            leaves = self._leaves_at(read.object, read.start, read.stop)
            raise CorruptionError(f"{error}; it holds {leaves}") from error
        self._count(len(data))
        if self._verify:
            checksums = self._manifest.checksums[read.object]
            for at in range(0, len(data), BLOCK):
                start = read.start + at
                block = data[at : at + BLOCK]
                if xxhash.xxh3_64_intdigest(block) != checksums[start // BLOCK]:
                    raise CorruptionError(
                        f"{self._backend.describe(entry.key)} is damaged: the checksum of bytes "
                        f"{start}:{start + len(block)} does not match; they hold "
                        f"{self._leaves_at(read.object, start, start + len(block))}"
                    )
        return np.frombuffer(data, np.uint8)

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


def _scatter(piece: Piece, read: Read, data: npt.NDArray[np.uint8], out: Units) -> None:
    """Copy what a read holds of a piece's chunk to where the piece's box wants it."""
    dtype = piece.dtype
    lo = max(read.start - piece.offset, 0)
    hi = min(read.stop - piece.offset, dtype.stored_nbytes(piece.chunk.size))
    found = data[piece.offset + lo - read.start : piece.offset + hi - read.start]
    unit, lanes = dtype.unit, dtype.lanes
    if dtype.bits < 8:
        units, first = dtype.unpack(found), lo * 8 // dtype.bits
    else:
        if lo % unit.itemsize or hi % unit.itemsize:
            # A unit lies across two reads, as happens in other programs' files, where offsets are
            # not aligned: each read brings some of its bytes.
            lanes = (*lanes, unit.itemsize)
            unit = np.dtype(np.uint8)
            out = out.reshape(-1).view(unit).reshape(*piece.box.shape, *lanes)
        units, first = _typed(found, unit), lo // unit.itemsize
    shape = (*piece.chunk.shape, *lanes)
    end = min(first + units.size, prod(shape))
    if piece.chunk == piece.box:
        out.reshape(-1)[first:end] = units[: end - first]
        return
    inside = piece.common.within(piece.chunk).extended(lanes)
    target = piece.common.within(piece.box).extended(lanes)
    done = 0
    for box in range_boxes(shape, first, end):
        if (part := intersect(box, inside)) is not None:
            source = units[done : done + box.size].reshape(box.shape)[part.within(box).slices]
            out[part.within(inside).shifted(target.start).slices] = source
        done += box.size


def _typed(data: npt.NDArray[np.uint8], unit: np.dtype[Any]) -> Units:
    if data.ctypes.data % unit.itemsize:
        data = data.copy()  # only another program's file is laid out like this
    return data.view(unit)
