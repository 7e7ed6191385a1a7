"""Ways to move objects to and from a store, one small module each; see `CLIENTS`.

A client is made from a URI and storage options in fsspec's spelling, and it writes and reads a few
large objects as fast as it can by the means that its documentation offers for that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview


class Range(NamedTuple):
    """Bytes of an object."""

    key: str
    start: int
    stop: int


class Client(Protocol):
    """What is measured.

    Attributes
    ----------
    takes_bytes : bool
        Whether it is given views of `bytes`, and no others; else of page-aligned memory, as
        the core's buffers are.
    """

    takes_bytes: bool = False

    def write(self, objects: Mapping[str, memoryview]) -> None:
        """Write whole objects; return when they are durable or acknowledged."""

    def read(self, ranges: Sequence[Range]) -> Sequence[Buffer]:
        """Read byte ranges into fresh memory."""

    def close(self) -> None:
        """Release what is held."""


class Entry(NamedTuple):
    """A client by name.

    Attributes
    ----------
    where : str
        ``module:class`` below this package.
    needs : str
        The package without which there is nothing to measure.
    settings : mapping
        Keyword arguments of its constructor.
    """

    where: str
    needs: str
    settings: Mapping[str, Any] = {}


CONNECTIONS = (2, 4, 8, 16)
"""How many connections plain HTTP is tried with."""


def plain_http(connections: int) -> str:
    """Name the client that looks for the server's limit."""
    return f"plain HTTP × {connections}"


def _plain(needs: str) -> Mapping[str, Entry]:
    return {plain_http(n): Entry("http:HttpClient", needs, {"connections": n}) for n in CONNECTIONS}


CLIENTS: Mapping[str, Mapping[str, Entry]] = {
    "file": {
        "ckptio": Entry("driver:DriverClient", "ckptio"),
        "files, buffered": Entry("files:BufferedClient", "os"),
        "files, O_DIRECT": Entry("files:DirectClient", "os"),
    },
    "s3": {
        "ckptio": Entry("driver:DriverClient", "ckptio"),
        "s3fs": Entry("fsspec:S3Client", "s3fs"),
        "ckptio+obstore": Entry("driver:PluginClient", "ckptio_obstore"),
        "obstore": Entry("obstore:ObstoreClient", "ckptio_obstore"),
        **_plain("botocore"),
    },
    "gs": {
        "ckptio": Entry("driver:DriverClient", "ckptio"),
        "gcsfs": Entry("fsspec:GcsClient", "gcsfs"),
        "ckptio+obstore": Entry("driver:PluginClient", "ckptio_obstore"),
        "obstore": Entry("obstore:ObstoreClient", "ckptio_obstore"),
        **_plain("google.auth"),
    },
    "az": {
        "ckptio": Entry("driver:DriverClient", "ckptio"),
        "adlfs": Entry("fsspec:AzureClient", "adlfs"),
        "ckptio+obstore": Entry("driver:PluginClient", "ckptio_obstore"),
        "obstore": Entry("obstore:ObstoreClient", "ckptio_obstore"),
        **_plain("azure.storage.blob"),
    },
    "": {
        "ckptio": Entry("driver:DriverClient", "ckptio"),
        "fsspec": Entry("fsspec:AnyClient", "fsspec"),
    },
}
"""By scheme; the empty one is for all others. The second of each is the yardstick."""

SDKS = ("s3fs", "gcsfs", "adlfs", "obstore", "fsspec")
"""The stores' plain SDKs among them."""


def clients_of(uri: str, storage_options: Mapping[str, Any]) -> list[str]:
    """Name the clients for a URI whose packages are installed and which can be used there.

    Without plain HTTP, which is for `limit_clients_of`.
    """
    scheme = _scheme(uri)
    limits = limit_clients_of(uri)
    found = [n for n, e in _entries(scheme).items() if n not in limits and find_spec(e.needs)]
    if scheme in ("gs", "gcs") and "endpoint_url" in storage_options:
        # It asks Google for a token before it talks to any other server.
        found = [name for name in found if "obstore" not in name]
    return found


def limit_clients_of(uri: str) -> list[str]:
    """Name the clients that look for the server's limit; none where it cannot be asked plainly."""
    return [n for n, e in _entries(_scheme(uri)).items() if e.where.startswith("http:")]


def _scheme(uri: str) -> str:
    return uri.partition("://")[0] if "://" in uri else "file"


def _entries(scheme: str) -> Mapping[str, Entry]:
    same = {"gcs": "gs", "abfs": "az", "abfss": "az"}
    return CLIENTS.get(same.get(scheme, scheme), CLIENTS[""])


def make(name: str, uri: str, storage_options: Mapping[str, Any]) -> Client:
    """Make a client for what is below a URI."""
    if "endpoint_url" in storage_options:
        # Else gcsfs asks Google's own endpoint for the bucket's layout, and waits minutes for it.
        # It looks once, when it is first imported, by whomever.
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    entry = _entries(_scheme(uri))[name]
    module, _, factory = entry.where.partition(":")
    made = getattr(import_module(f"{__name__}.{module}"), factory)
    client: Client = made(uri, storage_options, **entry.settings)
    return client
