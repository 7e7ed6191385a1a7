"""The chunk table in columns, and block checksums: what a manifest and its parts consist of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ckptio.boxes import Box
from ckptio.columns import Column
from ckptio.columns import decode as decode_column
from ckptio.columns import encode as encode_column

__all__ = ["BLOCK", "ChunkTable", "ObjectEntry", "decode_checksums", "encode_checksums"]

BLOCK = 4 << 20
"""Bytes of one block, the unit of checksums; the last one of an object may be shorter."""

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


class ObjectEntry(msgspec.Struct, frozen=True):
    """One data object: its key, and its size in bytes."""

    key: str
    size: int

    @property
    def blocks(self) -> int:
        """How many blocks have a checksum."""
        return -(-self.size // BLOCK)


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """All chunks in columns, in the order of their leaves.

    Attributes
    ----------
    counts : ndarray of int64, shape (leaves,)
        Chunks of each leaf.
    objects, offsets : ndarray of int64, shape (chunks,)
        Which object holds a chunk, and at which byte.
    starts, shapes : ndarray of int64, shape (sum of the chunks' ranks,)
        The boxes, one after the other.
    """

    counts: Int64s
    objects: Int64s
    offsets: Int64s
    starts: Int64s
    shapes: Int64s
    ranks: Int64s  # of each leaf

    @cached_property
    def first(self) -> Int64s:
        """First chunk of each leaf, and the end; shape (leaves + 1,)."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @cached_property
    def first_axis(self) -> Int64s:
        """Where each leaf's boxes begin in `starts` and `shapes`; shape (leaves + 1,)."""
        return np.concatenate([[0], np.cumsum(self.counts * self.ranks)])

    @cached_property
    def volumes(self) -> Int64s:
        """Elements of each chunk."""
        ranks = np.repeat(self.ranks, self.counts)
        volumes = np.ones(ranks.size, np.int64)
        if self.shapes.size:
            first = (np.cumsum(ranks) - ranks)[ranks > 0]
            volumes[ranks > 0] = np.multiply.reduceat(self.shapes, first)
        return volumes

    def boxes(self, leaf: int) -> tuple[Int64s, Int64s]:
        """Return starts and shapes of a leaf's chunks, each of shape (chunks, rank)."""
        part = slice(self.first_axis[leaf], self.first_axis[leaf + 1])
        rows = int(self.counts[leaf]), int(self.ranks[leaf])
        return self.starts[part].reshape(rows), self.shapes[part].reshape(rows)

    def box(self, leaf: int, i: int) -> Box:
        """Return the box of a leaf's i-th chunk."""
        starts, shapes = self.boxes(leaf)
        return Box(tuple(starts[i].tolist()), tuple(shapes[i].tolist()))

    @property
    def leaf_of(self) -> Int64s:
        """The leaf of each chunk."""
        return np.repeat(np.arange(self.counts.size), self.counts)

    def encode(self) -> dict[str, Column]:
        """Return the table as columns for a JSON document."""
        columns = {
            "counts": self.counts,
            "objects": self.objects,
            "offsets": self.offsets,
            "starts": self.starts,
            "shapes": self.shapes,
        }
        return {name: encode_column(values) for name, values in columns.items()}

    @classmethod
    def decode(cls, columns: Mapping[str, Column], ranks: Int64s) -> ChunkTable:
        """Return the table of some columns, its content unchecked.

        Raises
        ------
        TypeError, ValueError
            If columns are missing, unknown or malformed.
        """
        return cls(**{name: decode_column(c) for name, c in columns.items()}, ranks=ranks)

    @classmethod
    def build(
        cls, ranks: Sequence[int], rows: Sequence[Sequence[tuple[int, int, Box]]]
    ) -> ChunkTable:
        """Make the table of each leaf's chunks, given as (object, offset, box)."""
        flat = [row for leaf_rows in rows for row in leaf_rows]

        def column(values: Any) -> Int64s:
            return np.fromiter(values, np.int64)

        return cls(
            column(len(leaf_rows) for leaf_rows in rows),
            column(row[0] for row in flat),
            column(row[1] for row in flat),
            column(a for row in flat for a in row[2].start),
            column(n for row in flat for n in row[2].shape),
            np.asarray(ranks, np.int64).reshape(-1),
        )

    @classmethod
    def joined(cls, tables: Sequence[ChunkTable], objects: Sequence[int]) -> ChunkTable:
        """Join tables over the same leaves, whose objects are counted one after the other.

        Parameters
        ----------
        objects : sequence of int
            How many objects each table is about.
        """
        first = np.cumsum([0, *objects])[:-1]
        leaf_of = np.concatenate([table.leaf_of for table in tables])
        order = np.argsort(leaf_of, kind="stable")
        ranks = tables[0].ranks
        counts: Int64s = np.sum([table.counts for table in tables], axis=0, dtype=np.int64)
        axes = _segments(ranks[leaf_of], order)
        return cls(
            counts,
            np.concatenate([t.objects + k for t, k in zip(tables, first, strict=True)])[order],
            np.concatenate([table.offsets for table in tables])[order],
            np.concatenate([table.starts for table in tables])[axes],
            np.concatenate([table.shapes for table in tables])[axes],
            ranks,
        )

    def sharing(self, owners: Sequence[int]) -> ChunkTable:
        """Return the table in which each leaf has the chunks of its owner (mostly itself)."""
        own = np.asarray(owners, np.int64)
        if (own == np.arange(own.size)).all():
            return self
        rows = _segments(self.counts, own)
        axes = _segments(np.repeat(self.ranks, self.counts), rows)
        return ChunkTable(
            self.counts[own],
            self.objects[rows],
            self.offsets[rows],
            self.starts[axes],
            self.shapes[axes],
            self.ranks,
        )


def _segments(lengths: Int64s, order: Int64s) -> Int64s:
    """Return the positions of segments of these lengths, put in another order."""
    begin = np.cumsum(lengths) - lengths
    chosen = lengths[order]
    shift = np.repeat(begin[order] - (np.cumsum(chosen) - chosen), chosen)
    positions: Int64s = np.arange(shift.size) + shift
    return positions


def encode_checksums(checksums: Sequence[UInt64s]) -> Column:
    """Encode the checksums of all objects' blocks."""
    return encode_column(np.concatenate([np.empty(0, np.uint64), *checksums]), differences=False)


def decode_checksums(column: Column, objects: Sequence[ObjectEntry]) -> tuple[UInt64s, ...]:
    """Return the checksums of each object's blocks.

    Raises
    ------
    ValueError
        If there is not one for each block.
    """
    checksums = decode_column(column)
    ends = [*accumulate(entry.blocks for entry in objects)]
    if checksums.size != (ends[-1] if ends else 0):
        raise ValueError("there is not one checksum for each block")
    return tuple(np.split(checksums, ends[:-1])) if ends else ()
