"""Which account, which credentials: a URI and storage options, understood as adlfs does.

What opens a blob through adlfs opens a backend here: the same spellings of URI and options, the
same ``AZURE_STORAGE_*`` variables, the same order of precedence (a connection string, then a
credential, a key, a SAS token, and Azure's own chain of look-ups unless access is anonymous).
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
import requests.adapters
import urllib3
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobServiceClient, ContainerClient

from ckptio.backend import check_key
from ckptio.errors import (
    DriverUnavailableError,
    InvalidKeyError,
    InvalidOptionError,
    InvalidURIError,
)

__all__ = ["Connection", "Place", "check_name", "check_options", "connect"]

# An upload's pieces are sent under the first, an answer's pieces arrive within the second.
_CONNECTION_TIMEOUT, _READ_TIMEOUT = 8.0, 60.0
_POOL = 64
_WHOLE = 1 << 50  # never split a request: the core has chosen its size

_ENVIRONMENT = (
    "account_name",
    "account_key",
    "connection_string",
    "sas_token",
    "client_id",
    "client_secret",
    "tenant_id",
)
_OPTIONS = {
    *_ENVIRONMENT,
    "credential",
    "anon",
    "account_host",
    "location_mode",
    "timeout",
    "connection_timeout",
    "read_timeout",
    "max_concurrency",
}
# Options of adlfs about its caches, its loop and its file objects, which have no part in this.
_WITHOUT_EFFECT = {
    "assume_container_exists",
    "asynchronous",
    "blocksize",
    "default_cache_type",
    "default_fill_cache",
    "listings_expiry_time",
    "loop",
    "max_paths",
    "request_session",
    "skip_instance_cache",
    "socket_timeout",
    "use_listings_cache",
    "version_aware",
}
# What adlfs hands on to azure.identity.DefaultAzureCredential.
_IDENTITY = re.compile(
    r"exclude_\w+_credential|authority|additionally_allowed_tenants|process_timeout"
    r"|\w+_(client|tenant)_id"
)

_HOST = re.compile(r"(?P<account>[^./]+)\.(?:dfs|blob)\.core\.windows\.net")
_CONTAINER = re.compile(r"\$(root|web|logs)|(?=.{3,63}\Z)[a-z0-9]+(-[a-z0-9]+)*")
_FORBIDDEN = re.compile("[\\\\\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class Place:
    """What a URI names.

    Attributes
    ----------
    container : str
    root : str
        The prefix that all keys have in common; may be empty.
    account : str or None
        If the URI names the storage account.
    """

    container: str
    root: str
    account: str | None

    @classmethod
    def parse(cls, uri: str) -> Place:
        """Take ``az://container/…``, ``abfs://container@account.dfs.core.windows.net/…`` apart."""
        authority, _, path = uri.partition("://")[2].partition("/")
        container, at, host = authority.partition("@")
        match = _HOST.fullmatch(host if at else authority)
        if match and not at:  # abfss://account.dfs.core.windows.net/container/…
            container, _, path = path.partition("/")
        if not _CONTAINER.fullmatch(container):
            raise InvalidURIError(
                f"{uri!r} names no container: write az://container/… or "
                "abfs://container@account.dfs.core.windows.net/…; a container's name is 3 to 63 "
                "lower-case letters, digits and single hyphens"
            )
        try:
            root = check_name(check_key(path.strip("/"), prefix=True))
        except InvalidKeyError as error:
            raise InvalidURIError(f"{uri!r}: {error}") from error
        return cls(container, root, match["account"] if match else None)


def check_name(name: str) -> str:
    """Return a blob's name if Azure stores it as it is, else raise `InvalidKeyError`.

    Azure turns a backslash into a slash and drops a dot at the end of a path segment, cannot list
    control characters, and takes at most 1,024 characters in at most 254 segments:
    https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata
    """
    if _FORBIDDEN.search(name) or "./" in name or name.endswith("."):
        raise InvalidKeyError(
            f"Azure cannot hold the name {name!r}: no backslash or control character, and no dot "
            "at the end of a path segment"
        )
    if len(name) > 1024 or name.count("/") >= 254:
        raise InvalidKeyError(
            f"Azure cannot hold a name of {len(name)} characters in {name.count('/') + 1} "
            f"segments (1,024 and 254 at the most): {name[:80]!r}…"
        )
    return name


@dataclass(frozen=True, slots=True)
class Connection:
    """A container's client, and what has to be closed with it.

    Attributes
    ----------
    container : azure.storage.blob.ContainerClient
    endpoint : str
        For messages: without credentials.
    """

    container: ContainerClient
    endpoint: str
    _session: requests.Session
    _credential: Any

    def close(self) -> None:
        """Release sockets, and the credential if it was made here."""
        self.container.close()
        self._session.close()
        if self._credential is not None:
            self._credential.close()


def check_options(options: Mapping[str, Any], place: Place) -> None:
    """Raise `InvalidOptionError` for what adlfs does not know, and for two different accounts."""
    known = _OPTIONS | _WITHOUT_EFFECT
    if unknown := sorted(k for k in options if k not in known and not _IDENTITY.fullmatch(k)):
        raise InvalidOptionError(
            f"unknown storage options for Azure: {', '.join(unknown)}; known are those of adlfs: "
            + ", ".join(sorted(_OPTIONS))
        )
    account = options.get("account_name")
    if place.account and account and account != place.account:
        raise InvalidOptionError(
            f"the URI names the account {place.account!r}, account_name is {account!r}"
        )
    if options.get("location_mode", "primary") not in ("primary", "secondary"):
        raise InvalidOptionError("location_mode is 'primary' or 'secondary'")


