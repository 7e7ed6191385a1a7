"""The local driver keeps the backend contract."""

from pathlib import Path

import pytest

import ckptio
from ckptio.testing import BackendContract


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
