"""Who writes what where: a pure function of the leaves' layouts, the same on every process.

Every box of a leaf is written once. Boxes that one process holds are its own. Boxes that several
hold (replicas) are lined up, leaf by leaf, and each of these processes gets an equal share of their
bytes, in order: all arrive at the same answer without talking. Within a process, chunks are ordered
by the width of their units, so that each is aligned without holes, and gathered into data objects
of a target size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptio import container
from ckptio.arrays import Layout
from ckptio.boxes import Box, split
from ckptio.dtypes import StoredDtype

__all__ = ["ChunkPlan", "LeafPlan", "ObjectPlan", "assign", "plan_objects"]

Holders = tuple[int, ...]

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


def assign(leaves: Sequence[LeafPlan], process: int) -> list[ChunkPlan]:
    """Return the chunks that a process has to write, in the order of the leaves."""
    layouts: dict[int, _Split] = {}
    for leaf in leaves:
        if id(leaf.layout) not in layouts:  # leaves of one shape and sharding share theirs
            layouts[id(leaf.layout)] = _Split.of(leaf.layout, process)
    shared = [[*_shared_pieces(leaf, layouts[id(leaf.layout)])] for leaf in leaves]
    totals: dict[Holders, int] = defaultdict(int)
    for pieces in shared:
        for _, holders, nbytes in pieces:
            totals[holders] += nbytes
    chunks: list[ChunkPlan] = []
    done: dict[Holders, int] = defaultdict(int)
    for number, (leaf, pieces) in enumerate(zip(leaves, shared, strict=True)):
        own = layouts[id(leaf.layout)].own
        chunks += [ChunkPlan(number, box, leaf.dtype.stored_nbytes(box.size)) for box in own]
        for box, holders, nbytes in pieces:
            middle = 2 * done[holders] + nbytes
            done[holders] += nbytes
            if holders[middle * len(holders) // (2 * totals[holders])] == process:
                chunks.append(ChunkPlan(number, box, nbytes))
    return chunks


@dataclass(frozen=True, slots=True)
class _Split:
    """A layout, as one process sees it: what it holds alone, and what it holds with others."""

    own: list[Box]
    shared: list[tuple[Box, Holders]]

    @classmethod
    def of(cls, layout: Layout, process: int) -> _Split:
        boxes = [(box, holders) for box, holders in layout if box.size]
        return cls(
            [box for box, holders in boxes if holders == (process,)],
            [(box, holders) for box, holders in boxes if len(holders) > 1 and process in holders],
        )


def _shared_pieces(leaf: LeafPlan, layout: _Split) -> Iterator[tuple[Box, Holders, int]]:
    """Yield the boxes that several processes hold, large ones cut between them."""
    for box, holders in layout.shared:
        nbytes = leaf.dtype.stored_nbytes(box.size)
        if nbytes <= SPLIT_REPLICAS:
            yield box, holders, nbytes
            continue
        for piece in split(box, len(holders)):
            yield piece, holders, leaf.dtype.stored_nbytes(piece.size)


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
