"""Orbax checkpoints, made by the installed Orbax: opened, restored, resharded, converted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckptio

pytest.importorskip("tensorstore", reason="the extra ckptio[orbax] is not installed")
pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")

# Made in a process of its own: Orbax leaves threads and open files behind, and warns.
MAKE = """
import sys, warnings
warnings.simplefilter("ignore")
import jax, jax.numpy as jnp, numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
from jax.sharding import NamedSharding, PartitionSpec as P

root = sys.argv[1]
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
tree = {
    "params": {
        "w": put(jnp.arange(64 * 32, dtype=jnp.float32).reshape(64, 32), "data", "model"),
        "b": put(jnp.arange(32, dtype=jnp.bfloat16), None),
        "rows": put(jnp.arange(16 * 3, dtype=jnp.int32).reshape(16, 3), ("data", "model")),
        "layers": [jnp.ones(3), jnp.zeros((2, 2), jnp.int32)],
        "a.b/c": np.arange(4),
    },
    "t": (jnp.float32(1.5), 2),
    "step": 7,
    "lr": 0.5,
    "none": None,
    "empty": {},
}
kinds = {
    "key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1), 4),
    "i4": jnp.arange(-8, 7).astype(jnp.int4), "f8": jnp.arange(4).astype(jnp.float8_e4m3fn),
    "c": jnp.ones(2, jnp.complex64), "bool": jnp.array([True, False]), "list": [], "tuple": (),
}
text = {**tree, "name": "Grüße", "np": np.float32(3)}

def pytree(name, value, **options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(f"{root}/{name}", args=ocp.args.PyTreeSave(value))

def standard(name, value):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{root}/{name}", value)

standard("default", tree)
standard("kinds", kinds)
pytree("strings", text)
pytree("no-ocdbt", text, use_ocdbt=False)
pytree("zarr3", text, use_zarr3=True)
pytree("no-ocdbt-zarr3", text, use_ocdbt=False, use_zarr3=True)
ocp.PyTreeCheckpointer().save(f"{root}/pytree-checkpointer", text)
with ocp.CheckpointManager(f"{root}/manager") as manager:
    manager.save(3, args=ocp.args.StandardSave(tree))
    manager.wait_until_finished()
with ocp.CheckpointManager(f"{root}/composite") as manager:
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(tree), facts=ocp.args.JsonSave({"epoch": 4})
    )
    manager.save(5, args=args)
    manager.wait_until_finished()
with ocp.CheckpointManager(f"{root}/several") as manager:
    args = ocp.args.Composite(
        params=ocp.args.StandardSave(tree["params"]), opt=ocp.args.StandardSave({"mu": tree["t"]})
    )
    manager.save(6, args=args)
    manager.wait_until_finished()
v1.save(f"{root}/v1", {**tree, "name": "Grüße"})
with v1.training.Checkpointer(f"{root}/v1-training") as checkpointer:
    checkpointer.save(4, tree)
