"""The local driver keeps the backend contract."""

import os
from pathlib import Path

import pytest

import ckptio
from ckptio.testing import BackendContract
from ckptio_backends import file_space


class TestLocal(BackendContract):
    key_and_prefix = False

    @pytest.fixture
    def backend(self, tmp_path):
        with ckptio.open_backend(tmp_path / "root") as backend:
            yield backend

    def raw_put(self, backend, key, data):
        path = Path(backend.uri, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_get(self, backend, key):
        path = Path(backend.uri, key)
        return path.read_bytes() if path.is_file() else None

    @pytest.mark.parametrize("system", ["can reserve", "cannot"])
    def test_parts_come_in_any_order_whether_space_is_reserved_or_not(
        self, backend, system, monkeypatch
    ):
        if system == "cannot":
            monkeypatch.setattr(file_space, "_fallocate", None)
        size, part = 5 << 20, 1 << 20
        data = os.urandom(size)
        upload = backend.start_upload("x", size, part)
        for at in (3 << 20, 0, 4 << 20, 1 << 20, 2 << 20):
            upload.write_part(at, data[at : at + part])
        assert upload.complete().size == size
        assert backend.read("x") == data

    def test_space_is_there_before_the_first_part_is_written(self, backend, tmp_path):
        with (tmp_path / "probe").open("wb") as probe:
            if not file_space._reserved(probe.fileno(), 1 << 20):
                pytest.skip("this file system cannot reserve space")
        upload = backend.start_upload("x", 8 << 20, 4 << 20)
        try:
            (file,) = Path(backend.uri).iterdir()
            assert file.stat().st_blocks * 512 >= 8 << 20
        finally:
            upload.abort()
        assert not [*Path(backend.uri).glob("*")]
