"""Azurite: Microsoft's emulator of Azure Blob Storage, which keeps its conditions and its keys."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import BlobServiceClient, ContainerClient

from servers.process import ServerUnavailableError, free_ports, running

ACCOUNT = "devstoreaccount1"
# The emulator's well-known key, the same everywhere and documented:
# https://learn.microsoft.com/azure/storage/common/storage-connect-azurite
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class AzureServer:
    """A running emulator.

    Attributes
    ----------
    port : int
        Of 127.0.0.1.
    client : azure.storage.blob.ContainerClient
        Reaches the container beside the driver.
    """

    port: int
    client: ContainerClient

    @property
    def uri(self) -> str:
        """Where tests may write: append a prefix of your own."""
        return f"az://{self.client.container_name}"

    def endpoint(self, port: int | None = None) -> str:
        """Return the account's URL, through a proxy's port if one is given."""
        return f"http://127.0.0.1:{port or self.port}/{ACCOUNT}"

    def storage_options(
        self, port: int | None = None, *, key: str | None = KEY, sas: str | None = None
    ) -> dict[str, Any]:
        """Return the options with which the server is reached: by a key, a SAS token or neither."""
        parts = {"BlobEndpoint": self.endpoint(port)}
        if sas is not None:
            parts["SharedAccessSignature"] = sas
        elif key is not None:
            parts |= {"AccountName": ACCOUNT, "AccountKey": key}
        return {"connection_string": ";".join(f"{k}={v}" for k, v in parts.items())}

    def raw_put(self, uri: str, data: bytes) -> None:
        """Store a blob without the driver."""
        self.client.upload_blob(self._name(uri), data, overwrite=True)

    def raw_get(self, uri: str) -> bytes | None:
        """Fetch a blob without the driver; None if there is none."""
        try:
            return self.client.download_blob(self._name(uri)).readall()
        except ResourceNotFoundError:
            return None

    def _name(self, uri: str) -> str:
        return uri.removeprefix(self.uri + "/")


@contextlib.contextmanager
def azurite(node_options: Sequence[str] = ()) -> Iterator[AzureServer]:
    """Run Azurite with one container until the block ends; options are those of Node.js."""
    program = Path(sys.prefix, "azurite/node_modules/azurite/dist/src/blob/main.js")
    node = shutil.which("node")
    if node is None or not program.exists():
        raise ServerUnavailableError(
            "Azurite is missing: install Node.js 20 or newer, then "
            f"npm install --prefix {Path(sys.prefix, 'azurite')} azurite@3.35.0"
        )
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        command = [
            node,
            *node_options,
            program,
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            str(port),
            "--location",
            directory,
            "--silent",
            "--skipApiVersionCheck",
            "--disableTelemetry",
        ]
        url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        with (
            running(command, url),
            BlobServiceClient(
                url, credential={"account_name": ACCOUNT, "account_key": KEY}
            ) as service,
            service.create_container("ckptio-test") as container,
        ):
            yield AzureServer(port, container)
