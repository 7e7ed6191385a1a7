"""From s3fs's storage options to a botocore client.

The synchronous botocore client, not aiobotocore's: the contract is synchronous and its callers
are threads, a body goes to and from the socket without passing through an event loop, and an
upload or a download costs about half the processor time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import botocore.config
import botocore.session
import fsspec.config
from botocore import UNSIGNED
from botocore.handlers import add_expect_header

from ckptio.backend import Buffer
from ckptio.errors import InvalidOptionError

__all__ = ["Body", "Settings", "connect"]

CONNECT_TIMEOUT = 5.0
"""Seconds to wait for a connection, unless ``config_kwargs`` say otherwise."""

READ_TIMEOUT = 30.0
"""Seconds without a byte, either way, after which a request has failed; `config_kwargs` again."""

POOL = 64
"""Connections kept open; more threads than that open and close one for each request."""

_SEND = 1 << 20  # a socket's timeout is for one send: a slow link gets it for every so many bytes

# What s3fs knows but has no meaning here: its caches, its buffered files, its own event loop.
_IGNORED = {
    "asynchronous",
    "cache_regions",
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "fixed_upload_size",
    "listings_expiry_time",
    "local_expiry_check",
    "loop",
    "max_paths",
    "skip_instance_cache",
    "use_listings_cache",
    "version_aware",
}
# Settings of aiohttp, which is not in use.
_IGNORED_CONFIG = {"connector_args", "http_session_cls", "warm_up_loader_caches"}
_CREDENTIALS = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
}


@dataclass(frozen=True)
class Settings:
    """Storage options, checked.

    Attributes
    ----------
    client : mapping
        Keyword arguments of botocore's ``create_client``, credentials among them.
    config : mapping
        Keyword arguments of botocore's ``Config``.
    request : mapping
        Parameters for every request whose operation knows them.
    profile : str, optional
        A section of the user's AWS configuration.
    concurrency : int, optional
        Requests that the user wants in flight.
    """

    client: Mapping[str, Any] = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    request: Mapping[str, Any] = field(repr=False)
    profile: str | None
    concurrency: int | None

    @classmethod
    def parse(cls, storage_options: Mapping[str, Any]) -> Settings:
        """Take options in s3fs's spelling, over those of fsspec's own configuration.

        Raises
        ------
        InvalidOptionError
            If an option is unknown or contradicts another.
        """
        options = {**fsspec.config.conf.get("s3", {}), **storage_options}
        for name, alias in (("key", "username"), ("secret", "password")):
            if (other := options.pop(alias, None)) is not None:
                if options.get(name) is not None:
                    raise InvalidOptionError(f"give {name!r} or {alias!r}, not both")
                options[name] = other
        if options.pop("session", None) is not None:
            raise InvalidOptionError(
                "the option 'session' cannot be used: a session can neither be pickled nor shared "
                "with a forked process; give 'profile', or 'key', 'secret' and 'token'"
            )
        client = dict(options.pop("client_kwargs", None) or {})
        for name, full in _CREDENTIALS.items():
            if (value := options.pop(name, None)) is not None:
                client[full] = value
        if (endpoint := options.pop("endpoint_url", None)) is not None:
            client["endpoint_url"] = endpoint
        client.setdefault("use_ssl", options.pop("use_ssl", True))
        _check_endpoint(client.get("endpoint_url"))

        config = _config(dict(options.pop("config_kwargs", None) or {}))
        if options.pop("anon", False):
            config["signature_version"] = UNSIGNED
            client = {k: v for k, v in client.items() if k not in _CREDENTIALS.values()}
        request = dict(options.pop("s3_additional_kwargs", None) or {})
        if options.pop("requester_pays", False):
            request["RequestPayer"] = "requester"
        settings = cls(
            client,
            config,
            request,
            options.pop("profile", None),
            options.pop("max_concurrency", None),
        )
        if unknown := sorted(options.keys() - _IGNORED):
            raise InvalidOptionError(f"unknown storage options for s3://: {', '.join(unknown)}")
        try:
            botocore.config.Config(**config)
        except TypeError as error:
            raise InvalidOptionError(f"the option 'config_kwargs' is wrong: {error}") from error
        return settings


def _config(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": READ_TIMEOUT,
        "max_pool_connections": POOL,
        # Trying again is the caller's, who knows how long.
        "retries": {"total_max_attempts": 1},
        # Checkpoints have checksums of their own; these cost half of an upload's processor time.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **{name: value for name, value in given.items() if name not in _IGNORED_CONFIG},
    }


def _check_endpoint(url: object) -> None:
    if url is None:
        return
    parts = urlsplit(str(url))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidOptionError("the option 'endpoint_url' must be http://host… or https://host…")
    if parts.username or parts.password:
        raise InvalidOptionError(
            "the option 'endpoint_url' must not hold credentials: give 'key' and 'secret'"
        )


def connect(settings: Settings) -> Any:
    """Return a new botocore client, which threads may share but forked processes may not."""
    given = settings.config.get("s3") or {}
    config = botocore.config.Config(**{**settings.config, "s3": {**given}})
    session = botocore.session.Session(profile=settings.profile)
    try:
        client = session.create_client("s3", config=config, **settings.client)
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(f"S3 cannot be reached with these options: {error}") from error
    if client.meta.endpoint_url.startswith("https:"):
        # TLS keeps the body whole already; without it, its signed SHA-256 does.
        client.meta.config.s3.setdefault("payload_signing_enabled", False)
    # A body that is read from an object would wait for the server's consent: one more round trip.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    client.meta.events.register("before-send.s3", _send_in_pieces)
    client.meta.events.register("before-call.s3.HeadBucket", _follow_no_redirect)
    return client


class Body:
    """The body of a request: a view of the caller's memory, as the file that botocore expects."""

    def __init__(self, data: Buffer) -> None:
        self.view = memoryview(data).cast("B")
        self._position = 0

    def __len__(self) -> int:
        return len(self.view)

    def tell(self) -> int:
        """Return the position that is read next."""
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go elsewhere."""
        self._position = offset + (0, self._position, len(self.view))[whence]
        return self._position

    def read(self, size: int | None = -1) -> Buffer:
        """Return a view of the next bytes, ``b""`` at the end: botocore compares with that."""
        end = len(self.view) if size is None or size < 0 else self._position + size
        piece = self.view[self._position : end]
        self._position += len(piece)
        return piece if len(piece) else b""


class _Pieces:
    """A body's bytes in large pieces: urllib3 reads a file 16 KiB at a time."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, len(self._view), _SEND):
            yield self._view[start : start + _SEND]

    def seek(self, offset: int) -> None:
        """Allow botocore to rewind, as it does for a redirected request."""


def _send_in_pieces(request: Any, **_: object) -> None:
    if isinstance(request.body, Body):
        request.body = _Pieces(request.body.view)


def _follow_no_redirect(params: Any, **_: object) -> None:
    # To follow a redirect, botocore asks for the bucket's region by HeadBucket; where that one is
    # redirected too, it would ask again, without end.
    params["context"].setdefault("s3_redirect", {})["redirected"] = True
