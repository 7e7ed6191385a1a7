"""`copy`: between all stores, verified on the way, resumed after a kill, committed last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from places import SERVED, Place

import ckptio

MIB = 1 << 20
TREE = {
    "w": np.arange(5 * MIB // 4, dtype=np.float32).reshape(5, -1),
    "b": {str(i): np.full(3, i) for i in range(20)},
    "step": 7,
    "name": "été",
}


def same(a, b):
    assert a["w"].tobytes() == b["w"].tobytes()
    assert all((a["b"][k] == b["b"][k]).all() for k in a["b"])
    assert (a["step"], a["name"]) == (b["step"], b["name"])


def many_objects(uri, count=6, size=5 * MIB, **to):
    tree = {str(i): np.random.default_rng(i).integers(0, 256, size, np.uint8) for i in range(count)}
    ckptio.save(uri, tree, options=ckptio.SaveOptions(object_size=size), **to)
    return tree


def objects(path):
    return sorted(p for p in Path(path).rglob("*.safetensors"))


@pytest.mark.parametrize("to", ["local", "memory", *SERVED])
def test_between_every_pair_of_stores_it_is_the_same_checkpoint(place, to, request, tmp_path):
    name = uuid4().hex
    if to == "local":
        other = Place(str(tmp_path / name))
    elif to == "memory":
        other = Place(f"memory://place/{name}")
    else:
        other = request.getfixturevalue(f"{to}_store").place(name)
    ckptio.save(tree=TREE, metadata={"v": 1}, **place.to)
    report = ckptio.copy(
        place.uri,
        other.uri,
        src_storage_options=place.storage_options,
        dst_storage_options=other.storage_options,
    )
    assert (report.objects, report.kept) == (1, 0)
    same(ckptio.restore(**other.to), TREE)
    with ckptio.open(**other.to) as copied, ckptio.open(**place.to) as saved:
        copied.verify()
        assert copied.metadata == {"v": 1}
        assert copied.manifest.attempt == saved.manifest.attempt
        assert copied.created == saved.created


def test_another_checkpoint_is_kept_unless_told_otherwise(tmp_path):
    ckptio.save(tmp_path / "a", {"w": np.ones(3)})
    ckptio.save(tmp_path / "b", {"w": np.zeros(3)})
    with pytest.raises(ckptio.AlreadyExistsError, match="overwrite=True"):
        ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert not ckptio.restore(tmp_path / "b")["w"].any()
    ckptio.copy(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert ckptio.restore(tmp_path / "b")["w"].all()
    assert len(objects(tmp_path / "b")) == 1, "the replaced data is gone"


def test_nothing_to_copy_and_nowhere_to_go(tmp_path):
    with pytest.raises(ckptio.NotFoundError, match="no checkpoint"):
        ckptio.copy(tmp_path / "a", tmp_path / "b")
    ckptio.save(tmp_path / "a", {"w": 1})
    with pytest.raises(ckptio.InvalidOptionError, match="itself"):
        ckptio.copy(tmp_path / "a", tmp_path / "." / "a")


def test_a_checkpoint_without_data_is_copied_too(tmp_path):
    ckptio.save(tmp_path / "a", {"nothing": {}, "empty": np.zeros((0, 3))})
    assert ckptio.copy(tmp_path / "a", tmp_path / "b").objects == 0
    assert ckptio.restore(tmp_path / "b")["empty"].shape == (0, 3)


@pytest.mark.parametrize("which", [0, 3, 5])
def test_a_flipped_byte_is_caught_and_nothing_is_committed(tmp_path, which):
    many_objects(tmp_path / "a")
    victim = objects(tmp_path / "a")[which]
    with open(victim, "r+b") as file:
        file.seek(MIB + which)
        byte = file.read(1)
        file.seek(MIB + which)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ckptio.CorruptionError, match=victim.name):
        ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert not ckptio.exists(tmp_path / "b")


def test_a_byte_flipped_between_store_and_copy_is_caught(s3_store, tmp_path):
    from servers.proxy import fault_proxy

    place = s3_store.place("flip-on-the-way")
    many_objects(tree_place := place.uri, count=2, storage_options=place.storage_options)

    def flip(exchange):
        answer = exchange.forward()
        pieces = [bytearray(piece) for piece in answer.pieces]
        pieces[len(pieces) // 2][-1] ^= 0x10
        answer.pieces = [bytes(piece) for piece in pieces]
        exchange.send(answer)

    with fault_proxy(s3_store.endpoint) as proxy:
        proxy.add(flip, method="GET", path="p00000-001.safetensors")
        through = s3_store.place("flip-on-the-way", proxy.url)
        with pytest.raises(ckptio.CorruptionError, match="on its way"):
            ckptio.copy(tree_place, tmp_path / "b", src_storage_options=through.storage_options)
    assert not ckptio.exists(tmp_path / "b")
    assert ckptio.copy(place.uri, tmp_path / "b", src_storage_options=place.storage_options)
    ckptio.open(tmp_path / "b").verify()


def test_sound_objects_are_not_copied_again_and_damaged_ones_are(tmp_path):
    tree = many_objects(tmp_path / "a")
    assert ckptio.copy(tmp_path / "a", tmp_path / "b").objects == 6
    found = objects(tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    found[1].unlink()
    found[2].write_bytes(found[2].read_bytes()[:-1])
    damaged = bytearray(found[4].read_bytes())
    damaged[-1] ^= 1
    found[4].write_bytes(damaged)
    kept = {path: path.stat().st_ino for path in (found[0], found[3], found[5])}
    report = ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert (report.objects, report.kept) == (3, 3)
    assert {path: path.stat().st_ino for path in kept} == kept
    back = ckptio.restore(tmp_path / "b")
    assert all((back[key] == tree[key]).all() for key in tree)


def test_copying_a_copy_again_checks_and_repairs_it(tmp_path):
    many_objects(tmp_path / "a", count=3)
    ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert ckptio.copy(tmp_path / "a", tmp_path / "b").kept == 3
    objects(tmp_path / "b")[1].unlink()
    report = ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert (report.objects, report.kept) == (1, 2)
    ckptio.open(tmp_path / "b").verify()


KILLED = """
import json, os, signal, sys
import ckptio
from ckptio.uploading import ObjectUpload

