"""Data objects out: gather the bytes of a part, checksum its blocks, hand it to the backend."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import numpy.typing as npt
import xxhash

from ckptio.arrays import Pieces
from ckptio.backend import Backend, Limits, Upload
from ckptio.boxes import Box, intersect, range_boxes
from ckptio.dtypes import StoredDtype, Units
from ckptio.manifest import BLOCK
from ckptio.save_plan import ChunkPlan, LeafPlan, ObjectPlan

__all__ = ["ObjectWriter", "part_size"]

Source = Callable[[ChunkPlan], Pieces]
"""Returns the arrays that hold a chunk's box; views, where that can be."""


def part_size(limits: Limits, wanted: int | None, size: int) -> int:
    """Return the part size in bytes for an object: whole blocks, within the store's limits."""
    floor = max(wanted or limits.part_size, limits.min_part_size, -(-size // limits.max_parts))
    blocks = max(1, min(-(-floor // BLOCK), limits.max_part_size // BLOCK))
    return blocks * BLOCK


class ObjectWriter:
    """Writes one data object, its parts in any order and from any thread.

    Attributes
    ----------
    checksums : ndarray of uint64
        XXH3-64 of each block, filled as parts are written.
    """

    def __init__(
        self,
        backend: Backend,
        plan: ObjectPlan,
        leaves: Sequence[LeafPlan],
        source: Source,
        wanted_part_size: int | None,
        turn: AbstractContextManager[object],
    ) -> None:
        self.plan = plan
        self.part_size = part_size(backend.limits, wanted_part_size, plan.size)
        self.checksums = np.zeros(-(-plan.size // BLOCK), np.uint64)
        self._backend = backend
        self._leaves = leaves
        self._source = source
        self._turn = turn
        self._ends = [chunk.offset + chunk.nbytes for chunk in plan.chunks]
        self._lock = threading.Lock()
        self._left = -(-plan.size // self.part_size)
        # Whoever wants parts of some size wants parts.
        self._whole = not wanted_part_size and plan.size <= backend.limits.put_size
        self._upload: Upload | None = None
        self._completed = False

    @property
    def buffer_size(self) -> int:
        """Bytes of the buffer that a task needs."""
        return BLOCK if self._whole else min(self.part_size, -(-self.plan.size // BLOCK) * BLOCK)

    def tasks(self) -> Iterator[Callable[[memoryview], int]]:
        """Yield one task for each part, or for the whole; it returns the bytes it wrote."""
        if self._whole:
            yield self._write_whole
            return
        for start in range(0, self.plan.size, self.part_size):
            yield partial(self._write, start)

    def _write_whole(self, buffer: memoryview) -> int:
        # The key belongs to this attempt: writing it again does no harm.
        with self._turn:
            self._backend.put_through(self.plan.key, self.plan.size, buffer[:BLOCK], self._fill)
        return self.plan.size

    def _write(self, start: int, buffer: memoryview) -> int:
        stop = min(start + self.part_size, self.plan.size)
        part = buffer[: stop - start]
        self._fill(start, part)
        if self.plan.size <= self.part_size and self.plan.size <= self._backend.limits.max_put:
            # One request, and no harm in writing it again, as above.
            with self._turn:
                self._backend.put(self.plan.key, part)
            return len(part)
        upload = self._started()
        with self._turn:
            upload.write_part(start, part)
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            upload.complete()
            self._completed = True
        return len(part)

    def _started(self) -> Upload:
        with self._lock:
            if self._upload is None:
                self._upload = self._backend.start_upload(
                    self.plan.key, self.plan.size, self.part_size
                )
            return self._upload

    def abort(self) -> None:
        """Give up an upload that was not completed."""
        if self._upload is not None and not self._completed:
            self._upload.abort()

    def _fill(self, start: int, part: memoryview) -> None:
        """Gather the object's bytes from `start`, where a block begins, and checksum them."""
        self._gather(start, np.frombuffer(part, np.uint8))
        for block in range(0, len(part), BLOCK):
            digest = xxhash.xxh3_64_intdigest(part[block : block + BLOCK])
            self.checksums[(start + block) // BLOCK] = digest

    def _gather(self, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill `out` with the object's bytes from `start`."""
        stop = start + out.size
        head = self.plan.header[start:stop]
        out[: len(head)] = np.frombuffer(head, np.uint8)
        for i in range(bisect.bisect_right(self._ends, start), len(self._ends)):
            chunk = self.plan.chunks[i]
            if chunk.offset >= stop:
                break
            lo, hi = max(start, chunk.offset), min(stop, self._ends[i])
            _copy_range(
                self._leaves[chunk.leaf].dtype,
                chunk.box,
                self._source(chunk),
                lo - chunk.offset,
                out[lo - start : hi - start],
            )


def _copy_range(
    dtype: StoredDtype, box: Box, pieces: Pieces, start: int, out: npt.NDArray[np.uint8]
) -> None:
    """Copy a box's stored bytes from `start` on into `out`."""
    held = [(piece.extended(dtype.lanes), dtype.as_units(array)) for piece, array in pieces]
    if dtype.bits < 8:
        lo = start * 8 // dtype.bits
        hi = min(lo + out.size * 8 // dtype.bits, box.size)
        loose = np.empty(hi - lo, np.uint8)
        _copy_units(dtype, box, held, lo, loose)
        out[:] = dtype.pack(loose)
        return
    if held[0][0] == box.extended(dtype.lanes) and (units := held[0][1]).flags.c_contiguous:
        out[:] = units.reshape(-1).view(np.uint8)[start : start + out.size]
        return
    _copy_units(dtype, box, held, start // dtype.unit.itemsize, out.view(dtype.unit))


def _copy_units(
    dtype: StoredDtype, box: Box, held: Sequence[tuple[Box, Units]], lo: int, out: Units
) -> None:
    """Copy a box's units from `lo` on, in C order, from the arrays that hold it, into `out`."""
    corner = box.extended(dtype.lanes).start
    done = 0
    for part in range_boxes(dtype.units_shape(box.shape), lo, lo + out.size):
        target = out[done : done + part.size].reshape(part.shape)
        wanted = part.shifted(corner)
        for whole, units in held:
            if (common := intersect(wanted, whole)) is not None:
                target[common.within(wanted).slices] = units[common.within(whole).slices]
        done += part.size
