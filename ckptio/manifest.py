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
from math import prod
from typing import Any

import msgspec
import numpy as np

from ckptio import collector, dtypes, tree
from ckptio.arrays import ShardingInfo
from ckptio.backend import check_key
from ckptio.chunk_table import (
    BLOCK,
    ChunkTable,
    ObjectEntry,
    UInt64s,
    decode_checksums,
    encode_checksums,
)
from ckptio.columns import Column
from ckptio.dtypes import StoredDtype
from ckptio.errors import InvalidKeyError, ManifestError, NotFoundError, UnsupportedFormatError
from ckptio.sealed import is_sealed, is_sound, seal
from ckptio.values import ARRAY_KINDS, HOST_KINDS

__all__ = [
    "BLOCK",
    "MANIFEST",
    "ChunkTable",
    "LeafEntry",
    "Manifest",
    "ObjectEntry",
    "decode",
    "is_foreign",
]

MANIFEST = "manifest.json"
BEGINNING = b'{"format":"ckptio/'
"""The first bytes of every manifest."""
FORMAT = (1, 0)
_KINDS = frozenset([*ARRAY_KINDS, *HOST_KINDS, "key"])
_FORMAT = re.compile(rb'\A\{"format":"ckptio/(\d{1,6})\.(\d{1,6})"')
_MAX_DIMENSION = 1 << 48


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
        document = _Document(
            format=f"ckptio/{FORMAT[0]}.{FORMAT[1]}",
            attempt=self.attempt,
            created=self.created.astimezone(UTC).isoformat(),
            metadata=dict(self.metadata),
            tree=self.structure,
            leaves=list(self.leaves),
            objects=list(self.objects),
            chunks=self.chunks.encode(),
            blocks=encode_checksums(self.checksums),
        )
        return seal(document)


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
    NotFoundError
        If it is another program's ``manifest.json``.
    ManifestError
        If its checksum does not match, or it says what cannot be.
    UnsupportedFormatError
        If its format is of a newer major version.
    """
    version = _FORMAT.match(data)
    sound = is_sound(data)
    # A newer format may be sealed in another way: its version is looked at before its seal.
    if version and int(version[1]) > FORMAT[0] and (sound or not is_sealed(data)):
        raise UnsupportedFormatError(
            f"{where} has format {version[1].decode()}.{version[2].decode()}; this ckptio reads "
            f"formats up to {FORMAT[0]}.x: upgrade it"
        )
    if not sound and is_foreign(data):
        raise NotFoundError(f"there is no checkpoint: {where} is another program's")
    if not sound:
        raise ManifestError(f"{where} is damaged: its checksum does not match its content")
    try:
        with collector.paused():
            return _checked(msgspec.json.decode(data, type=_Document))
    except (
        msgspec.MsgspecError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
        InvalidKeyError,
    ) as error:
        raise ManifestError(f"{where} is not a valid manifest: {error}") from error


def is_foreign(data: bytes) -> bool:
    """Whether a ``manifest.json`` is another program's: a JSON object with nothing of ours in it.

    One of ours that was damaged is none: no flipped, missing or overwritten bytes leave valid JSON
    and take both the format from its beginning and the checksum from its end.
    """
    if is_sealed(data) or _FORMAT.match(data):
        return False
    try:
        document = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return False
    return bool(document) and not str(document.get("format")).startswith("ckptio/")


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
        if not 0 <= entry.size <= 1 << 62:
            raise ValueError(f"object {entry.key!r} has size {entry.size}")
    ranks = np.asarray([len(leaf.shape) for leaf in leaves], np.int64)
    table = ChunkTable.decode(document.chunks, ranks)
    _check_chunks(leaves, objects, table)
    return Manifest(
        attempt=document.attempt,
        created=datetime.fromisoformat(document.created),
        metadata=document.metadata,
        structure=document.tree,
        leaves=leaves,
        objects=objects,
        chunks=table,
        checksums=decode_checksums(document.blocks, objects),
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
    leaf_of = table.leaf_of
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