big = jnp.arange(3 * 1000 * 1000, dtype=jnp.float32).reshape(3, 1000, 1000)
standard("big", {"w": put(jnp.tile(big, (4, 4, 1)), "data", None, "model")})
"""

RESTORE = {
    "default": "standard",
    "kinds": "standard",
    "strings": "pytree",
    "no-ocdbt": "pytree",
    "zarr3": "pytree",
    "no-ocdbt-zarr3": "pytree",
    "pytree-checkpointer": "pytree",
    "manager/3": "standard below default",
    "composite/5": "standard below state",
    "v1": "v1",
    "v1-training/4": "v1",
}


@pytest.fixture(scope="session")
def orbax(tmp_path_factory):
    root = tmp_path_factory.mktemp("orbax")
    made = subprocess.run(
        [sys.executable, "-c", MAKE, root],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return root


def restored_by_orbax(path, how):
    """What Orbax itself makes of a checkpoint, on one device and without a target."""
    import orbax.checkpoint as ocp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "v1":
            import orbax.checkpoint.experimental.v1 as v1

            return v1.load(path)
        kind, _, below = how.partition(" below ")
        if kind == "standard":
            with ocp.StandardCheckpointer() as checkpointer:
                return checkpointer.restore(path / below)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path)


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        if isinstance(b, int | float | str):
            assert type(a) is type(b), path
            assert a == b, path
            continue
        if hasattr(b, "dtype") and jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            assert a.dtype == b.dtype, path
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.mark.parametrize("name", RESTORE)
def test_it_restores_to_what_orbax_itself_restores(orbax, name):
    found = ckptio.restore(orbax / name)
    assert_same(found, restored_by_orbax(orbax / name, RESTORE[name]))


@pytest.mark.parametrize("name", [*RESTORE, "several/6"])
def test_it_opens_and_lists_without_reading_data(orbax, name):
    with ckptio.open(orbax / name) as checkpoint:
        assert checkpoint.format == "orbax"
        assert len(checkpoint) >= 6
        assert checkpoint.bytes_read == 0
        assert checkpoint.created.year >= 2025 or name in ("pytree-checkpointer",)
        with pytest.raises(ckptio.UnsupportedFormatError, match="no checksums"):
            checkpoint.verify()
        if "params/w" in checkpoint:
            leaf = checkpoint["params/w"]
            assert (leaf.kind, leaf.shape, leaf.dtype_name) == ("jax", (64, 32), "float32")
            assert str(leaf.sharding) == "(data, model) on 4×2"
            assert leaf[3:5, 30].tolist() == [3 * 32 + 30, 4 * 32 + 30]
            assert checkpoint.bytes_read == 2 * 4
            assert checkpoint["params/a.b~1c"][...].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["default", "no-ocdbt", "zarr3", "no-ocdbt-zarr3", "v1"])
def test_it_reshards_onto_any_mesh(orbax, name):
    for shape in [(8, 1), (2, 4), (1, 1)]:
        devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
        mesh = jax.sharding.Mesh(devices, ("x", "y"))

        def sharding(leaf, mesh=mesh):
            return NamedSharding(mesh, P("y", "x") if leaf.ndim == 2 else P())

        found = ckptio.restore(orbax / name, only=["params/w", "params/b"], sharding=sharding)
        assert found["params"]["w"].sharding.mesh.shape == {"x": shape[0], "y": shape[1]}
        wanted = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
        assert np.array_equal(found["params"]["w"], wanted)
        assert np.array_equal(found["params"]["b"], np.arange(32).astype(jnp.bfloat16))


def test_a_target_gets_what_it_asks_for(orbax):
    like = {
        "params": {"w": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)},
        "step": 0,
        "t": (np.zeros((), np.float32), 0),
    }
    found = ckptio.restore(orbax / "default", like, strict=False, cast=True)
    assert found["params"]["w"].dtype == jnp.bfloat16
    assert found["step"] == 7
    assert isinstance(found["t"], tuple)
    with pytest.raises(ckptio.MismatchError, match="params/w"):
        ckptio.restore(orbax / "default", like)


def test_several_items_are_one_tree_and_json_is_metadata(orbax):
    with ckptio.open(orbax / "several" / "6") as checkpoint:
        assert {path.split("/")[0] for path in checkpoint} == {"opt", "params"}
        assert checkpoint["opt/mu/1"].read() == 2
    with ckptio.open(orbax / "composite" / "5") as checkpoint:
        assert checkpoint.metadata["facts"] == {"epoch": 4}


@pytest.mark.parametrize("name", [*RESTORE, "several/6"])
def test_it_becomes_ckptios_own(orbax, name, tmp_path):
    ckptio.convert(orbax / name, tmp_path / "own")
    with ckptio.open(tmp_path / "own") as own:
        assert own.format == "ckptio"
        own.verify()
    assert_same(ckptio.restore(tmp_path / "own"), ckptio.restore(orbax / name))


def test_leaves_larger_than_a_piece_are_read_by_whole_chunks(orbax, tmp_path):
    wanted = np.tile(np.arange(3_000_000, dtype=np.float32).reshape(3, 1000, 1000), (4, 4, 1))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    found = ckptio.restore(orbax / "big", sharding=NamedSharding(mesh, P(None, "x")))
    assert np.array_equal(found["w"], wanted)
    ckptio.convert(orbax / "big", tmp_path / "out.safetensors")
    assert np.array_equal(ckptio.restore(tmp_path / "out.safetensors")["w"], wanted)


@pytest.mark.parametrize("name", ["strings", "no-ocdbt", "zarr3", "no-ocdbt-zarr3", "manager/3"])
def test_on_any_store_it_is_the_same(orbax, name, place):
    with ckptio.open_backend(place.uri, place.storage_options) as backend:
        for path in sorted(p for p in (orbax / name).rglob("*") if p.is_file()):
            data = path.read_bytes()
            if data or not place.uri.startswith("gs"):  # fake servers refuse empty uploads
                backend.put(str(path.relative_to(orbax / name)), data)
    assert_same(ckptio.restore(**place.to), ckptio.restore(orbax / name))


def copied(orbax, name, tmp_path):
    import shutil

    return Path(shutil.copytree(orbax / name, tmp_path / "copy"))


def test_a_lost_chunk_is_an_error_and_not_zeros(orbax, tmp_path):
    path = copied(orbax, "no-ocdbt", tmp_path)
    (path / "params.w" / "2.1").unlink()
    with pytest.raises(ckptio.CorruptionError, match="params/w"):
        ckptio.restore(path)
    assert ckptio.restore(path, only="params/b")["params"]["b"].shape == (32,)


def test_damage_is_named(orbax, tmp_path):
    path = copied(orbax, "no-ocdbt", tmp_path)
    (path / "params.w" / "0.0").write_bytes(b"no zstd")
    with pytest.raises(ckptio.CorruptionError, match="params/w"):
        ckptio.restore(path)
    (path / "params.w" / ".zarray").write_bytes(b"{}")
    with pytest.raises(ckptio.ManifestError, match=r"params\.w"):
        ckptio.open(path)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"tree_metadata": 3}', '{"tree_metadata": {"a": 3}}',
        '{"tree_metadata": {"a": {"key_metadata": [{"key": 3, "key_type": 2}]}}}',
        '{"tree_metadata": {"a": {"key_metadata": [{"key": "../x", "key_type": 2}],'
        ' "value_metadata": {"value_type": "jax.Array"}}}}',
        '{"tree_metadata": {"a": {"key_metadata": [{"key": "x", "key_type": 1}],'
        ' "value_metadata": {"value_type": "jax.Array"}}}}',
        '{"tree_metadata": {"a": {"key_metadata": [{"key": "5", "key_type": 1}],'
        ' "value_metadata": {"value_type": "None", "skip_deserialize": true}}}}',
    ],
)  # fmt: skip
def test_malformed_metadata_is_refused(orbax, tmp_path, text):
    path = copied(orbax, "no-ocdbt", tmp_path)
    (path / "_METADATA").write_text(text)
    with pytest.raises(ckptio.ManifestError, match="_METADATA"):
        ckptio.open(path)


def test_what_has_no_pytree_says_so(tmp_path):
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    (tmp_path / "checkpoint").write_bytes(b"msgpack")
    with pytest.raises(ckptio.UnsupportedFormatError, match="_METADATA"):
        ckptio.open(tmp_path)


def test_without_tensorstore_it_says_what_to_install(orbax):
    code = """
