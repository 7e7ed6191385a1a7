"""Fixtures for all tests, and, before JAX is imported, eight virtual devices as on a large host."""

from __future__ import annotations

import os
from importlib.util import find_spec
from uuid import uuid4

import pytest
from hypothesis import settings

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from places import STORES, Place, running_store
from servers.process import ServerUnavailableError, unavailable

# How long an example takes says something of the machine alone; tests have deadlines of their own.
settings.register_profile("ckptio", deadline=None)
settings.load_profile("ckptio")


def _session_store(name):
    @pytest.fixture(scope="session", name=f"{name}_store")
    def store():
        try:
            with running_store(name) as found:
                yield found
        except ServerUnavailableError as error:
            unavailable(error)

    return store


s3_store = _session_store("s3")
gcs_store = _session_store("gcs")
azure_store = _session_store("azure")


@pytest.fixture(params=STORES)
def place(request, tmp_path):
    """A fresh prefix in each store in turn."""
    name = uuid4().hex
    if request.param == "local":
        return Place(str(tmp_path / name))
    if request.param == "memory":
        return Place(f"memory://place/{name}")
    scheme, _, driver = request.param.partition("+")
    found = request.getfixturevalue(f"{scheme}_store").place(name)
    if driver:
        if find_spec(f"ckptio_{driver}") is None:
            unavailable(ServerUnavailableError(f"the plugin ckptio-{driver} is not installed"))
        return Place(found.uri.replace("://", f"+{driver}://", 1), found.storage_options)
    return found
