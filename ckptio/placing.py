"""Bytes of objects to where they are wanted: out of chunks, cut anywhere, into boxes of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptio import pages
from ckptio.boxes import Box, intersect, range_boxes
from ckptio.dtypes import Units
from ckptio.restore_plan import Piece, StoredChunk

__all__ = ["Fed", "by_chunk", "scatter"]

Fed = Sequence[tuple[StoredChunk, Sequence[Piece]]]
"""Chunks, and the pieces of boxes that each feeds."""


def by_chunk(pieces: Iterable[Piece]) -> Fed:
    """Group pieces: what comes of a chunk is divided but once for all who want it."""
    return [(chunk, [*fed]) for chunk, fed in groupby(pieces, attrgetter("chunk"))]


def scatter(fed: Fed, start: int, data: npt.NDArray[np.uint8], outs: Sequence[Units]) -> None:
    """Copy bytes of an object, from `start` on, to where they are wanted.

    Parameters
    ----------
    outs : sequence of ndarray
        For each wanted box, its units, C-contiguous.
    """
    stop = start + len(data)
    for chunk, pieces in fed:
        if met := [piece for piece in pieces if piece.start < stop and piece.stop > start]:
            lo = max(start, chunk.offset)
            hi = min(stop, chunk.offset + chunk.dtype.stored_nbytes(chunk.box.size))
            _place(chunk, lo - chunk.offset, data[lo - start : hi - start], met, outs)


def _place(
    chunk: StoredChunk,
    lo: int,
    data: npt.NDArray[np.uint8],
    pieces: Iterable[Piece],
    outs: Sequence[Units],
) -> None:
    """Copy bytes of a chunk, from `lo` on, to the boxes that want them."""
    dtype = chunk.dtype
    unit, lanes = dtype.unit, dtype.lanes
    if dtype.bits < 8:
        units, first = dtype.unpack(data), lo * 8 // dtype.bits
    else:
        if lo % unit.itemsize or data.size % unit.itemsize:
            # A unit lies across two pieces, as happens in other programs' files, where offsets are
            # not aligned: each brings some of its bytes.
            lanes = (*lanes, unit.itemsize)
            unit = np.dtype(np.uint8)
        units, first = _typed(data, unit), lo // unit.itemsize
    shape = (*chunk.box.shape, *lanes)
    volume = prod(shape)
    units = units[: volume - first]  # the last byte of packed elements may hold fewer
    parts: list[tuple[Box, Units]] = []
    for piece in pieces:
        out = outs[piece.want]
        if out.dtype != unit:
            out = out.reshape(-1).view(unit).reshape(*out.shape, dtype.unit.itemsize)
        inside = piece.inside.extended(lanes)
        if inside.size == volume == out.size:
            _fill(out.reshape(-1)[first : first + units.size], units)
            continue
        parts = parts or _divided(shape, first, units)
        at = piece.at + (0,) * len(lanes)
        for box, held in parts:
            if (part := intersect(box, inside)) is not None:
                target = out[part.within(inside).shifted(at).slices]
                _fill(target, held[part.within(box).slices])


def _divided(shape: tuple[int, ...], first: int, units: Units) -> list[tuple[Box, Units]]:
    """Divide consecutive units of a C-ordered array, from `first` on, into boxes."""
    done, parts = 0, []
    for box in range_boxes(shape, first, first + units.size):
        parts.append((box, units[done : done + box.size].reshape(box.shape)))
        done += box.size
    return parts


def _fill(target: Units, source: Units) -> None:
    pages.prepare(target)
    target[...] = source


def _typed(data: npt.NDArray[np.uint8], unit: np.dtype[Any]) -> Units:
    if data.ctypes.data % unit.itemsize:
        data = data.copy()  # only another program's file is laid out like this
    return data.view(unit)
