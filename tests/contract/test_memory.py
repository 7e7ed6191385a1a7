"""The in-process reference backend keeps the backend contract."""

from uuid import uuid4

import pytest

import ckptio
from ckptio import memory
from ckptio.backend import ObjectInfo
from ckptio.testing import BackendContract


class TestMemory(BackendContract):
    @pytest.fixture
    def backend(self):
        with ckptio.open_backend(f"memory://contract/{uuid4().hex}") as backend:
            yield backend

    def raw_put(self, backend, key, data):
        path = backend.uri.removeprefix("memory://") + "/" + key
        with memory._lock:
            etag = str(next(memory._etags))
            memory._objects[path] = data, ObjectInfo(key, len(data), etag, 0.0)

    def raw_get(self, backend, key):
        found = memory._objects.get(backend.uri.removeprefix("memory://") + "/" + key)
        return found[0] if found else None