import sys
sys.modules["tensorstore"] = None
import ckptio
try:
    ckptio.open(sys.argv[1])
except ckptio.DriverUnavailableError as error:
    print(error)
"""
    out = subprocess.run(
        [sys.executable, "-c", code, orbax / "default"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    assert "pip install 'ckptio[orbax]'" in out


def test_the_bridge_serves_nobody_else(orbax):
    import http.client

    from ckptio.formats.bridge import Bridge

    with ckptio.open_backend(orbax / "no-ocdbt") as backend:
        bridge = Bridge(backend)
        try:
            connection = http.client.HTTPConnection(bridge.url.removeprefix("http://"), timeout=10)
            for path, status in [
                ("/_METADATA", 404),
                (f"{bridge.root}../secret", 404),
                (f"{bridge.root}%2e%2e/secret", 404),
                (f"{bridge.root}nothing", 404),
                (f"{bridge.root}_METADATA", 200),
            ]:
                connection.request("GET", path)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == status, path
            for method in ["PUT", "DELETE", "POST"]:
                connection.request(method, f"{bridge.root}_METADATA")
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 501
                connection.close()
        finally:
            connection.close()
            bridge.close()


def test_an_unfinished_one_is_refused(orbax, tmp_path):
    import shutil

    path = tmp_path / "step.orbax-checkpoint-tmp-123"
    shutil.copytree(orbax / "default", path)
    with pytest.raises(ckptio.UnsupportedFormatError, match="not finished"):
        ckptio.open(path)


def test_the_command_lists_the_steps_of_an_orbax_manager(orbax, tmp_path):
    pytest.importorskip("typer", reason="the extra ckptio[cli] is not installed")
    run = tmp_path / "run"
    for step, name in ((9, "manager/3"), (10, "composite/5"), (11, "v1-training/4")):
        shutil.copytree(orbax / name, run / str(step))
    shutil.copytree(orbax / "manager/3", run / "12.orbax-checkpoint-tmp-1")
    (run / "logs").mkdir()
    (run / "logs" / "train.txt").write_text("a line")
    ckptio.save(run / "13", {"w": np.ones(3)})
    command = [sys.executable, "-m", "ckptio", "ls", run]
    listed = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, check=True, timeout=60
    )
    found = json.loads(listed.stdout)["checkpoints"]
    assert [(item["name"], item["format"]) for item in found] == [
        ("9", "orbax"), ("10", "orbax"), ("11", "orbax"), ("13", "ckptio"),
    ]  # fmt: skip
    for item in found:
        with ckptio.open(run / item["name"]) as checkpoint:
            assert item["leaves"] == len(checkpoint)
            assert item["created"] == checkpoint.created.isoformat()
            assert item["metadata"] == dict(checkpoint.metadata)
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:5]] == ["9", "10", "11", "13"]
