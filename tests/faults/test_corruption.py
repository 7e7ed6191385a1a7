"""Stored bytes that are not what was saved are found, named, and never returned."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import ckptio

TREE = {
    "params": {"w": np.arange(3000, dtype=np.float32).reshape(60, 50), "b": np.arange(50.0)},
    "i4": jnp.arange(33).astype(jnp.int4),
    "name": "run-7",
    "step": 12,
}


@pytest.fixture
def checkpoint(tmp_path):
    ckptio.save(tmp_path / "c", TREE, options=ckptio.SaveOptions(object_size=12_100))
    return tmp_path / "c"


def files(uri):
    return sorted(path for path in Path(uri).rglob("*") if path.is_file())


def test_there_are_several_files(checkpoint):
    assert len(files(checkpoint)) == 3  # the manifest, and two data objects


def test_every_997th_byte_flipped_is_detected_by_restore_and_verify(checkpoint):
    flips = 0
    for path in files(checkpoint):
        sound = path.read_bytes()
        for at in {*range(0, len(sound), 997), len(sound) - 2}:
            damaged = bytearray(sound)
            damaged[at] ^= 0x10
            path.write_bytes(damaged)
            for attempt in [
                lambda: ckptio.restore(checkpoint),
                lambda: ckptio.open(checkpoint).verify(),
            ]:
                with pytest.raises(
                    (ckptio.CorruptionError, ckptio.UnsupportedFormatError)
                ) as caught:
                    attempt()
                assert path.name in str(caught.value)
            flips += 1
        path.write_bytes(sound)
    assert flips > 20
    assert ckptio.restore(checkpoint)["step"] == 12


def test_a_flip_is_named_with_object_bytes_and_leaf_and_others_still_restore(tmp_path):
    big = {"a": np.zeros(1_500_000), "b": np.ones(1_500_000)}  # three blocks each, about
    ckptio.save(tmp_path / "c", big)
    (path,) = (p for p in files(tmp_path / "c") if p.suffix == ".safetensors")
    with open(path, "r+b") as file:
        file.seek(5 << 20)
        file.write(b"\xff")
    with pytest.raises(ckptio.CorruptionError, match=rf"{path.name}.*4194304:8388608.*leaf 'a'"):
        ckptio.restore(tmp_path / "c")
    with ckptio.open(tmp_path / "c") as checkpoint:
        with pytest.raises(ckptio.CorruptionError, match="'a'"):
            checkpoint["a"][600_000]
        assert checkpoint["a"][0] == 0
        with pytest.raises(ckptio.CorruptionError, match="'a'"):
            checkpoint.verify()
    assert ckptio.restore(tmp_path / "c", only="b")["b"].sum() == 1_500_000
    assert ckptio.restore(tmp_path / "c", verify=False)["a"].shape == (1_500_000,)


def test_every_file_cut_short_at_many_lengths_is_detected(checkpoint):
    for path in files(checkpoint):
        sound = path.read_bytes()
        step = max(1, len(sound) // 40)
        for length in {*range(0, len(sound) - 1, step), len(sound) - 2, len(sound) - 4, 0, 7, 8}:
            path.write_bytes(sound[:length])
            with pytest.raises(ckptio.CorruptionError) as caught:
                ckptio.restore(checkpoint)
            assert path.name in str(caught.value)
        path.write_bytes(sound)


def test_bytes_appended_to_an_object_are_detected(checkpoint):
    for path in files(checkpoint):
        sound = path.read_bytes()
        path.write_bytes(sound + b"more")
        for attempt in [
            lambda: ckptio.restore(checkpoint),
            lambda: ckptio.open(checkpoint).verify(),
        ]:
            with pytest.raises(ckptio.CorruptionError) as caught:
                attempt()
            assert path.name in str(caught.value)
        path.write_bytes(sound)


def test_a_deleted_object_is_named_and_other_leaves_still_restore(checkpoint):
    victim = files(checkpoint)[1]
    assert victim.suffix == ".safetensors"
    victim.unlink()
    with pytest.raises(ckptio.CorruptionError, match=rf"{victim.name} is missing.*leaf"):
        ckptio.restore(checkpoint)
    lost = set()
    for path in ["params/w", "params/b", "i4", "name", "step"]:
        try:
            ckptio.restore(checkpoint, only=path)
        except ckptio.CorruptionError:
            lost.add(path)
    assert 0 < len(lost) < 5
    with pytest.raises(ckptio.CorruptionError):
        ckptio.open(checkpoint).verify()


def test_a_copy_by_an_ordinary_tool_is_the_same_checkpoint(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "elsewhere")
    shutil.rmtree(checkpoint)
    back = ckptio.restore(tmp_path / "elsewhere")
    assert np.array_equal(back["params"]["w"], TREE["params"]["w"])
    assert ckptio.collect_garbage(tmp_path / "elsewhere", grace=0) == 0
    assert ckptio.exists(tmp_path / "elsewhere")