write, done = ObjectUpload.write, []

def write_then_die(self, start, data):
    write(self, start, data)
    if self._single or self._completed:
        done.append(self.key)
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

ObjectUpload.write = write_then_die
ckptio.copy(sys.argv[1], sys.argv[2], options=ckptio.SaveOptions(concurrency=1, part_size=4 << 20),
            dst_storage_options=json.loads(sys.argv[3]))
"""


@pytest.mark.parametrize("store", ["local", "s3", "gcs", "azure"])
def test_after_a_kill_the_next_copy_goes_on_from_there(store, tmp_path, request):
    tree = many_objects(tmp_path / "a")
    target = (
        Place(str(tmp_path / "b"))
        if store == "local"
        else request.getfixturevalue(f"{store}_store").place("killed-copy")
    )
    killed = subprocess.run(
        [
            *(sys.executable, "-c", KILLED),
            *(tmp_path / "a", target.uri, json.dumps(target.storage_options)),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        env=dict(os.environ),
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not ckptio.exists(**target.to)
    report = ckptio.copy(tmp_path / "a", target.uri, dst_storage_options=target.storage_options)
    assert (report.objects, report.kept) == (3, 3)
    back = ckptio.restore(**target.to)
    assert all((back[key] == tree[key]).all() for key in tree)


def test_a_source_that_lost_an_object_or_grew_one_is_refused_at_once(tmp_path):
    many_objects(tmp_path / "a", count=3)
    path = objects(tmp_path / "a")[2]
    sound = path.read_bytes()
    path.write_bytes(sound + b"more")
    with pytest.raises(ckptio.CorruptionError, match=path.name):
        ckptio.copy(tmp_path / "a", tmp_path / "b")
    path.unlink()
    with pytest.raises(ckptio.CorruptionError, match=f"{path.name} is missing"):
        ckptio.copy(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_only_ckptios_own_are_copied_as_they_are(tmp_path):
    from safetensors.numpy import save_file

    (tmp_path / "hf").mkdir()
    save_file({"w": np.ones(2)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ckptio.UnsupportedFormatError, match="convert"):
        ckptio.copy(tmp_path / "hf", tmp_path / "b")
