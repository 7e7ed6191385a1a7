"""Bad input gets a clear error with coordinates, and loses nothing."""

from __future__ import annotations

import contextlib
import enum
import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_commit import Inject

import ckptio


def test_a_missing_checkpoint_names_the_place_and_what_may_be_wrong(tmp_path):
    for uri in [tmp_path / "nothing", "memory://nothing/here"]:
        assert not ckptio.exists(uri)
        for call in [ckptio.open, ckptio.restore, ckptio.delete]:
            with pytest.raises(ckptio.NotFoundError, match=r"no checkpoint at .*nothing") as caught:
                call(uri)
            assert isinstance(caught.value, FileNotFoundError)
    assert not (tmp_path / "nothing").exists(), "looking does not create"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ckptio.CkptioError, match="file"):
        ckptio.open(tmp_path / "file")


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("leaf", "advice"),
    [
        (object(), "builtins.object cannot be saved"),
        (lambda: 1, "functions out of the tree"),
        (Color.RED, "Color"),
        (np.array([object()]), "dtype object cannot be stored"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        (np.zeros(2, [("a", "f4")]), "cannot be stored"),
        (np.longdouble(1), "cannot be stored"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "abstract"),
        ({1, 2}, "set"),
        (Path("x"), "Path"),
        (bytearray(b"x"), "bytearray"),
    ],
)
def test_an_unsupported_leaf_is_named_before_a_byte_is_written(tmp_path, leaf, advice):
    with pytest.raises(ckptio.UnsupportedLeafError) as caught:
        ckptio.save(tmp_path / "c", {"fine": np.ones(3), "params": [{"odd/one": leaf}]})
    assert "params/0/odd~1one" in str(caught.value)
    assert advice in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_donated_arrays_and_tracers_are_named(tmp_path):
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(ckptio.UnsupportedLeafError, match="'gone' was donated"):
        ckptio.save(tmp_path / "c", {"gone": gone})
    with pytest.raises(ckptio.UnsupportedLeafError, match=r"'x' is a tracer.*jit"):
        jax.jit(lambda x: ckptio.save(tmp_path / "c", {"x": x}))(1.0)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("metadata", [{"x": object()}, {"x": float("nan")}, {1: 2}, {"x": (1, 2)}])
def test_metadata_that_json_would_change_is_refused(tmp_path, metadata):
    with pytest.raises(ckptio.InvalidOptionError, match="metadata"):
        ckptio.save(tmp_path / "c", {}, metadata=metadata)


@pytest.mark.parametrize("options", [{"memory": 0}, {"concurrency": -1}, {"deadline": 0}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ckptio.InvalidOptionError, match=next(iter(options))):
        ckptio.SaveOptions(**options)


@contextlib.contextmanager
def tiny_disk(path, size):
    """A file system of its own, where the machine lets us make one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if (
        os.geteuid()
        or not shutil.which("mount")
        or subprocess.run(command, check=False, capture_output=True).returncode
    ):
        pytest.skip("only root can mount a small file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_named_and_loses_nothing(tmp_path):
    with tiny_disk(tmp_path / "disk", "24m") as disk:
        uri = disk / "run"
        ckptio.save(uri, {"w": np.zeros(1_000_000), "step": 1})  # 8 MB
        with pytest.raises(ckptio.StorageFullError, match=r"data/.*no space left") as caught:
            ckptio.save(uri, {"w": np.ones(4_000_000), "step": 2}, overwrite=True)
        assert str(disk) in str(caught.value)
        assert ckptio.restore(uri)["step"] == 1
        assert len([p for p in Path(uri).rglob("*") if p.is_file()]) == 2, (
            "no half-written file stays"
        )
        ckptio.save(uri, {"w": np.ones(1_000_000), "step": 3}, overwrite=True)
        assert ckptio.restore(uri)["step"] == 3


def test_a_file_size_limit_is_named_and_loses_nothing(tmp_path):
    ckptio.save(tmp_path / "c", {"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        with pytest.raises(ckptio.StorageFullError, match=r"data/.*\.safetensors"):
            ckptio.save(tmp_path / "c", {"w": np.ones(1_000_000)}, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert ckptio.restore(tmp_path / "c") == {"step": 1}
    assert len([p for p in (tmp_path / "c").rglob("*") if p.is_file()]) == 2


@contextlib.contextmanager
def unprivileged():
    """Root may write anywhere: for the block, be somebody else."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_directory_is_named(tmp_path):
    ckptio.save("memory://warm/up", {"w": np.ones(3)}, overwrite=True)
    for parent in [tmp_path, *tmp_path.parents]:
        if (
            parent.stat().st_mode & 0o055 != 0o055
            and parent.owner() == tmp_path.owner()
            and "pytest" in str(parent)
        ):
            parent.chmod(0o755)
    ckptio.save(tmp_path / "c", {"step": 1})
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    with unprivileged():
        with pytest.raises(
            ckptio.PermissionDeniedError, match=r"locked.*permission denied"
        ) as caught:
            ckptio.save(locked / "c", {"step": 2})
        assert isinstance(caught.value, PermissionError)
        with pytest.raises(ckptio.PermissionDeniedError):
            ckptio.save(tmp_path / "c", {"step": 2}, overwrite=True)
        assert ckptio.restore(tmp_path / "c") == {"step": 1}
    assert [*locked.iterdir()] == []


def test_a_deadline_ends_a_save_that_hangs_and_nothing_is_committed(tmp_path):
    import threading

    release = threading.Event()

    def stall(call):
        if call.key.endswith(".safetensors"):
            release.wait(60)

    try:
        with Inject(stall), pytest.raises(ckptio.DeadlineExceededError, match=r"0\.5 s: saving to"):
            ckptio.save(
                tmp_path / "c", {"w": np.ones(10)}, options=ckptio.SaveOptions(deadline=0.5)
            )
    finally:
        release.set()
    assert not ckptio.exists(tmp_path / "c")


def test_an_empty_directory_is_no_checkpoint(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "notes.txt").write_text("x")
    assert not ckptio.exists(tmp_path / "7")
    assert not ckptio.exists(tmp_path / "8")
    ckptio.save(tmp_path / "8", {"step": 8})
    assert ckptio.restore(tmp_path / "8") == {"step": 8}
    assert (tmp_path / "8" / "notes.txt").exists()
