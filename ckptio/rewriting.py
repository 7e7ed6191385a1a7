"""Data objects made from an open checkpoint: each part is filled by reading the boxes it holds."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptio.arrays import empty
from ckptio.backend import Backend
from ckptio.boxes import range_boxes
from ckptio.checkpoint import Checkpoint
from ckptio.dtypes import StoredDtype, Units
from ckptio.errors import CkptioError
from ckptio.manifest import BLOCK
from ckptio.operation import Operation
from ckptio.options import RestoreOptions, SaveOptions
from ckptio.progress import track
from ckptio.restore_plan import Want
from ckptio.save_plan import ChunkPlan, LeafPlan, ObjectPlan
from ckptio.transfer import Transfer
from ckptio.uploading import ObjectUpload
from ckptio.writer import part_size

__all__ = ["Rewriter"]

_log = logging.getLogger("ckptio")

PART = 32 << 20
"""Bytes of a part, if the store does not ask for more: a part's first and last block are read for
its neighbours too, which costs the less, the larger it is."""


class Rewriter:
    """Writes objects whose chunks are boxes of a checkpoint's leaves.

    Parameters
    ----------
    checkpoint : Checkpoint
        Where the bytes come from.
    backend : Backend
        Where they go to.
    verify : bool
        Check what is read against its checksums.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        operation: Operation,
        options: SaveOptions,
        *,
        verify: bool,
        progress: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._backend = backend
        self._operation = operation
        self._options = options
        self._progress = progress
        self._wanted_part = options.part_size or max(PART, backend.limits.part_size)
        # Each part is read with these; the deadline is the whole operation's.
        reading = RestoreOptions(memory=8 * BLOCK, concurrency=4)
        self._reader = checkpoint.reader(reading, verify=verify)

    def write(
        self, plans: Sequence[ObjectPlan], leaves: Sequence[LeafPlan], numbers: Sequence[int]
    ) -> list[npt.NDArray[np.uint64]]:
        """Write objects in parallel; return the checksums of each one's blocks.

        Parameters
        ----------
        leaves : sequence of LeafPlan
            What the plans' chunks are chunks of; its dtype may be wider than the source's.
        numbers : sequence of int
            Of these leaves in the checkpoint.
        """
        self._reader.check_sizes(range(len(self._checkpoint.manifest.objects)))
        # Beside its buffer, each thread holds what was read for one part, and the reads.
        options = replace(self._options, memory=max(1, self._options.memory // 3))
        transfer = Transfer.of_data(self._operation, self._backend.limits, options)
        objects = [
            _Object(self._backend, plan, self._wanted_part, leaves, numbers, transfer.turn)
            for plan in plans
        ]
        size = max((o.buffer_size for o in objects), default=0)
        tasks = (
            partial(self._write_part, item, start)
            for item in objects
            for start in item.upload.starts
        )
        total = sum(plan.size for plan in plans)
        try:
            for _ in track(transfer.run(tasks, size), total, "converting", show=self._progress):
                pass
        except BaseException:
            for item in objects:
                try:
                    item.upload.abort()
                except CkptioError as error:
                    _log.warning("an upload was left behind at %s: %s", self._backend.uri, error)
            raise
        return [item.checksums for item in objects]

    def _write_part(self, item: _Object, start: int, buffer: memoryview) -> int:
        stop = min(start + item.upload.part_size, item.plan.size)
        part = buffer[: stop - start]
        out = np.frombuffer(part, np.uint8)
        head = item.plan.header[start:stop]
        out[: len(head)] = np.frombuffer(head, np.uint8)
        wants: list[Want] = []
        outs: list[Units] = []
        finish = []
        for chunk, lo, hi in item.chunks(start, stop):
            source = self._checkpoint.manifest.leaves[item.numbers[chunk.leaf]].stored
            stored = item.leaves[chunk.leaf].dtype
            first = lo * 8 // stored.bits
            end = min(-(-hi * 8 // stored.bits), chunk.box.size)
            units = empty(source.units_shape((end - first,)), source.unit)
            done = 0
            for box in range_boxes(chunk.box.shape, first, end):
                wants.append(Want(item.numbers[chunk.leaf], box.shifted(chunk.box.start)))
                piece = units[done : done + box.size]
                outs.append(piece.reshape(source.units_shape(box.shape)))
                done += box.size
            at = chunk.offset + lo - start
            skip = lo - first * stored.bits // 8
            finish.append((source, stored, units, skip, out[at : at + hi - lo]))
        for _ in self._reader.run(self._reader.plan(wants), outs):
            pass
        for source, stored, units, skip, target in finish:
            target[:] = _bytes(source, stored, units)[skip : skip + target.size]
        for at in range(0, len(part), BLOCK):
            digest = xxhash.xxh3_64_intdigest(part[at : at + BLOCK])
            item.checksums[(start + at) // BLOCK] = digest
        item.upload.write(start, part)
        return len(part)


class _Object:
    """One object on its way."""

    def __init__(
        self,
        backend: Backend,
        plan: ObjectPlan,
        wanted_part: int,
        leaves: Sequence[LeafPlan],
        numbers: Sequence[int],
        turn: AbstractContextManager[object],
    ) -> None:
        self.plan = plan
        self.leaves = leaves
        self.numbers = numbers
        self.checksums = np.zeros(-(-plan.size // BLOCK), np.uint64)
        size = part_size(backend.limits, wanted_part, plan.size)
        self.upload = ObjectUpload(backend, plan.key, plan.size, size, turn)
        self._ends = [chunk.offset + chunk.nbytes for chunk in plan.chunks]

    @property
    def buffer_size(self) -> int:
        """Bytes of the buffer that a task needs."""
        return min(self.upload.part_size, -(-self.plan.size // BLOCK) * BLOCK)

    def chunks(self, start: int, stop: int) -> Iterator[tuple[ChunkPlan, int, int]]:
        """Yield the chunks that have bytes in ``start:stop``, and which of their own bytes."""
        for i in range(bisect.bisect_right(self._ends, start), len(self._ends)):
            chunk = self.plan.chunks[i]
            if chunk.offset >= stop:
                return
            if chunk.nbytes:
                yield chunk, max(start - chunk.offset, 0), min(stop - chunk.offset, chunk.nbytes)


def _bytes(source: StoredDtype, stored: StoredDtype, units: Units) -> npt.NDArray[np.uint8]:
    """Return elements as the bytes that are written."""
    if stored.name != source.name:
        array: npt.NDArray[Any] = source.from_units(units).astype(stored.numpy)
        units = stored.as_units(array)
    if stored.bits < 8:
        return stored.pack(units)
    return np.ascontiguousarray(units).reshape(-1).view(np.uint8)
