"""`Leaf.tensorstore`: lazy, read-only, and only what is asked for moves."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import ckptio

pytest.importorskip("tensorstore", reason="the extra ckptio[orbax] is not installed")


def test_a_leaf_is_a_lazy_tensorstore(tmp_path):
    host = np.arange(24_000_000, dtype=np.float32).reshape(24_000, 1000)
    ckptio.save(tmp_path / "c", {"w": host})
    with ckptio.open(tmp_path / "c") as checkpoint:
        store = checkpoint["w"].tensorstore()
        assert (store.shape, store.dtype.numpy_dtype) == (host.shape, host.dtype)
        assert checkpoint.bytes_read == 0
        view = store[10_000:10_010, 5]
        assert checkpoint.bytes_read == 0
        assert np.array_equal(view.read().result(), host[10_000:10_010, 5])
        assert 0 < checkpoint.bytes_read <= 10 * 4000 + 2 * (4 << 20)
        assert np.array_equal(store[::2].read().result(), host[::2])


def test_nothing_can_be_written(tmp_path):
    ckptio.save(tmp_path / "c", {"w": np.arange(3)})
    store = ckptio.open(tmp_path / "c")["w"].tensorstore()
    assert store.readable
    assert not store.writable


@pytest.mark.parametrize(
    "array",
    [
        np.float64(1.5)[None][0:1].reshape(()),
        np.arange(4).astype(ml_dtypes.bfloat16),
        np.arange(4).astype(ml_dtypes.float8_e4m3fn),
        np.arange(-2, 2).astype(ml_dtypes.int4),
        np.array([True, False]),
        np.ones(2, np.complex64),
        np.zeros((0, 3), np.int8),
    ],
    ids=lambda array: str(array.dtype),
)
def test_dtypes_come_back_as_they_are(tmp_path, array):
    ckptio.save(tmp_path / "c", {"w": array})
    found = ckptio.open(tmp_path / "c")["w"].tensorstore().read().result()
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()


def test_what_tensorstore_lacks_is_said(tmp_path):
    ckptio.save(tmp_path / "c", {"w": np.array(["2026-01-01"], "M8[D]")})
    with pytest.raises(ckptio.UnsupportedLeafError, match=r"datetime64\[D\]"):
        ckptio.open(tmp_path / "c")["w"].tensorstore()


def test_damage_comes_out_of_the_read(tmp_path):
    ckptio.save(tmp_path / "c", {"w": np.arange(3.0)})
    (path,) = tmp_path.glob("c/data/*/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    store = ckptio.open(tmp_path / "c")["w"].tensorstore()
    with pytest.raises(Exception, match="damaged"):
        store.read().result()
