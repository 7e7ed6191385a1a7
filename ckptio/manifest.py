"""What a checkpoint is: the leaf table, the chunk table, the objects and their checksums.

``manifest.json`` is one JSON object whose last field is the XXH3-64 of all bytes before it:

    {"format":"ckptio/1.0","attempt":…,…,"leaves":[…],…,"checksum":"0123456789abcdef"}

`decode` checks everything before anything of it is used, so that the rest of the library may
trust a `Manifest`: no offset past an object's end, no box outside its leaf, no key outside the
checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ckptio import dtypes, tree
from ckptio.arrays import ShardingInfo
from ckptio.backend import check_key
from ckptio.boxes import Box
from ckptio.columns import Column
from ckptio.columns import decode as decode_column
from ckptio.columns import encode as encode_column
from ckptio.dtypes import StoredDtype
from ckptio.errors import InvalidKeyError, ManifestError, UnsupportedFormatError
from ckptio.values import ARRAY_KINDS, HOST_KINDS

__all__ = ["BLOCK", "MANIFEST", "ChunkTable", "LeafEntry", "Manifest", "ObjectEntry", "decode"]

MANIFEST = "manifest.json"
FORMAT = (1, 0)
BLOCK = 4 << 20
"""Bytes of one block, the unit of checksums; the last one of an object may be shorter."""

_KINDS = frozenset([*ARRAY_KINDS, *HOST_KINDS, "key"])
_SEAL = re.compile(rb',"checksum":"([0-9a-f]{16})"\}\n?\Z')
_FORMAT = re.compile(rb'\A\{"format":"ckptio/(\d{1,6})\.(\d{1,6})"')
_MAX_DIMENSION = 1 << 48

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


class LeafEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row of the leaf table.

    Attributes
    ----------
    path : str
        Key path, such as ``params/layers/0/kernel``.
    kind : str
        What the leaf was: ``jax``, ``numpy``, ``numpy_scalar``, ``key`` (typed PRNG keys), or a
        Python type.
    dtype : str
        Name of its `StoredDtype`.
    shape : tuple of int
        Of the stored array (for keys, of their data).
    sharding : ShardingInfo, optional
        As saved, for information.
    implementation : str, optional
        The generator of PRNG keys.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    sharding: ShardingInfo | None = None
    implementation: str | None = None

    @property
    def stored(self) -> StoredDtype:
        """How its elements are stored."""
        return dtypes.parse(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the leaf in memory."""
        return prod(self.shape) * self.stored.itemsize


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


class _Document(msgspec.Struct, omit_defaults=True):
    """The manifest's JSON, field by field."""

    format: str
    attempt: str
    created: str
    metadata: dict[str, Any]
    tree: Any
    leaves: list[LeafEntry]
    objects: list[ObjectEntry]
    chunks: dict[str, Column]
    blocks: Column
    checksum: str = ""


