"""What the tests know of an S3 server, and how they reach it beside the driver."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import botocore.config
import botocore.session
from botocore.exceptions import BotoCoreError, ClientError

from servers.process import ServerUnavailableError

REGION = "us-east-1"


@dataclass(frozen=True)
class S3Server:
    """A running server.

    Attributes
    ----------
    endpoint : str
        Its URL.
    bucket : str
        A bucket that exists.
    key, secret : str
        Credentials that may do everything.
    """

    endpoint: str
    bucket: str
    key: str
    secret: str

    @property
    def uri(self) -> str:
        """Where tests may write: append a prefix of your own."""
        return f"s3://{self.bucket}"

    def storage_options(self, endpoint: str | None = None) -> dict[str, Any]:
        """Return the options with which the server is reached, through a proxy if one is given."""
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": endpoint or self.endpoint,
            "client_kwargs": {"region_name": REGION},
        }

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """Give a plain botocore client, which knows nothing of the driver."""
        client = botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=botocore.config.Config(s3={"addressing_style": "path"}),
        )
        try:
            yield client
        finally:
            client.close()

    def warm_up(self) -> None:
        """Make the bucket and write to it: the first write allocates, and may fail."""
        deadline = time.monotonic() + 60
        with self.client() as client:
            while True:
                try:
                    client.create_bucket(Bucket=self.bucket)
                    client.put_object(Bucket=self.bucket, Key="warm-up", Body=b"x" * 4096)
                    client.delete_object(Bucket=self.bucket, Key="warm-up")
                    return
                except (BotoCoreError, ClientError) as error:
                    if time.monotonic() > deadline:
                        raise ServerUnavailableError(
                            f"{self.endpoint} takes no writes: {error}"
                        ) from error


@dataclass(frozen=True)
class RealS3:
    """A scratch prefix on the real service, reached with what the environment says."""

    uri: str

    def storage_options(self) -> dict[str, Any]:
        """Return no options: botocore finds credentials and region itself."""
        return {}

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """Give a plain botocore client."""
        client = botocore.session.Session().create_client("s3")
        try:
            yield client
        finally:
            client.close()
