"""Geometry: boxes, their intersections, and where a box lies in a C-ordered run of elements.

Everything here counts elements, never bytes, and does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Box", "intersect", "merge", "range_boxes", "spans", "split"]


class Box(NamedTuple):
    """An axis-aligned region of an array: where it starts, and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers an array of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as a NumPy index."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def within(self, outer: Box) -> Box:
        """Return the same region, counted from where `outer` starts."""
        start = tuple(a - b for a, b in zip(self.start, outer.start, strict=True))
        return Box(start, self.shape)

    def shifted(self, by: tuple[int, ...]) -> Box:
        """Return the box moved along each axis; the opposite of `within`."""
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.shape)

    def extended(self, lengths: tuple[int, ...]) -> Box:
        """Return the box with whole axes of these lengths after its own."""
        return Box(self.start + (0,) * len(lengths), self.shape + lengths) if lengths else self

    def __str__(self) -> str:
        return f"[{','.join(f'{s.start}:{s.stop}' for s in self.slices)}]"


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common region of two boxes, or None if it holds no element.

    Examples
    --------
    >>> str(intersect(Box((0, 0), (4, 4)), Box((2, 3), (4, 4))))
    '[2:4,3:4]'
    """
    start, shape = [], []
    for i, m, j, n in zip(a.start, a.shape, b.start, b.shape, strict=True):
        first = max(i, j)
        length = min(i + m, j + n) - first
        if length <= 0:  # most pairs that are asked about end here
            return None
        start.append(first)
        shape.append(length)
    return Box(tuple(start), tuple(shape))


def split(box: Box, count: int) -> list[Box]:
    """Cut a box along its longest axis into at most `count` boxes of nearly equal size.

    Examples
    --------
    >>> [str(b) for b in split(Box((10,), (5,)), 2)]
    ['[10:12]', '[12:15]']
    """
    if not box.shape or count <= 1:
        return [box]
    axis = max(range(len(box.shape)), key=box.shape.__getitem__)
    length = box.shape[axis]
    count = min(count, length)
    if count <= 1:
        return [box]
    cuts = [length * i // count for i in range(count + 1)]
    head, tail = slice(None, axis), slice(axis + 1, None)
    return [
        Box(
            (*box.start[head], box.start[axis] + a, *box.start[tail]),
            (*box.shape[head], b - a, *box.shape[tail]),
        )
        for a, b in pairwise(cuts)
    ]


def merge(boxes: Iterable[Box]) -> list[Box]:
    """Join disjoint boxes that lie side by side into larger ones, in order of their start.

    Examples
    --------
    >>> [str(b) for b in merge([Box((0, 0), (2, 3)), Box((0, 3), (2, 1)), Box((2, 0), (1, 4))])]
    ['[0:3,0:4]']
    """
    joined = sorted(boxes)
    for axis in reversed(range(len(joined[0].start) if joined else 0)):
        # Boxes that agree in everything but this axis, one after the other along it.
        joined.sort(key=lambda box: (_without(box, axis), box.start[axis]))
        row: list[Box] = []
        for box in joined:
            last = row[-1] if row else None
            if (
                last is not None
                and _without(last, axis) == _without(box, axis)
                and last.start[axis] + last.shape[axis] == box.start[axis]
            ):
                length = last.shape[axis] + box.shape[axis]
                shape = (*last.shape[:axis], length, *last.shape[axis + 1 :])
                row[-1] = Box(last.start, shape)
            else:
                row.append(box)
        joined = row
    return sorted(joined)


def _without(box: Box, axis: int) -> tuple[int, ...]:
    start, shape = box
    return (*start[:axis], *start[axis + 1 :], *shape[:axis], *shape[axis + 1 :])


def range_boxes(shape: Sequence[int], lo: int, hi: int) -> Iterator[Box]:
    """Cut the elements ``lo:hi`` of a C-ordered array into boxes, in their order.

    A range begins inside a row, goes on over whole rows, and ends inside a row; at each axis that
    gives at most two more boxes, so at most ``2 * ndim - 1`` in all.

    Examples
    --------
    >>> [str(b) for b in range_boxes((3, 4), 2, 9)]
    ['[0:1,2:4]', '[1:2,0:4]', '[2:3,0:1]']
    """
    if lo >= hi:
        return
    if not shape:
        yield Box((), ())
        return
    inner_shape = tuple(shape[1:])
    inner = prod(inner_shape)
    first, skipped = divmod(lo, inner)
    last, rest = divmod(hi, inner)

    def inside(row: int, a: int, b: int) -> Iterator[Box]:
        for box in range_boxes(inner_shape, a, b):
            yield Box((row, *box.start), (1, *box.shape))

    if first == last:
        yield from inside(first, skipped, rest)
        return
    if skipped:
        yield from inside(first, skipped, inner)
        first += 1
    if first < last:
        yield Box((first, *(0,) * len(inner_shape)), (last - first, *inner_shape))
    if rest:
        yield from inside(last, 0, rest)


def spans(shape: Sequence[int], box: Box, gap: int) -> npt.NDArray[np.int64]:
    """Find which elements of a C-ordered array to read for a box, as few ranges as are worth it.

    Parameters
    ----------
    shape : sequence of int
        Of the array.
    box : Box
        Not empty, inside the array.
    gap : int
        Two runs with at most this many unwanted elements between them become one range.

    Returns
    -------
    ndarray, shape (n, 2)
        First element and end of each range, ascending, disjoint. They cover the box.

    Examples
    --------
    >>> spans((3, 10), Box((0, 2), (3, 4)), gap=0).tolist()
    [[2, 6], [12, 16], [22, 26]]
    >>> spans((3, 10), Box((0, 2), (3, 4)), gap=6).tolist()
    [[2, 26]]
    """
    first, length, stride = 0, 1, 1
    repeats: list[tuple[int, int]] = []
    # From the innermost axis outwards: rows that are close enough join into one longer run; from
    # the first axis where they are not, each index along an outer axis repeats what is there.
    axes = zip(reversed(shape), reversed(box.start), reversed(box.shape), strict=True)
    for extent, start, n in axes:
        first += start * stride
        if n > 1 and not repeats and stride - length <= gap:
            length += (n - 1) * stride
        elif n > 1:
            repeats.append((n, stride))
        stride *= extent
    starts = np.array([first], np.int64)
    for n, stride in repeats:
        starts = (np.arange(n, dtype=np.int64)[:, None] * stride + starts).ravel()
    return np.stack([starts, starts + length], axis=1)