@dataclass(frozen=True, eq=False)
class Manifest:
    """One checkpoint.

    Attributes
    ----------
    attempt : str
        The attempt that wrote it.
    created : datetime
        In UTC.
    metadata : mapping
        The user's own.
    structure
        The pytree, see `ckptio.tree`.
    leaves, objects, chunks
        The tables.
    checksums : tuple of ndarray of uint64
        For each object, the XXH3-64 of each of its blocks.
    """

    attempt: str
    created: datetime
    metadata: Mapping[str, Any]
    structure: tree.Structure
    leaves: tuple[LeafEntry, ...]
    objects: tuple[ObjectEntry, ...]
    chunks: ChunkTable
    checksums: tuple[UInt64s, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves in memory."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def encode(self) -> bytes:
        """Return the bytes of ``manifest.json``."""
        table = self.chunks
        chunks = {
            "counts": table.counts,
            "objects": table.objects,
            "offsets": table.offsets,
            "starts": table.starts,
            "shapes": table.shapes,
        }
        document = _Document(
            format=f"ckptio/{FORMAT[0]}.{FORMAT[1]}",
            attempt=self.attempt,
            created=self.created.astimezone(UTC).isoformat(),
            metadata=dict(self.metadata),
            tree=self.structure,
            leaves=list(self.leaves),
            objects=list(self.objects),
            chunks={name: encode_column(values) for name, values in chunks.items()},
            blocks=encode_column(
                np.concatenate([np.empty(0, np.uint64), *self.checksums]), differences=False
            ),
        )
        body = msgspec.json.encode(document)[:-1]
        return body + b',"checksum":"%016x"}\n' % xxhash.xxh3_64_intdigest(body)


def decode(data: bytes, where: str) -> Manifest:
    """Read a manifest, trusting nothing of it.

    Parameters
    ----------
    data : bytes
        Of ``manifest.json``.
    where : str
        Its URI, for messages.

    Raises
    ------
    ManifestError
        If its checksum does not match, or it says what cannot be.
    UnsupportedFormatError
        If its format is of a newer major version.
    """
    seal = _SEAL.search(data)
    version = _FORMAT.match(data)
    sound = seal and xxhash.xxh3_64_intdigest(data[: seal.start()]) == int(seal[1], 16)
    # A newer format may be sealed in another way: its version is looked at before its seal.
    if version and int(version[1]) > FORMAT[0] and (sound or not seal):
        raise UnsupportedFormatError(
            f"{where} has format {version[1].decode()}.{version[2].decode()}; this ckptio reads "
            f"formats up to {FORMAT[0]}.x: upgrade it"
        )
    if not sound:
        raise ManifestError(f"{where} is damaged: its checksum does not match its content")
    try:
        document = msgspec.json.decode(data, type=_Document)
        return _checked(document)
    except (
        msgspec.MsgspecError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
        InvalidKeyError,
    ) as error:
        raise ManifestError(f"{where} is not a valid manifest: {error}") from error


def _checked(document: _Document) -> Manifest:
    leaves, objects = tuple(document.leaves), tuple(document.objects)
    for leaf in leaves:
        _check_leaf(leaf)
    if len({leaf.path for leaf in leaves}) != len(leaves):
        raise ValueError("two leaves have the same path")
    if sorted(tree.leaf_numbers(document.tree)) != list(range(len(leaves))):
        raise ValueError("the tree does not hold each leaf once")
    for entry in objects:
        check_key(entry.key)
        if entry.size < 0:
            raise ValueError(f"object {entry.key!r} has size {entry.size}")
    checksums = decode_column(document.blocks)
    ends = np.cumsum([entry.blocks for entry in objects], dtype=object)
    if checksums.size != (ends[-1] if len(objects) else 0):
        raise ValueError("there is not one checksum for each block")
    ranks = np.asarray([len(leaf.shape) for leaf in leaves], np.int64)
    columns = {name: decode_column(column) for name, column in document.chunks.items()}
    table = ChunkTable(**columns, ranks=ranks)
    _check_chunks(leaves, objects, table)
    return Manifest(
        attempt=document.attempt,
        created=datetime.fromisoformat(document.created),
        metadata=document.metadata,
        structure=document.tree,
        leaves=leaves,
        objects=objects,
        chunks=table,
        checksums=tuple(np.split(checksums, ends[:-1].astype(np.int64))) if objects else (),
    )


def _check_leaf(leaf: LeafEntry) -> None:
    if leaf.kind not in _KINDS:
        raise ValueError(f"leaf {leaf.path!r} is of unknown kind {leaf.kind!r}")
    if leaf.kind == "key" and not leaf.implementation:
        raise ValueError(f"the PRNG keys {leaf.path!r} name no implementation")
    if not all(0 <= n <= _MAX_DIMENSION for n in leaf.shape) or leaf.nbytes > _MAX_DIMENSION:
        raise ValueError(f"leaf {leaf.path!r} has shape {list(leaf.shape)}")


def _check_chunks(
    leaves: Sequence[LeafEntry], objects: Sequence[ObjectEntry], table: ChunkTable
) -> None:
    counts, ranks = table.counts, table.ranks
    if counts.size != len(leaves) or (counts < 0).any() or (counts > table.objects.size).any():
        raise ValueError("the chunk table does not fit the leaf table")
    total, axes = int(counts.sum()), int((counts * ranks).sum())
    lengths = [c.size for c in (table.objects, table.offsets, table.starts, table.shapes)]
    if lengths != [total, total, axes, axes]:
        raise ValueError(f"the chunk table has columns of lengths {lengths}")

    # For each entry of the columns of boxes: its leaf, and that leaf's length along its axis.
    owner = np.repeat(np.arange(len(leaves)), counts * ranks)
    axis = (np.arange(axes) - table.first_axis[owner]) % np.maximum(ranks[owner], 1)
    lengths_of = np.fromiter((n for leaf in leaves for n in leaf.shape), np.int64)
    limit = lengths_of[(np.cumsum(ranks) - ranks)[owner] + axis]
    outside = (table.starts < 0) | (table.shapes < 1) | (table.starts > limit - table.shapes)
    if outside.any():
        raise ValueError(
            f"a chunk of leaf {leaves[owner[np.argmax(outside)]].path!r} is outside it"
        )

    volumes = table.volumes
    leaf_of = np.repeat(np.arange(len(leaves)), counts)
    found = np.zeros(len(leaves), np.int64)
    np.add.at(found, leaf_of, volumes)
    short = found != np.fromiter((prod(leaf.shape) for leaf in leaves), np.int64)
    if short.any():
        path = leaves[int(np.argmax(short))].path
        raise ValueError(f"the chunks of leaf {path!r} do not add up to its shape")

    if total and not 0 <= table.objects.min() <= table.objects.max() < len(objects):
        raise ValueError("a chunk lies in an object that is not in the table")
    bits = np.fromiter((leaf.stored.bits for leaf in leaves), np.int64)[leaf_of]
    sizes = np.fromiter((entry.size for entry in objects), np.int64)[table.objects]
    nbytes = -(-volumes * bits // 8)
    past = (table.offsets < 0) | (table.offsets > sizes - nbytes)
    if past.any():
        i = int(np.argmax(past))
        raise ValueError(
            f"a chunk of {nbytes[i]} bytes of leaf {leaves[leaf_of[i]].path!r} lies at byte "
            f"{table.offsets[i]} of {objects[table.objects[i]].key!r}, which has {sizes[i]}"
        )
