"""Who writes what where: a pure function of the leaves' layouts, the same on every process.

Every box of a leaf is written once. Boxes that one process holds are its own; boxes that several
hold (replicas) go to the one with the least to write so far, so that all processes arrive at the
same balance without talking. Within a process, chunks are ordered by the width of their units, so
that each is aligned without holes, and gathered into data objects of a target size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ckptio import container
from ckptio.arrays import Layout
from ckptio.boxes import Box, split
from ckptio.dtypes import StoredDtype

__all__ = ["ChunkPlan", "LeafPlan", "ObjectPlan", "assign", "plan_objects"]

SPLIT_REPLICAS = 64 << 20
"""Replicated boxes of more bytes than this are cut between the processes that hold them."""


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """What the plan needs to know of a leaf."""

    path: str
    dtype: StoredDtype
    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A box of a leaf (by its number) to be stored at `offset` of its object, all in bytes."""

    leaf: int
    box: Box
    nbytes: int
    offset: int = -1


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """One data object: its header, then its chunks; `size` in bytes."""

    key: str
    header: bytes
    chunks: tuple[ChunkPlan, ...]
    size: int


def assign(leaves: Sequence[LeafPlan]) -> dict[int, list[ChunkPlan]]:
    """Give every box of every leaf to one process.

    Returns
    -------
    dict
        For each process that writes anything, its chunks, in the order of the leaves.
    """
    load: dict[int, int] = {}
    chunks: dict[int, list[ChunkPlan]] = {}
    for number, leaf in enumerate(leaves):
        for box, holders in _pieces(leaf):
            if not (size := box.size):
                continue
            process = min(holders, key=lambda p: (load.get(p, 0), p))
            nbytes = leaf.dtype.stored_nbytes(size)
            load[process] = load.get(process, 0) + nbytes
            chunks.setdefault(process, []).append(ChunkPlan(number, box, nbytes))
    return chunks


def _pieces(leaf: LeafPlan) -> Iterator[tuple[Box, tuple[int, ...]]]:
    for box, holders in leaf.layout:
        if len(holders) > 1 and leaf.dtype.stored_nbytes(box.size) > SPLIT_REPLICAS:
            for piece in split(box, len(holders)):
                yield piece, holders
        else:
            yield box, holders


def plan_objects(
    leaves: Sequence[LeafPlan],
    chunks: Sequence[ChunkPlan],
    *,
    prefix: str,
    object_size: int,
    metadata: Mapping[str, str],
) -> list[ObjectPlan]:
    """Lay one process's chunks out in data objects.

    Parameters
    ----------
    prefix : str
        Of the objects' keys, such as ``data/<attempt>/p00000``.
    object_size : int
        Bytes at which an object is closed; one chunk alone may be larger.
    metadata : mapping
        For the objects' headers.
    """
    # Sorting is stable: leaves of one width stay in their order.
    ordered = sorted(chunks, key=lambda chunk: -leaves[chunk.leaf].dtype.unit.itemsize)
    groups: list[list[ChunkPlan]] = []
    filled = object_size
    for chunk in ordered:
        if filled + chunk.nbytes > object_size:
            groups.append([])
            filled = 0
        groups[-1].append(chunk)
        filled += chunk.nbytes
    return [
        _object(f"{prefix}-{i:03d}.safetensors", leaves, group, metadata)
        for i, group in enumerate(groups)
    ]


def _object(
    key: str,
    leaves: Sequence[LeafPlan],
    chunks: Sequence[ChunkPlan],
    metadata: Mapping[str, str],
) -> ObjectPlan:
    names: set[str] = {"__metadata__"}
    tensors = []
    for chunk in chunks:
        leaf = leaves[chunk.leaf]
        name = _name(leaf, chunk.box, names)
        names.add(name)
        shape = leaf.dtype.header_shape(chunk.box.shape)
        tensors.append((name, leaf.dtype.safetensors, shape, chunk.nbytes))
    header, offsets = container.header(tensors, dict(metadata))
    placed = tuple(
        ChunkPlan(chunk.leaf, chunk.box, chunk.nbytes, offset)
        for chunk, offset in zip(chunks, offsets, strict=True)
    )
    return ObjectPlan(key, header, placed, placed[-1].offset + placed[-1].nbytes)


def _name(leaf: LeafPlan, box: Box, taken: set[str]) -> str:
    """Name a chunk for other readers; a leaf may itself be called like another one's chunk."""
    name = leaf.path if box.shape == leaf.shape else f"{leaf.path}{box}"
    while name in taken:
        name += "'"
    return name


def chunks_by_leaf(objects: Sequence[ObjectPlan], leaves: int) -> list[list[tuple[int, int, Box]]]:
    """Return each leaf's chunks as (object, offset, box), in the order of their boxes."""
    rows = [
        (chunk.leaf, number, chunk.offset, chunk.box)
        for number, plan in enumerate(objects)
        for chunk in plan.chunks
    ]
    rows.sort(key=lambda row: (row[0], row[3]))
    table: list[list[tuple[int, int, Box]]] = [[] for _ in range(leaves)]
    for leaf, group in groupby(rows, key=lambda row: row[0]):
        table[leaf] = [(number, offset, box) for _, number, offset, box in group]
    return table
