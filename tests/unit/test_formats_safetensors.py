"""safetensors files seen as checkpoints: what is accepted, what is refused, and where it is put."""

from __future__ import annotations

import json
import struct
from uuid import uuid4

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

import ckptio
from ckptio.formats import parent
from ckptio.formats.safetensors import DTYPES, MAX_HEADER


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin, end, dtype="U8", shape=None):
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def opened(tmp_path, data):
    path = tmp_path / f"{uuid4().hex}.safetensors"
    path.write_bytes(data)
    return ckptio.open(path)


MALFORMED = {
    "empty": b"",
    "shorter than its length": b"\x01\0\0",
    "header longer than any": struct.pack("<Q", MAX_HEADER + 1) + b"{}",
    "header of 2^64 bytes": b"\xff" * 8 + b"{}",
    "header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "not JSON": file_of(b"{nothing"),
    "empty header": file_of(b""),
    "not an object": file_of(b"[]"),
    "deeply nested": file_of(b'{"a":' * 100_000),
    "NaN": file_of(b'{"a":NaN}'),
    "half a surrogate": file_of(rb'{"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "a name twice": file_of(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "overlap": file_of({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6)),
    "same bytes": file_of({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)),
    "hole": file_of({"a": entry(0, 4), "b": entry(5, 6)}, bytes(6)),
    "hole in front": file_of({"a": entry(1, 4)}, bytes(4)),
    "bytes left over": file_of({"a": entry(0, 4)}, bytes(5)),
    "past the end": file_of({"a": entry(0, 5)}, bytes(4)),
    "far past the end": file_of({"a": entry(0, 1 << 47)}, bytes(4)),
    "negative": file_of({"a": entry(-4, 0)}, bytes(4)),
    "backwards": file_of({"a": entry(4, 0, shape=[4])}, bytes(4)),
    "dtype lies": file_of({"a": entry(0, 4, "F32", [4])}, bytes(4)),
    "unknown dtype": file_of({"a": entry(0, 4, "Q32", [1])}, bytes(4)),
    "dtype is no string": file_of({"a": entry(0, 4, 4, [1])}, bytes(4)),
    "shape overflows": file_of({"a": entry(0, 0, "F32", [1 << 40, 1 << 40])}),
    "shape multiplies to 2^64": file_of({"a": entry(0, 0, "U8", [1 << 32, 1 << 32])}),
    "shape is huge": file_of({"a": entry(0, 0, "U8", [1 << 60, 0])}),
    "shape of booleans": file_of({"a": entry(0, 1, "U8", [True])}, b"x"),
    "too many dimensions": file_of({"a": entry(0, 1, "U8", [1] * 65)}, b"x"),
    "shape is missing": file_of({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x"),
    "three offsets": file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, b"x"),
    "odd number of 4-bit elements": file_of({"a": entry(0, 1, "F4", [1])}, b"x"),
    "entry is no object": file_of({"a": 3}),
    "metadata is no table": file_of({"__metadata__": 3}),
    "metadata of numbers": file_of({"__metadata__": {"a": 3}}),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_refused_and_named(tmp_path, kind):
    with pytest.raises(ckptio.ManifestError, match=r"\.safetensors"):
        opened(tmp_path, MALFORMED[kind])


def test_six_bit_floats_are_another_format(tmp_path):
    with pytest.raises(ckptio.UnsupportedFormatError, match="F6_E2M3"):
        opened(tmp_path, file_of({"a": entry(0, 3, "F6_E2M3", [4])}, bytes(3)))


def test_every_dtype_of_the_format_comes_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    header, data, wanted = {}, b"", {}
    for code, name in DTYPES.items():
        raw = rng.integers(0, 2 if code == "BOOL" else 256, 24, np.uint8).tobytes()
        bits = 4 if code == "F4" else ckptio.manifest.dtypes.parse(name).bits
        header[code] = entry(len(data), len(data) + 24, code, [24 * 8 // bits])
        wanted[code], data = raw, data + raw
    with opened(tmp_path, file_of(header, data)) as checkpoint:
        for code, name in DTYPES.items():
            leaf = checkpoint[code]
            assert leaf.dtype_name == name
            found = leaf[...]
            if code == "F4":
                low, high = found.view(np.uint8)[0::2], found.view(np.uint8)[1::2]
                assert (low | high << 4).tobytes() == wanted[code]
            else:
                assert found.tobytes() == wanted[code]


def test_what_the_formats_own_library_wrote_reads_the_same(tmp_path):
    tensors = {
        "w": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "b": np.arange(5).astype(ml_dtypes.bfloat16),
        "scalar": np.float64(2.5)[None][0:1].reshape(()),
        "empty": np.zeros((3, 0), np.int16),
        "a/b~c": np.array([True, False]),
        "": np.uint64([7]),
    }
    save_file(tensors, tmp_path / "t.safetensors", {"made": "by hand"})
    with ckptio.open(tmp_path / "t.safetensors") as checkpoint:
        assert checkpoint.format == "safetensors"
        assert dict(checkpoint.metadata) == {"made": "by hand"}
        assert list(checkpoint) == ["", "a~1b~0c", "b", "empty", "scalar", "w"]
        assert checkpoint["w"][1, :, 2].tolist() == [14, 18, 22]
        with pytest.raises(ckptio.UnsupportedFormatError, match="no checksums"):
            checkpoint.verify()
    back = ckptio.restore(tmp_path / "t.safetensors")
    assert {*back} == {*tensors}
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert back[name].tobytes() == tensor.tobytes()
    assert ckptio.restore(tmp_path / "t.safetensors", only="b")["b"].tolist() == [0, 1, 2, 3, 4]


@st.composite
def unaligned_files(draw):
    """A file whose tensors begin anywhere, and boxes of them."""
    codes = draw(st.lists(st.sampled_from(["U8", "I16", "F32", "F64", "C64", "F4"]), min_size=1))
    pad = draw(st.integers(0, 7))
    header, data, tensors = {}, b"", {}
    for i, code in enumerate(codes):
        dtype = ckptio.manifest.dtypes.parse(DTYPES[code])
        shape = draw(st.lists(st.integers(1, 5), max_size=3))
        if code == "F4":
            shape = [*shape, 2]
        elements = int(np.prod(shape, dtype=int))
        raw = draw(
            st.binary(min_size=dtype.bits * elements // 8, max_size=dtype.bits * elements // 8)
        )
        header[f"t{i}"] = entry(len(data), len(data) + len(raw), code, shape)
        data += raw
        if code == "F4":
            units = dtype.unpack(np.frombuffer(raw, np.uint8))
            tensors[f"t{i}"] = dtype.from_units(units.reshape(shape))
        else:
            tensors[f"t{i}"] = np.frombuffer(raw, dtype.numpy).reshape(shape)
    text = json.dumps(header).encode()
    text += b" " * pad
    index = [
        tuple(
            slice(*sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in t.shape
        )
        for t in tensors.values()
    ]
    return file_of(text, data), tensors, index


@given(unaligned_files(), st.integers(1, 40))
def test_elements_that_lie_across_two_reads_come_back_whole(file, size):
    data, tensors, boxes = file
    # Reads are whole blocks, so the pure plan is cut into smaller ones here, anywhere.
    from ckptio.arrays import empty
    from ckptio.boxes import Box
    from ckptio.formats.safetensors import manifest_of_file
    from ckptio.memory import MemoryBackend
    from ckptio.placing import by_chunk, scatter
    from ckptio.restore_plan import Want, plan_reads

    backend = MemoryBackend(f"memory://unaligned-{uuid4().hex}")
    backend.put("t.safetensors", data)
    manifest = manifest_of_file(backend, "t.safetensors")
    numbers = {leaf.path: i for i, leaf in enumerate(manifest.leaves)}
    wants, outs, wanted = [], [], []
    for (name, tensor), index in zip(tensors.items(), boxes, strict=True):
        for box_index in [index, (slice(None),) * tensor.ndim]:
            found = tensor[box_index]
            if found.size:
                start = tuple(s.start or 0 for s in box_index)
                stored = manifest.leaves[numbers[name]].stored
                wants.append(Want(numbers[name], Box(start, found.shape)))
                outs.append(empty(stored.units_shape(found.shape), stored.unit))
                wanted.append(found)
    for read in plan_reads(manifest, wants, align=1, gap=3, size=size):
        part = np.frombuffer(data[read.start : read.stop], np.uint8)
        scatter(by_chunk(read.pieces), read.start, part, outs)
    for want, out, found in zip(wants, outs, wanted, strict=True):
        assert manifest.leaves[want.leaf].stored.from_units(out).tobytes() == found.tobytes()


def directory(tmp_path, files, weight_map=None, name="model.safetensors.index.json"):
    for key, tensors in files.items():
        save_file(tensors, tmp_path / key)
    if weight_map is not None:
        (tmp_path / name).write_text(
            json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map})
        )
    return tmp_path


A = {"x": np.arange(4.0), "y": np.arange(2)}
B = {"z": np.arange(3, dtype=np.int8)}
MAP = {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}


def test_a_directory_with_an_index_is_one_tree(tmp_path):
    directory(tmp_path, {"a.safetensors": A, "b.safetensors": B}, MAP)
    with ckptio.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["x", "y", "z"]
        assert checkpoint.metadata == {"total_size": 8}
        assert checkpoint["z"][1:].tolist() == [1, 2]
    back = ckptio.restore(tmp_path)
    assert back["x"].tolist() == [0, 1, 2, 3]


def test_the_index_decides_which_files_and_tensors_count(tmp_path):
    directory(tmp_path, {"a.safetensors": A, "b.safetensors": A}, {"y": "b.safetensors"})
    assert [*ckptio.open(tmp_path)] == ["y"]


def test_a_directory_of_one_file_needs_no_index(tmp_path):
    directory(tmp_path, {"diffusion.safetensors": A})
    assert [*ckptio.open(tmp_path)] == ["x", "y"]
    directory(tmp_path, {"model.safetensors": B})
    assert [*ckptio.open(tmp_path)] == ["z"], "the usual name goes before others"


def test_several_files_without_an_index_are_not_guessed_at(tmp_path):
    directory(tmp_path, {"a.safetensors": A, "b.safetensors": B})
    with pytest.raises(ckptio.UnsupportedFormatError, match=r"several.*open one of them"):
        ckptio.open(tmp_path)
    assert [*ckptio.open(tmp_path / "b.safetensors")] == ["z"]


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"x": "missing.safetensors"}, "missing"),
        ({"nothing": "a.safetensors"}, "does not"),
        ({"x": "../a.safetensors"}, "not a valid key"),
        ({"x": "/etc/passwd"}, "not a valid key"),
        ({"x": 3}, "no file name"),
        ([], "weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, weight_map, says):
    directory(tmp_path, {"a.safetensors": A}, weight_map)
    with pytest.raises(ckptio.ManifestError, match=f"index.json.*{says}"):
        ckptio.open(tmp_path)


def test_where_there_is_nothing_the_error_is_the_usual_one(tmp_path):
    with pytest.raises(ckptio.NotFoundError, match=r"no manifest\.json"):
        ckptio.open(tmp_path)
    with pytest.raises(ckptio.NotFoundError, match="there is no checkpoint"):
        ckptio.open(tmp_path / "nothing.safetensors")
    (tmp_path / "readme.txt").write_text("hello")
    with pytest.raises(ckptio.NotFoundError, match=r"no manifest\.json"):
        ckptio.open(tmp_path)


def test_a_checkpoint_may_be_called_like_a_file(tmp_path):
    ckptio.save(tmp_path / "odd.safetensors", {"w": np.arange(3)})
    with ckptio.open(tmp_path / "odd.safetensors") as checkpoint:
        assert checkpoint.format == "ckptio"


def test_a_data_object_of_a_checkpoint_opens_by_itself(tmp_path):
    ckptio.save(tmp_path / "c", {"params": {"w": np.arange(3)}})
    (path,) = tmp_path.glob("c/data/*/*.safetensors")
    assert ckptio.open(path)["params~1w"][...].tolist() == [0, 1, 2]


def test_a_file_has_a_directory_on_every_kind_of_uri():
    assert parent("s3://bucket/a/x.safetensors") == ("s3://bucket/a", "x.safetensors")
    assert parent("s3://bucket/x.safetensors") == ("s3://bucket", "x.safetensors")
    assert parent("/x.safetensors") == ("/", "x.safetensors")
    for uri in ["s3://x.safetensors", "s3://bucket/"]:
        with pytest.raises(ckptio.InvalidURIError):
            parent(uri)


def test_a_file_in_memory_opens_too():
    from ckptio.memory import MemoryBackend

    MemoryBackend("memory://doc/files").put("t.safetensors", save({"w": np.arange(3)}))
    with ckptio.open("memory://doc/files/t.safetensors") as checkpoint:
        assert checkpoint.uri == "memory://doc/files/t.safetensors"
        assert checkpoint["w"][1] == 1
