"""Byte ranges in: read, verify each block, and scatter to the boxes that want them."""

from __future__ import annotations

import math
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
        if through := self._backend.limits.read_buffer // BLOCK * BLOCK:
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

        def take(data: memoryview) -> None:
            nonlocal at, suspect
            self._count(len(data))
            if self._verify and (block := self._damaged(read.object, at, data)):
                suspect = block
                raise CorruptionError(
                    f"{self._backend.describe(key)} is damaged: the checksum of bytes "
                    f"{block[0]}:{block[1]} does not match"
                )
            _scatter(read.pieces, at, np.frombuffer(data, np.uint8), outs)
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

    def _damaged(self, number: int, start: int, data: memoryview) -> tuple[int, int] | None:
        """Return the first block of an object's bytes that is not what was saved."""
        checksums = self._manifest.checksums[number]
        for at in range(0, len(data), BLOCK):
            block, first = data[at : at + BLOCK], start + at
            if xxhash.xxh3_64_intdigest(block) != checksums[first // BLOCK]:
                return first, first + len(block)
        return None

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


def _scatter(
    pieces: Iterable[Piece], start: int, data: npt.NDArray[np.uint8], outs: Sequence[Units]
) -> None:
    """Copy bytes of an object, from `start` on, to where they are wanted."""
    for piece in pieces:
        ends = piece.offset + piece.dtype.stored_nbytes(piece.chunk.size)
        if piece.offset < start + len(data) and ends > start:
            _place(piece, start, data, outs[piece.want])


def _place(piece: Piece, start: int, data: npt.NDArray[np.uint8], out: Units) -> None:
    """Copy what some bytes hold of a piece's chunk to where the piece's box wants it."""
    dtype = piece.dtype
    lo = max(start - piece.offset, 0)
    hi = min(start + len(data) - piece.offset, dtype.stored_nbytes(piece.chunk.size))
    found = data[piece.offset + lo - start : piece.offset + hi - start]
    unit, lanes = dtype.unit, dtype.lanes
    if dtype.bits < 8:
        units, first = dtype.unpack(found), lo * 8 // dtype.bits
    else:
        if lo % unit.itemsize or hi % unit.itemsize:
            # A unit lies across two pieces, as happens in other programs' files, where offsets are
            # not aligned: each brings some of its bytes.
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
