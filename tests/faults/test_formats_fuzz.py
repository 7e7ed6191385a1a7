"""Whatever stands in place of a header or a manifest: a clear error, no crash, no memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from contextlib import contextmanager
from uuid import uuid4

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptio
from ckptio.formats import safetensors
from ckptio.manifest import decode
from ckptio.memory import MemoryBackend

MUCH = 32 << 20
many = settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])

numbers = st.one_of(
    st.integers(-2, 20),
    st.sampled_from([1 << 31, 1 << 32, 1 << 47, 1 << 62, 1 << 63, 1 << 64, -1 << 63, 10**400]),
)
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=5),
    st.sampled_from(["F32", "U8", "F4", "BOOL", "float32", "U1000000000", "datetime64[ns]"]),
)  # fmt: skip
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*safetensors.DTYPES, "F6_E2M3", "?"]) | scalars,
        "shape": st.lists(numbers, max_size=4) | junk,
        "data_offsets": st.tuples(numbers, numbers).map(list) | junk,
    }
)
headers = st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), tensors | junk, max_size=4)


@contextmanager
def frugally():
    """Nothing in here may use much memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MUCH
    finally:
        tracemalloc.stop()


def check_message(error, where):
    assert where in str(error)
    assert len(str(error)) < 2000


def look_at(data):
    """Open a file; if that succeeds, every tensor has to be readable."""
    uri = f"memory://fuzz-{uuid4().hex}"
    with MemoryBackend(uri) as backend, frugally():
        backend.put("t.safetensors", data)
        try:
            checkpoint = ckptio.open(f"{uri}/t.safetensors")
        except (ckptio.ManifestError, ckptio.UnsupportedFormatError) as error:
            check_message(error, "t.safetensors")
        else:
            for leaf in checkpoint.leaves.values():
                assert leaf[...].shape == leaf.shape
        finally:
            backend.delete(["t.safetensors"])


@many
@given(st.binary(max_size=200))
def test_any_bytes(data):
    look_at(data)


@many
@given(st.integers(0, (1 << 64) - 1) | st.integers(0, 300), st.binary(max_size=200))
def test_any_length_and_header(length, data):
    look_at(struct.pack("<Q", length) + data)


@many
@given(headers, st.integers(0, 40))
def test_any_header_of_the_right_kind(header, size):
    text = json.dumps(header).encode()
    look_at(struct.pack("<Q", len(text)) + text + bytes(size))


GOOD = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "F4", "shape": [4], "data_offsets": [16, 18]},
    "c": {"dtype": "I64", "shape": [0, 3], "data_offsets": [18, 18]},
    "__metadata__": {"k": "v"},
}


@many
@given(st.data())
def test_any_change_of_a_sound_file(data):
    text = json.dumps(GOOD).encode()
    sound = bytearray(struct.pack("<Q", len(text)) + text + bytes(18))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(sound) - 1))
        sound[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    look_at(bytes(sound))


@many
@given(
    st.dictionaries(st.text(max_size=3), st.sampled_from(["a.safetensors", "b", "../x"]) | scalars)
    | junk,
    junk,
)
def test_any_index_of_a_directory(weight_map, metadata):
    uri = f"memory://fuzz-{uuid4().hex}"
    with MemoryBackend(uri) as backend, frugally():
        text = json.dumps({k: v for k, v in GOOD.items() if k == "a"}).encode()
        backend.put("a.safetensors", struct.pack("<Q", len(text)) + text + bytes(16))
        index = json.dumps({"weight_map": weight_map, "metadata": metadata}).encode()
        backend.put("model.safetensors.index.json", index)
        try:
            checkpoint = ckptio.open(uri)
        except ckptio.ManifestError as error:
            check_message(error, uri)
        else:
            assert {*checkpoint} <= {"a"}
        finally:
            backend.delete(["a.safetensors", "model.safetensors.index.json"])


@pytest.fixture(scope="module")
def manifest():
    uri = "memory://fuzz-manifest"
    tree = {"w": np.ones((2, 3), np.float32), "l": [1, "text", None], "s": np.array(["ab"])}
    ckptio.save(uri, tree, metadata={"v": 1}, overwrite=True)
    with ckptio.open_backend(uri) as backend:
        return json.loads(backend.read("manifest.json"))


def places(node, at=()):
    """Every place in a JSON document."""
    yield at
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from places(child, (*at, key))


def replaced(document, at, value):
    """A copy of a JSON document with something else in one place."""
    if not at:
        return value
    copy = json.loads(json.dumps(document))
    node = copy
    for key in at[:-1]:
        node = node[key]
    node[at[-1]] = value
    return copy


@many
@given(st.data())
def test_any_change_of_a_manifest_that_is_sealed_again(manifest, data):
    sound = {key: value for key, value in manifest.items() if key != "checksum"}
    where = [*places(sound)]
    at = where[data.draw(st.integers(1, len(where) - 1))]
    changed = replaced(sound, at, data.draw(junk))
    body = json.dumps(changed, separators=(",", ":")).encode()[:-1]
    sealed = body + b',"checksum":"%016x"}' % xxhash.xxh3_64_intdigest(body)
    try:
        with frugally():
            found = decode(sealed, "memory://x/manifest.json")
    except (ckptio.ManifestError, ckptio.UnsupportedFormatError) as error:
        check_message(error, "memory://x/manifest.json")
    else:
        assert len(found.leaves) == 4
