"""Storage options in fsspec's spelling, turned into obstore's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ckptio import InvalidOptionError, InvalidURIError
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

__all__ = ["Config", "Store", "make_store"]

Store = S3Store | GCSStore | AzureStore

_STORES: dict[str, type[Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}

# Options of s3fs, gcsfs and adlfs that are a setting of obstore under another name.
_RENAMED = {
    "s3": {
        "endpoint_url": "endpoint",
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "anon": "skip_signature",
        "requester_pays": "request_payer",
    },
    "gs": {"endpoint_url": "base_url", "anon": "skip_signature"},
    "az": {"endpoint_url": "endpoint", "sas_token": "sas_key", "anon": "skip_signature"},
}
_CLIENT_KWARGS = {"region_name": "region", "endpoint_url": "endpoint"}
_CONNECTION_STRING = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}

# A request has as long as its bytes keep coming: what hangs is noticed by the read timeout.
_CLIENT_OPTIONS = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "10m"}
# ckptio tries requests again itself, and knows the deadline of the whole operation.
NO_RETRIES = {"max_retries": 0}
# The parts of a streamed upload are out of its sight, so here obstore has to.
RETRIES = {"max_retries": 10, "retry_timeout": timedelta(seconds=60)}


@dataclass(frozen=True)
class Config:
    """Where a URI points, and how to get there.

    Attributes
    ----------
    scheme, bucket, root : str
        Of ``scheme://bucket/root``; a container is a bucket here.
    settings, client_options : dict
        obstore's ``config`` and ``client_options``.
    arguments : dict
        Other arguments of the store's constructor.
    """

    scheme: str
    bucket: str
    root: str
    # Credentials live here: never in a repr.
    settings: dict[str, Any] = field(repr=False)
    client_options: dict[str, Any] = field(repr=False)
    arguments: dict[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, uri: str, storage_options: Mapping[str, Any]) -> Config:
        """Take a URI and its storage options apart.

        Raises
        ------
        InvalidURIError
            If the URI names no bucket.
        InvalidOptionError
            If an option makes no sense here.
        """
        scheme, _, place = uri.partition("://")
        bucket, _, root = place.strip("/").partition("/")
        if not bucket or "@" in bucket:
            raise InvalidURIError(f"{uri!r} names no bucket: write {scheme}://bucket/path")
        options = dict(storage_options)
        constructor = ["credential_provider", "retry_config"]
        arguments = {name: options.pop(name) for name in constructor if name in options}
        client_options = {**_CLIENT_OPTIONS, **options.pop("client_options", {})}
        passed_on = options.pop("config", {})
        settings = {**_settings(scheme, options), **passed_on}
        endpoint = settings.get("endpoint") or settings.get("base_url") or ""
        if str(endpoint).startswith("http://"):
            client_options.setdefault("allow_http", True)
        return cls(scheme, bucket, root, settings, client_options, arguments)

    @property
    def endpoint(self) -> str:
        """Where requests go, for messages."""
        found = self.settings.get("endpoint") or self.settings.get("base_url")
        return str(found or "the default endpoint").partition("?")[0]


def make_store(config: Config, retry_config: Mapping[str, Any]) -> Store:
    """Make a store; it connects to nothing yet.

    Raises
    ------
    InvalidOptionError
        If obstore does not know or take an option.
    """
    arguments = {"retry_config": dict(retry_config), **config.arguments}
    try:
        store: Store = _STORES[config.scheme](
            config.bucket,
            config=config.settings or None,
            client_options=config.client_options,
            **arguments,
        )
    except (BaseError, TypeError, ValueError) as error:
        text = str(error).partition("\n\nDebug source")[0]
        # Without its cause, whose debug output may hold a credential.
        raise InvalidOptionError(
            f"storage options for {config.scheme}+obstore://: {text}"
        ) from None
    return store


def _settings(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if scheme == "s3":
        if "profile" in options:
            raise InvalidOptionError(
                "s3+obstore:// reads no profiles: pass key and secret, or "
                "credential_provider=obstore.auth.boto3.Boto3CredentialProvider(session)"
            )
        for name, value in options.pop("client_kwargs", {}).items():
            if name not in _CLIENT_KWARGS:
                raise InvalidOptionError(f"client_kwargs: {name!r} has no meaning for obstore")
            settings[_CLIENT_KWARGS[name]] = value
    elif scheme == "gs":
        options.pop("project", None)  # gcsfs wants it to make buckets
        settings |= _google_token(options.pop("token", None))
    elif "connection_string" in options:
        settings |= _connection_string(options.pop("connection_string"))
    renamed = _RENAMED[scheme]
    settings |= {renamed.get(name, name): v for name, v in options.items() if v is not None}
    if not settings.get("skip_signature", True):
        del settings["skip_signature"]
    return settings


def _google_token(token: object) -> dict[str, Any]:
    """Turn gcsfs's `token` into obstore's configuration."""
    if token in (None, "google_default", "cloud"):
        return {}
    if token == "anon":
        return {"skip_signature": True}
    if isinstance(token, Mapping):
        return {"service_account_key": json.dumps(dict(token))}
    if isinstance(token, str):
        return {"service_account": token}
    raise InvalidOptionError(f"gs+obstore:// takes no token of type {type(token).__name__}")


def _connection_string(text: str) -> dict[str, Any]:
    """Take an Azure connection string apart."""
    pairs = dict(item.partition("=")[::2] for item in text.split(";") if item.strip())
    settings = {ours: pairs[name] for name, ours in _CONNECTION_STRING.items() if name in pairs}
    if "endpoint" not in settings and "account_name" in settings and "EndpointSuffix" in pairs:
        protocol = pairs.get("DefaultEndpointsProtocol", "https")
        host = f"{settings['account_name']}.blob.{pairs['EndpointSuffix']}"
        settings["endpoint"] = f"{protocol}://{host}"
    return settings
