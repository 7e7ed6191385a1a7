"""Plans are exact: every element is written once, by one process, and read once."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import boxed, shapes

from ckptio import dtypes, open_backend
from ckptio.attempt import _chunk_table
from ckptio.boxes import Box
from ckptio.manifest import BLOCK, ChunkTable, LeafEntry, Manifest, ObjectEntry
from ckptio.options import RestoreOptions
from ckptio.reader import Reader
from ckptio.restore_plan import Want, plan_reads
from ckptio.save_plan import LeafPlan, assign, plan_objects


def grid(shape, cuts):
    """Cut a shape into a grid of nearly equal boxes, as a mesh would."""
    boxes = [Box((), ())]
    for n, count in zip(shape, cuts, strict=True):
        edges = [n * i // count for i in range(count + 1)]
        boxes = [
            Box((*box.start, a), (*box.shape, b - a))
            for box in boxes
            for a, b in itertools.pairwise(edges)
        ]
    return [box for box in boxes if box.size]


@st.composite
def leaf_plans(draw):
    """Leaves whose boxes are held by one or more of four processes."""
    plans = []
    for i in range(draw(st.integers(0, 5))):
        shape = draw(shapes)
        cuts = [draw(st.integers(1, n)) for n in shape]
        holders = st.sets(st.integers(0, 3), min_size=1).map(lambda s: tuple(sorted(s)))
        layout = tuple((box, draw(holders)) for box in grid(shape, cuts))
        name = draw(st.sampled_from(["float32", "int8", "complex128", "int4", "U3", "bfloat16"]))
        plans.append(LeafPlan(f"leaf{i}", dtypes.parse(name), shape, layout))
    return plans


@given(leaf_plans(), st.integers(1, 200))
def test_every_element_is_written_once_without_holes_and_aligned(plans, object_size):
    own = [
        plan_objects(plans, assign(plans, p), prefix=f"p{p}", object_size=object_size, metadata={})
        for p in range(4)
    ]
    objects = [plan for found in own for plan in found]
    for plan in objects:
        end = len(plan.header)
        assert end % 4096 == 0
        for chunk in plan.chunks:
            assert chunk.offset == end
            assert chunk.offset % plans[chunk.leaf].dtype.unit.itemsize == 0
            end += chunk.nbytes
        assert end == plan.size
        assert len(plan.chunks) == 1 or plan.size - len(plan.header) <= object_size
        table = json.loads(plan.header[8:])
        assert len(table) == len(plan.chunks) + 1, "every chunk has a name of its own"
    table = ChunkTable.joined([_chunk_table(plans, found) for found in own], [*map(len, own)])
    for number, plan in enumerate(plans):
        seen = np.zeros(plan.shape, int)
        first = table.first[number]
        for i in range(table.counts[number]):
            box = table.box(number, i)
            seen[box.slices] += 1
            chunk = next(
                c
                for c in objects[table.objects[first + i]].chunks
                if c.offset == table.offsets[first + i]
            )
            assert (chunk.leaf, chunk.box) == (number, box)
        assert (seen == 1).all()
    tied = table.sharing([*range(len(plans) - 1), 0]) if plans else table
    assert tied.counts.tolist()[:-1] == table.counts.tolist()[:-1]
    if plans and len(plans[0].shape) == len(plans[-1].shape):
        assert tied.boxes(len(plans) - 1)[0].tolist() == table.boxes(0)[0].tolist()


def test_replicas_are_balanced_over_the_processes_that_hold_them():
    f4 = dtypes.parse("float32")
    layout = ((Box.whole((1000,)), (0, 1, 2, 3)),)
    leaves = [LeafPlan(str(i), f4, (1000,), layout) for i in range(40)]
    assert [len(assign(leaves, process)) for process in range(5)] == [10, 10, 10, 10, 0]
    giant = (1 << 26, 4)
    leaves = [LeafPlan("w", f4, giant, ((Box.whole(giant), (0, 1, 2, 3)),))]
    shares = [sum(chunk.nbytes for chunk in assign(leaves, process)) for process in range(4)]
    assert shares == [prod(giant)] * 4


def test_a_leaf_named_like_a_chunk_of_another_gets_another_name():
    f4 = dtypes.parse("float32")
    plans = [
        LeafPlan("w", f4, (4,), tuple((box, (0,)) for box in grid((4,), (2,)))),
        LeafPlan("w[0:2]", f4, (2,), ((Box.whole((2,)), (0,)),)),
        LeafPlan("__metadata__", f4, (2,), ((Box.whole((2,)), (0,)),)),
    ]
    (plan,) = plan_objects(plans, assign(plans, 0), prefix="p", object_size=1000, metadata={})
    names = [*json.loads(plan.header[8:])]
    assert names == ["__metadata__", "w[0:2]", "w[2:4]", "w[0:2]'", "__metadata__'"]


def stored_leaf(shape, cuts, name, base=4096):
    """A manifest of one leaf of counted elements, and its object."""
    dtype = dtypes.parse(name)
    size = prod(shape)
    values = (np.arange(size) % (4 if dtype.bits < 8 else 251)).reshape(shape)
    array = values.astype(dtype.numpy)
    rows, data = [], bytearray(b"h" * base)
    for box in grid(shape, cuts):
        units = dtype.as_units(np.ascontiguousarray(array[(*box.slices, ...)]))
        rows.append((0, len(data), box))
        data += (dtype.pack(units) if dtype.bits < 8 else units).tobytes()
    manifest = Manifest(
        attempt="0" * 16,
        created=datetime.now(UTC),
        metadata={},
        structure=0,
        leaves=(LeafEntry("x", "numpy", name, shape),),
        objects=(ObjectEntry("x", len(data)),),
        chunks=ChunkTable.build([len(shape)], [rows]),
        checksums=(np.zeros(-(-len(data) // BLOCK), np.uint64),),
    )
    return array, manifest, bytes(data)


@given(st.data())
def test_any_box_of_any_chunking_is_read_right(data):
    shape, box = data.draw(boxed())
    cuts = tuple(data.draw(st.integers(1, n)) for n in shape)
    name = data.draw(st.sampled_from(["float32", "int4", "uint2", "complex128", "int8", "S5"]))
    array, manifest, content = stored_leaf(shape, cuts, name)
    dtype = dtypes.parse(name)
    with open_backend("memory://plans/any") as backend:
        backend.put("x", content)
        reader = Reader(backend, manifest, RestoreOptions(), verify=False)
        out = np.zeros(dtype.units_shape(box.shape), dtype.unit)
        gap = data.draw(st.integers(0, 64))
        reads = plan_reads(manifest, [Want(0, box)], align=1, gap=gap, size=16)
        for _ in reader.run(reads, [out]):
            pass
    assert dtype.from_units(out).tobytes() == array[(*box.slices, ...)].tobytes()
    ranges = sorted((read.start, read.stop) for read in reads)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), "no byte twice"
    assert all(stop - start <= 16 for start, stop in ranges)


def test_boxes_that_want_the_same_bytes_share_the_read():
    _, manifest, content = stored_leaf((64, 64), (1, 1), "float32")
    whole = Box.whole((64, 64))
    reads = plan_reads(manifest, [Want(0, whole)] * 8, align=BLOCK, gap=0, size=BLOCK)
    assert [(r.start, r.stop, len(r.pieces)) for r in reads] == [(0, len(content), 8)]


def test_aligned_reads_are_whole_blocks():
    _, manifest, content = stored_leaf((3 * BLOCK,), (1,), "int8")
    box = Box((BLOCK,), (10,))
    (read,) = plan_reads(manifest, [Want(0, box)], align=BLOCK, gap=0, size=4 * BLOCK)
    assert (read.start, read.stop) == (BLOCK, 2 * BLOCK)
    (read,) = plan_reads(manifest, [Want(0, box)], align=1, gap=0, size=4 * BLOCK)
    assert read.stop - read.start == 10
    assert len(content) == 3 * BLOCK + 4096


@pytest.mark.parametrize(("gap", "reads"), [(0, 50), (199, 50), (200, 1), (10_000, 1)])
def test_ranges_are_joined_across_gaps_that_are_cheap(gap, reads):
    _, manifest, _ = stored_leaf((50, 300), (1, 1), "int8")
    column = Box((0, 100), (50, 100))
    assert len(plan_reads(manifest, [Want(0, column)], align=1, gap=gap, size=1 << 20)) == reads