def connect(place: Place, options: Mapping[str, Any]) -> Connection:
    """Make the client that a place and the options ask for; no request is sent.

    Raises
    ------
    InvalidOptionError
        If no account is named, or the SDK cannot make sense of what is given.
    """
    found = {
        name: options.get(name) or os.environ.get(f"AZURE_STORAGE_{name.upper()}") or None
        for name in _ENVIRONMENT
    }
    found["account_name"] = place.account or found["account_name"]
    session, arguments = _transport(options)
    try:
        service, made = _service(place, found, options, arguments)
        if options.get("location_mode") == "secondary":
            service.location_mode = "secondary"
        container = service.get_container_client(place.container)
    except InvalidOptionError:
        raise
    except (ValueError, TypeError) as error:
        # What follows a colon in the SDK's text may be a URL with a token: not from it, not quoted.
        given = ", ".join(sorted({*options, *(name for name, value in found.items() if value)}))
        raise InvalidOptionError(
            f"the storage options for container {place.container!r} make no client: "
            f"{str(error).partition(':')[0]} (given: {given})"
        ) from None
    logging.getLogger("urllib3.connectionpool").addFilter(_signature_filter)
    parts = urlsplit(service.url)
    endpoint = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
    return Connection(container, endpoint, session, made)


def _transport(options: Mapping[str, Any]) -> tuple[requests.Session, dict[str, Any]]:
    """Return a session, and the arguments of a client that uses it and adds nothing of its own."""
    session = requests.Session()
    # With retries off in this way, urllib3's errors do not quote the request's URL.
    never = urllib3.Retry(False)
    adapter = requests.adapters.HTTPAdapter(pool_maxsize=_POOL, max_retries=never)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    return session, {
        "transport": RequestsTransport(
            session=session,
            session_owner=False,
            connection_timeout=options.get("connection_timeout") or _CONNECTION_TIMEOUT,
            read_timeout=options.get("read_timeout") or _READ_TIMEOUT,
        ),
        "retry_total": 0,  # retries belong to the core
        "max_single_put_size": _WHOLE,
        "max_single_get_size": _WHOLE,
        "user_agent": "ckptio",
    }


def _service(
    place: Place,
    found: Mapping[str, str | None],
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> tuple[BlobServiceClient, Any]:
    """Return the account's client, and the credential to close with it if one was made."""
    if connection_string := found["connection_string"]:
        return BlobServiceClient.from_connection_string(connection_string, **arguments), None
    account = found["account_name"]
    if account is None:
        raise InvalidOptionError(
            f"no storage account for container {place.container!r}: pass account_name or "
            "connection_string, set AZURE_STORAGE_ACCOUNT_NAME, or name it in the URI "
            f"(abfs://{place.container}@account.dfs.core.windows.net/…)"
        )
    made = _made_credential(found, options)
    host = options.get("account_host") or f"{account}.blob.core.windows.net"
    credential = made or _given_credential(found, options)
    return BlobServiceClient(f"https://{host}", credential=credential, **arguments), made


def _made_credential(found: Mapping[str, str | None], options: Mapping[str, Any]) -> Any:
    """Return a credential for a service principal, or Azure's chain of look-ups, or None."""
    if options.get("credential") or found["account_key"] or found["sas_token"]:
        return None
    principal = found["client_id"] is not None
    if not principal and _anonymous(options.get("anon")):
        return None
    try:
        from azure.identity import ClientSecretCredential, DefaultAzureCredential
    except ImportError as error:
        raise DriverUnavailableError(
            "signing in to Azure needs azure-identity: pip install 'ckptio[azure]'"
        ) from error
    if not principal:
        extra = {k: v for k, v in options.items() if k not in _OPTIONS | _WITHOUT_EFFECT}
        return DefaultAzureCredential(**extra)
    tenant, client, secret = found["tenant_id"], found["client_id"], found["client_secret"]
    if not (tenant and client and secret):
        raise InvalidOptionError("client_id, client_secret and tenant_id belong together")
    return ClientSecretCredential(tenant, client, secret)


def _given_credential(found: Mapping[str, str | None], options: Mapping[str, Any]) -> Any:
    credential = options.get("credential")
    if credential is not None:
        is_async = inspect.iscoroutinefunction(getattr(credential, "get_token", None))
        return _Awaited(credential) if is_async else credential
    if found["account_key"]:
        # The name is given too: the SDK cannot guess it from a host of one's own.
        return {"account_name": found["account_name"], "account_key": found["account_key"]}
    return found["sas_token"]


def _anonymous(anon: bool | None) -> bool:
    if anon is not None:
        return anon
    return os.environ.get("AZURE_STORAGE_ANON", "false").lower() not in ("false", "0", "f", "")


class _Awaited:
    """An asynchronous token credential, which adlfs asks for, as a synchronous one."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    def get_token(self, *scopes: str, **options: Any) -> Any:
        from ckptio_backends.event_loop import run

        return run(self._credential.get_token(*scopes, **options))


class _SignatureFilter(logging.Filter):
    """urllib3 logs each request's path; with a SAS token that is a credential."""

    _signature = re.compile(r"(?<=[?&]sig=)[^&\s\"]+")

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                self._signature.sub("REDACTED", arg) if isinstance(arg, str) else arg
                for arg in record.args
            )
        return True


_signature_filter = _SignatureFilter()
