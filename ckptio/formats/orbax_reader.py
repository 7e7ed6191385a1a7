"""Boxes of leaves read through TensorStore, in pieces of whole chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from ckptio.boxes import Box
from ckptio.dtypes import Units
from ckptio.errors import CkptioError, CorruptionError, UnsupportedFormatError
from ckptio.manifest import Manifest
from ckptio.operation import Operation
from ckptio.options import RestoreOptions
from ckptio.restore_plan import Piece, Read, StoredChunk, Want
from ckptio.transfer import Transfer

__all__ = ["OrbaxReader", "Stored"]

PIECE = 32 << 20
"""Bytes that are read at a time, unless one chunk is larger."""
CONCURRENCY = 8
"""Pieces read at a time; TensorStore reads and decodes a piece's chunks in parallel itself."""


class Stored:
    """One leaf's array: a TensorStore, or what is in memory already."""

    def __init__(self, name: str, array: Any) -> None:
        self.name = name
        self.array = array
        self.in_memory = isinstance(array, np.ndarray)
        self.shape: tuple[int, ...] = tuple(map(int, array.shape))
        self.dtype: np.dtype[Any] = np.dtype(
            array.dtype if self.in_memory else array.dtype.numpy_dtype
        )

    @property
    def chunk(self) -> tuple[int, ...]:
        """Shape of what is read and decoded as a whole."""
        if self.in_memory:
            return self.shape
        return tuple(int(n) or 1 for n in self.array.chunk_layout.read_chunk.shape or ())

    def read(self, box: Box) -> Any:
        """Return a box as an array."""
        found = self.array[box.slices]
        return found if self.in_memory else found.read(order="C").result()


class OrbaxReader:
    """Reads one Orbax checkpoint's leaves; see `ckptio.source.BoxReader`.

    A `Read` is one piece of one leaf: its `object` is the leaf's number, its bytes are counted
    within the wanted box.
    """

    def __init__(
        self,
        uri: str,
        manifest: Manifest,
        stored: Sequence[Stored],
        options: RestoreOptions,
        count: Callable[[int], None],
        failure: Callable[[], Exception | None],
    ) -> None:
        self._uri = uri
        self._manifest = manifest
        self._stored = stored
        self._count = count
        self._failure = failure
        fit = max(1, options.memory // PIECE)
        self._transfer = Transfer(
            Operation(f"reading {uri}", options.deadline),
            concurrency=min(options.concurrency or CONCURRENCY, fit),
            memory=options.memory,
        )

    def plan(self, wants: Sequence[Want]) -> list[Read]:
        """Plan the reads for some boxes."""
        reads = []
        for number, want in enumerate(wants):
            dtype = self._manifest.leaves[want.leaf].stored
            at = 0
            for box in _pieces(want.box, self._stored[want.leaf].chunk, dtype.itemsize):
                inside, stop = box.within(want.box), at + box.size * dtype.itemsize
                piece = Piece(
                    number, StoredChunk(0, want.box, dtype), inside, inside.start, at, stop
                )
                reads.append(Read(want.leaf, at, stop, [piece]))
                at = stop
        return reads

    def run(self, reads: Sequence[Read], outs: Sequence[Units]) -> Iterable[Read]:
        """Carry reads out in parallel; yield each when its box has what it brings."""

        def carry_out(read: Read) -> Read:
            (piece,) = read.pieces
            _, box, dtype = piece.chunk
            units = dtype.as_units(self._read(read.object, piece.inside.shifted(box.start)))
            if dtype.bits < 8:
                units = units & ((1 << dtype.bits) - 1)
            outs[piece.want][piece.inside.extended(dtype.lanes).slices] = units
            self._count(read.stop - read.start)
            return read

        yield from self._transfer.map(carry_out, reads)

    def check_sizes(self, objects: Iterable[int]) -> None:
        """Check nothing: there are no sizes to compare with."""

    def verify(self, objects: Iterable[int]) -> Iterable[int]:
        """Refuse: there are no checksums of ours."""
        raise UnsupportedFormatError(f"{self._uri} has no checksums")

    def _read(self, number: int, box: Box) -> Any:
        try:
            return self._stored[number].read(box)
        except CkptioError:
            raise
        except Exception as error:  # TensorStore raises ValueError, OSError and others
            if (failure := self._failure()) is not None:
                raise failure from error
            path = self._manifest.leaves[number].path
            raise CorruptionError(
                f"{box} of leaf {path!r} of {self._uri} cannot be read: {error}"
            ) from error


def _pieces(box: Box, chunk: Sequence[int], itemsize: int, axis: int = 0) -> Iterator[Box]:
    """Cut a box into pieces of at most `PIECE` bytes, never through a chunk."""
    if not box.size:
        return
    if box.size * itemsize <= PIECE or axis == len(box.shape):
        yield box
        return
    start, length = box.start[axis], box.shape[axis]
    row = prod(box.shape) // length * itemsize
    step = max(1, PIECE // max(row, 1) // chunk[axis]) * chunk[axis]
    at = start
    while at < start + length:
        # Cuts lie where chunks begin, counted from the array's own start.
        stop = min((at // step + 1) * step, start + length)
        piece = Box(
            (*box.start[:axis], at, *box.start[axis + 1 :]),
            (*box.shape[:axis], stop - at, *box.shape[axis + 1 :]),
        )
        yield from _pieces(piece, chunk, itemsize, axis + 1)
        at = stop
