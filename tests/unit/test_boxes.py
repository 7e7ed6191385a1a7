"""Geometry agrees with NumPy's own indexing, for any shape."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import boxed, shapes

from ckptio.boxes import Box, intersect, merge, range_boxes, spans, split


def cells(shape, box):
    """The flat positions of a box's elements."""
    return np.arange(prod(shape)).reshape(shape)[box.slices].ravel()


@given(st.data())
def test_an_intersection_holds_the_common_elements(data):
    shape, a = data.draw(boxed(empty=True))
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    b = Box(start, tuple(n - i for n, i in zip(shape, start, strict=True)))
    common = intersect(a, b)
    expected = np.intersect1d(cells(shape, a), cells(shape, b))
    assert np.array_equal(cells(shape, common) if common else [], expected)


@given(boxed(), st.integers(1, 9))
def test_a_split_is_a_partition_into_balanced_boxes(shaped, count):
    shape, box = shaped
    pieces = split(box, count)
    found = np.concatenate([cells(shape, piece) for piece in pieces])
    assert np.array_equal(np.sort(found), np.sort(cells(shape, box)))
    assert len(pieces) <= count
    for piece in pieces:
        differences = [abs(a - b) for a, b in zip(piece.shape, pieces[0].shape, strict=True)]
        assert max(differences, default=0) <= 1
    assert len(pieces) == min(count, max(box.shape, default=1))


@given(boxed(), st.data())
def test_merging_joins_a_grid_again_and_never_changes_what_is_covered(shaped, data):
    shape, box = shaped
    grid = [box]
    for axis, n in enumerate(box.shape):
        count = data.draw(st.integers(1, n))
        edges = [n * i // count for i in range(count + 1)]
        grid = [
            Box(
                (*b.start[:axis], b.start[axis] + lo, *b.start[axis + 1 :]),
                (*b.shape[:axis], hi - lo, *b.shape[axis + 1 :]),
            )
            for b in grid
            for lo, hi in pairwise(edges)
        ]
    assert merge(data.draw(st.permutations(grid))) == [box]
    some = data.draw(st.lists(st.sampled_from(grid), unique=True))
    merged = merge(some)
    covered = [cells(shape, b) for b in merged]
    wanted = [cells(shape, b) for b in some]
    assert sorted(np.concatenate([[], *covered])) == sorted(np.concatenate([[], *wanted]))
    assert len(merged) <= len(some)


@given(shapes, st.data())
def test_a_range_of_elements_is_cut_into_few_boxes_in_order(shape, data):
    size = prod(shape)
    lo = data.draw(st.integers(0, size))
    hi = data.draw(st.integers(lo, size))
    boxes = [*range_boxes(shape, lo, hi)]
    found = np.concatenate([np.empty(0, int), *(cells(shape, box) for box in boxes)])
    assert np.array_equal(found, np.arange(lo, hi))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(boxed(), st.integers(0, 40))
def test_spans_cover_the_box_and_skip_what_is_far(shaped, gap):
    shape, box = shaped
    found = spans(shape, box, gap)
    wanted = cells(shape, box)
    covered = np.concatenate([np.arange(a, b) for a, b in found.tolist()])
    assert np.all(np.isin(wanted, covered))
    assert np.all(np.isin(found[:, 0], wanted)), "a span begins at a wanted element"
    assert np.all(np.isin(found[:, 1] - 1, wanted)), "and ends with one"
    assert np.all(found[1:, 0] >= found[:-1, 1]), "ascending and disjoint"
    # No unwanted run inside a span is longer than the gap.
    holes = np.diff(np.sort(wanted)) - 1
    inside = [
        h
        for h, a, b in zip(holes, np.sort(wanted), np.sort(wanted)[1:], strict=False)
        if any(s <= a and b < e for s, e in found.tolist())
    ]
    assert all(h <= gap for h in inside)


def test_a_box_prints_like_a_numpy_index():
    assert str(Box((0, 4), (2, 3))) == "[0:2,4:7]"
    assert str(Box((), ())) == "[]"
