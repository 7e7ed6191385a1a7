"""The manifest comes back as it was written, and one that lies is refused before it is used."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptio import columns
from ckptio.boxes import Box
from ckptio.errors import ManifestError, UnsupportedFormatError
from ckptio.manifest import BLOCK, ChunkTable, LeafEntry, Manifest, ObjectEntry, decode


def sample(**changes):
    leaves = (
        LeafEntry("a", "jax", "float32", (4, 6)),
        LeafEntry("b", "int", "int64", ()),
        LeafEntry("c", "numpy", "int4", (3,)),
        LeafEntry("d", "numpy", "float32", (0, 3)),
    )
    rows = [
        [(0, 4096, Box((0, 0), (2, 6))), (0, 4144, Box((2, 0), (2, 6)))],
        [(0, 4192, Box((), ()))],
        [(1, 4096, Box((0,), (3,)))],
        [],
    ]
    manifest = Manifest(
        attempt="0123456789abcdef",
        created=datetime(2026, 1, 2, tzinfo=UTC),
        metadata={"loss": 0.5, "tags": ["x"]},
        structure={"dict": {"a": 0, "b": 1, "c": [2, 3, None]}},
        leaves=leaves,
        objects=(ObjectEntry("data/x/0", BLOCK + 1), ObjectEntry("data/x/1", 4098)),
        chunks=ChunkTable.build([2, 0, 1, 2], rows),
        checksums=(np.array([1, 2**64 - 1], np.uint64), np.array([3], np.uint64)),
    )
    return dataclasses.replace(manifest, **changes)


def test_a_manifest_comes_back():
    before = sample()
    after = decode(before.encode(), "here")
    assert after.encode() == before.encode()
    assert (after.leaves, after.objects) == (before.leaves, before.objects)
    assert after.structure == before.structure
    assert after.metadata == before.metadata
    assert after.chunks.box(0, 1) == Box((2, 0), (2, 6))
    assert [c.tolist() for c in after.checksums] == [[1, 2**64 - 1], [3]]
    assert after.chunks.volumes.tolist() == [12, 12, 1, 3]


def test_the_empty_tree_has_a_manifest():
    empty = sample(
        structure={"dict": {}}, leaves=(), objects=(), checksums=(), chunks=ChunkTable.build([], [])
    )
    assert decode(empty.encode(), "here").leaves == ()


def test_every_flipped_bit_is_found():
    data = sample().encode()
    for i in range(len(data)):
        for bit in (1, 0x20, 0x80):
            damaged = data[:i] + bytes([data[i] ^ bit]) + data[i + 1 :]
            # A sealed line end is the one byte that carries nothing.
            if damaged.rstrip(b"\n") != data.rstrip(b"\n"):
                with pytest.raises((ManifestError, UnsupportedFormatError)):
                    decode(damaged, "here")


def test_every_cut_is_found():
    data = sample().encode()
    for length in range(len(data) - 1):
        with pytest.raises(ManifestError, match="here"):
            decode(data[:length], "here")


def resealed(data, *changes):
    body = data[: data.rindex(b',"checksum"')]
    for old, new in changes:
        assert old in body
        body = body.replace(old, new)
    return body + b',"checksum":"%016x"}\n' % xxhash.xxh3_64_intdigest(body)


def test_a_newer_format_is_named():
    data = resealed(sample().encode(), (b'"ckptio/1.0"', b'"ckptio/2.3"'))
    with pytest.raises(UnsupportedFormatError, match=r"format 2\.3"):
        decode(data, "here")
    unknown_seal = b'{"format":"ckptio/7.0","signature":"x"}'
    with pytest.raises(UnsupportedFormatError, match=r"format 7\.0"):
        decode(unknown_seal, "here")


def test_a_newer_minor_version_with_new_fields_is_read():
    data = resealed(sample().encode(), (b'"ckptio/1.0"', b'"ckptio/1.9","news":[1]'))
    assert decode(data, "here").leaves == sample().leaves


LIES = {
    "parent": (b"data/x/0", b"../x/0__"),
    "absolute": (b"data/x/0", b"/data/x0"),
    "negative size": (b'"size":4098', b'"size":-409'),
    "negative shape": (b'"shape":[4,6]', b'"shape":[4,-6]'),
    "other shape": (b'"shape":[4,6]', b'"shape":[4,7]'),
    "enormous shape": (b'"shape":[4,6]', b'"shape":[4,999999999999999999]'),
    "zero-size but enormous": (b'"shape":[0,3]', b'"shape":[0,9223372036854775807]'),
    "other rank": (b'"shape":[4,6]', b'"shape":[24]'),
    "unknown dtype": (b'"float32"', b'"float31"'),
    "unknown kind": (b'"kind":"numpy"', b'"kind":"pickl"'),
    "keys without a generator": (b'"kind":"numpy"', b'"kind":"key"'),
    "a leaf twice in the tree": (b'"b":1', b'"b":0'),
    "a leaf that is not there": (b'"b":1', b'"b":9'),
    "a tree that is none": (b'"b":1', b'"b":"x"'),
    "two leaves of one path": (b'"path":"b"', b'"path":"a"'),
    "a short object": (b'"size":4098', b'"size":4097'),
    "missing checksums": (b'"size":4098', b'"size":99999999'),
    "endless rows": (b'"rows":4,', b'"rows":999999999999,'),
    "other rows": (b'"rows":4,', b'"rows":3,'),
    "unknown codec": (b"diff+zstd", b"pick+zstd"),
    "no base64": (b'"data":"', b'"data":"!'),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(lie):
    with pytest.raises(ManifestError, match="here"):
        decode(resealed(sample().encode(), LIES[lie]), "here")


ROWS = [[(0, 4096, Box((0,), (3,)))]]


@pytest.mark.parametrize(
    "rows",
    [
        [[(0, 5000, Box((0,), (4,)))]],  # past the object's end
        [[(0, -8, Box((0,), (4,)))]],
        [[(0, 2**63 - 1, Box((0,), (4,)))]],
        [[(1, 4096, Box((0,), (4,)))]],  # in no object
        [[(-1, 4096, Box((0,), (4,)))]],
        [[(0, 4096, Box((0,), (5,)))]],  # outside the leaf
        [[(0, 4096, Box((-1,), (4,)))]],
        [[(0, 4096, Box((2**62,), (2**62,)))]],
        [[(0, 4096, Box((0,), (3,)))]],  # not all of it
        [[(0, 4096, Box((0,), (4,))), (0, 4096, Box((0,), (4,)))]],
        [[(0, 4096, Box((0,), (0,)))]],
        [[]],
    ],
)
def test_a_chunk_table_that_lies_is_refused(rows):
    lying = sample(
        structure=0,
        leaves=(LeafEntry("a", "numpy", "float32", (4,)),),
        objects=(ObjectEntry("data/x/0", 5000),),
        checksums=(np.zeros(1, np.uint64),),
        chunks=ChunkTable.build([1], rows),
    )
    with pytest.raises(ManifestError, match="here"):
        decode(lying.encode(), "here")


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_columns_come_back(values):
    assert columns.decode(columns.encode(np.array(values, np.int64))).tolist() == values


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_one_error(data):
    with pytest.raises(ManifestError):
        decode(data, "here")


def test_a_column_that_would_fill_the_memory_is_refused_unread():
    bomb = columns.encode(np.zeros(1 << 20, np.int64))
    with pytest.raises(ValueError, match="not as long"):
        columns.decode(columns.Column(10, bomb.codec, bomb.data))
