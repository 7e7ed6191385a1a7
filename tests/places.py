"""A place: a fresh prefix in some store, and how ckptio is told of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SERVED = ["s3", "gcs", "azure"]
"""Stores that need a server."""
PLUGGED = ["s3+obstore"]
"""Drivers of third parties, for the same servers."""
STORES = ["local", "memory", *SERVED, *PLUGGED]
"""Every store that a test is run on where it is about all of them."""


@dataclass(frozen=True)
class Place:
    """A fresh prefix."""

    uri: str
    storage_options: dict[str, Any] = field(default_factory=dict)

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.uri}/{name}", self.storage_options)

    @property
    def to(self) -> dict[str, Any]:
        """The arguments that name it to ckptio."""
        return {"uri": self.uri, "storage_options": self.storage_options}


@dataclass(frozen=True)
class Store:
    """A running server, whichever it is."""

    uri: str
    endpoint: str
    options: Any  # endpoint -> storage options

    def place(self, name: str, endpoint: str | None = None) -> Place:
        """Return a prefix, reached at another endpoint (a proxy's) if one is given."""
        return Place(f"{self.uri}/{name}", self.options(endpoint or self.endpoint))


@contextlib.contextmanager
def running_store(name: str) -> Iterator[Store]:
    """Run the server of a store until the block ends."""
    if name == "s3":
        from servers.seaweedfs import seaweedfs

        with seaweedfs() as server:
            yield Store(server.uri, server.endpoint, server.storage_options)
    elif name == "gcs":
        from servers.fakegcs import fake_gcs

        with fake_gcs() as server:
            yield Store(server.uri, server.endpoint, server.storage_options)
    else:
        from servers.azurite import azurite

        with azurite() as server:

            def options(endpoint: str) -> dict[str, Any]:
                return server.storage_options(int(endpoint.rpartition(":")[2]))

            yield Store(server.uri, f"http://127.0.0.1:{server.port}", options)
