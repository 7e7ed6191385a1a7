"""On the real GCS, where CKPTIO_TEST_GCS_URI names a scratch prefix: no free server will do."""

import os
from uuid import uuid4

import ckptio
import obstore
import pytest
from obstore.store import GCSStore
from promises import ObstorePromises

URI = os.environ.get("CKPTIO_TEST_GCS_URI", "").rstrip("/")


@pytest.mark.skipif(not URI, reason="CKPTIO_TEST_GCS_URI is not set")
class TestRealGCS(ObstorePromises):
    @pytest.fixture
    def backend(self):
        place = URI.replace("gs://", "gs+obstore://")
        with ckptio.open_backend(f"{place}/{uuid4().hex}") as backend:
            yield backend

    # obstore itself, with a store of its own: the least that is beside the driver.

    def place(self, backend, key):
        bucket, _, root = backend.uri.removeprefix("gs://").partition("/")
        return GCSStore(bucket), f"{root}/{key}"

    def raw_put(self, backend, key, data):
        obstore.put(*self.place(backend, key), data)

    def raw_get(self, backend, key):
        try:
            return bytes(obstore.get(*self.place(backend, key)).bytes())
        except FileNotFoundError:
            return None
