"""What to read from where: a pure function of the manifest and the wanted boxes.

A wanted box meets some chunks of its leaf; in each, the part it wants is one or more ranges of
bytes. Ranges are rounded out to whole blocks (so that every byte read can be verified), joined
across gaps that are cheaper to read than to skip, and cut into reads of a bounded size. Every
read knows the pieces that it feeds, so one read serves all boxes that want its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckptio.boxes import Box, intersect, spans
from ckptio.dtypes import StoredDtype
from ckptio.errors import ManifestError
from ckptio.manifest import ChunkTable, Manifest

__all__ = ["Piece", "Read", "Want", "plan_reads"]


class Want(NamedTuple):
    """A box of a leaf (by its number)."""

    leaf: int
    box: Box


class StoredChunk(NamedTuple):
    """A chunk where a read finds it: the byte of its object at which it begins, and its box."""

    offset: int
    box: Box
    dtype: StoredDtype


class Piece(NamedTuple):
    """What one wanted box takes from one chunk.

    Attributes
    ----------
    want : int
        Number of the wanted box.
    chunk : StoredChunk
        The chunk.
    inside : Box
        What both have in common, counted from where the chunk starts.
    at : tuple of int
        Where that lies in the wanted box.
    start, stop : int
        The object's bytes that hold it, and others between.
    """

    want: int
    chunk: StoredChunk
    inside: Box
    at: tuple[int, ...]
    start: int
    stop: int


@dataclass(slots=True)
class Read:
    """Bytes ``start:stop`` of an object (by its number), and the pieces that they feed."""

    object: int
    start: int
    stop: int
    pieces: list[Piece] = field(default_factory=list)


def plan_reads(
    manifest: Manifest, wants: Sequence[Want], *, align: int, gap: int, size: int
) -> list[Read]:
    """Plan how to read some boxes, each byte once.

    Parameters
    ----------
    align : int
        Reads begin and end at multiples of this many bytes (or at an object's end).
    gap : int
        Wanted ranges with at most this many bytes between them are read as one.
    size : int
        Bytes of one read at the most, a multiple of `align`.

    Raises
    ------
    ManifestError
        If the manifest has no chunk for some element of a wanted box.
    """
    pieces: list[Piece] = []
    ranges: list[tuple[int, int, int, int]] = []
    for number, want in enumerate(wants):
        leaf = manifest.leaves[want.leaf]
        dtype, covered = leaf.stored, 0
        for box, obj, offset, common in _meeting(manifest.chunks, want, leaf.shape):
            covered += common.size
            chunk = StoredChunk(offset, box, dtype)
            inside, at = common.within(box), common.within(want.box).start
            found = _byte_ranges(chunk, inside, max(gap, align))
            ranges += [(obj, lo, hi, len(pieces)) for lo, hi in found]
            pieces.append(Piece(number, chunk, inside, at, found[0][0], found[-1][1]))
        if covered != want.box.size:
            raise ManifestError(f"leaf {leaf.path!r} has no data for all of {want.box}")
    ranges.sort()
    reads: list[Read] = []
    extent: list[tuple[int, int, int]] = []
    for obj, lo, hi, _ in ranges:
        lo, hi = lo // align * align, -(-hi // align) * align
        if extent and extent[-1][0] == obj and lo <= extent[-1][2] + gap:
            extent[-1] = (obj, extent[-1][1], max(hi, extent[-1][2]))
        else:
            extent.append((obj, lo, hi))
    for obj, lo, hi in extent:
        hi = min(hi, manifest.objects[obj].size)
        reads += [Read(obj, at, min(at + size, hi)) for at in range(lo, hi, size)]
    _feed(reads, ranges, pieces)
    # Leaf by leaf, so that arrays are finished, and handed on, one after the other.
    return sorted(
        (read for read in reads if read.pieces),
        key=lambda read: (read.pieces[0].want, read.object, read.start),
    )


def _meeting(
    table: ChunkTable, want: Want, shape: tuple[int, ...]
) -> list[tuple[Box, int, int, Box]]:
    """Return the chunks that a wanted box meets, as (chunk, object, offset, common box)."""
    first, end = table.first[want.leaf], table.first[want.leaf + 1]
    if end - first == 1 and want.box.size:
        # A leaf's chunks make it up: this one is all of it.
        at = int(table.objects[first]), int(table.offsets[first])
        return [(Box.whole(shape), *at, want.box)]
    starts, shapes = table.boxes(want.leaf)
    rows = np.arange(end - first)
    if rows.size > 8:
        low = np.asarray(want.box.start, np.int64)
        high = low + np.asarray(want.box.shape, np.int64)
        rows = rows[((starts < high) & (starts + shapes > low)).all(axis=1)]
    found = []
    for row in rows.tolist():
        chunk = Box(tuple(starts[row].tolist()), tuple(shapes[row].tolist()))
        if (common := intersect(chunk, want.box)) is not None:
            at = first + row
            found.append((chunk, int(table.objects[at]), int(table.offsets[at]), common))
    return found


def _byte_ranges(chunk: StoredChunk, inside: Box, gap: int) -> list[tuple[int, int]]:
    """Return the bytes of an object that hold a part of a chunk, ascending."""
    offset, box, dtype = chunk
    if inside.shape == box.shape:
        return [(offset, offset + dtype.stored_nbytes(box.size))]
    bits = dtype.bits
    found = spans(box.shape, inside, gap * 8 // bits).tolist()
    return [(offset + lo * bits // 8, offset + -(-hi * bits // 8)) for lo, hi in found]


def _feed(
    reads: list[Read], ranges: Sequence[tuple[int, int, int, int]], pieces: Sequence[Piece]
) -> None:
    """Tell every read its pieces; both are in the order of objects and bytes."""
    fed: list[dict[int, None]] = [{} for _ in reads]  # several ranges may be of one piece
    at = 0
    for obj, lo, hi, number in ranges:
        while (reads[at].object, reads[at].stop) <= (obj, lo):
            at += 1
        for i in range(at, len(reads)):
            if reads[i].object != obj or reads[i].start >= hi:
                break
            fed[i][number] = None
    for read, numbers in zip(reads, fed, strict=True):
        read.pieces = [pieces[number] for number in numbers]
