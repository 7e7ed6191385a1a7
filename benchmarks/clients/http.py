"""Plain HTTP over a few connections that stay open: the least that a client can do for its bytes.

No SDK, no retries, no checksums: what this moves at its best is taken for what the server can do.
Requests are signed before they are timed, where a store wants them signed.
"""

from __future__ import annotations

import http.client
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

from benchmarks.clients import Buffer, Range
from benchmarks.limits import fresh_memory

_HOUR = 3600


class _Request(NamedTuple):
    method: str
    url: str
    headers: Mapping[str, str]


class _Addresses(Protocol):
    """How a store wants to be asked."""

    def put(self, key: str) -> _Request: ...

    def get(self, key: str) -> _Request: ...


class HttpClient:
    """So many connections, a thread each."""

    takes_bytes = False

    def __init__(self, uri: str, storage_options: Mapping[str, Any], connections: int) -> None:
        scheme, _, place = uri.partition("://")
        bucket, _, prefix = place.partition("/")
        store = _STORES.get(scheme, _Azure)
        self._addresses = store(bucket, f"{prefix.rstrip('/')}/", storage_options)
        self._connections = connections
        self._idle: queue.SimpleQueue[http.client.HTTPConnection] = queue.SimpleQueue()

    def write(self, objects: Mapping[str, memoryview]) -> None:
        def put(item: tuple[_Request, memoryview]) -> None:
            self._ask(item[0], _drained, body=item[1])

        self._all(put, [(self._addresses.put(key), data) for key, data in objects.items()])

    def read(self, ranges: Sequence[Range]) -> Sequence[Buffer]:
        def get(item: tuple[_Request, Range]) -> memoryview:
            request, (_, start, stop) = item
            out = fresh_memory(stop - start)
            headers = {**request.headers, "Range": f"bytes={start}-{stop - 1}"}
            self._ask(request._replace(headers=headers), lambda answer: _filled(answer, out))
            return out

        requests = {key: self._addresses.get(key) for key in {r.key for r in ranges}}
        return self._all(get, [(requests[r.key], r) for r in ranges])

    def _all(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        with ThreadPoolExecutor(self._connections) as pool:
            return [*pool.map(function, items)]

    def _ask(
        self,
        request: _Request,
        take: Callable[[http.client.HTTPResponse], None],
        body: memoryview | None = None,
    ) -> None:
        url = urlsplit(request.url)
        target = f"{url.path}?{url.query}"
        while True:
            connection, kept = self._connection(url.scheme, url.netloc)
            try:
                connection.request(request.method, target, body, dict(request.headers))
                answer = connection.getresponse()
            except ConnectionError:
                connection.close()
                if not kept:
                    raise
                continue  # the server had closed it in the meantime
            with answer:
                if answer.status not in (200, 201, 206):
                    # The path only: the query may be a signature.
                    raise OSError(f"{request.method} {url.path}: {answer.status} {answer.reason}")
                take(answer)
            self._idle.put(connection)
            return

    def _connection(self, scheme: str, place: str) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it was used before."""
        try:
            return self._idle.get_nowait(), True
        except queue.Empty:
            tls = scheme == "https"
            kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
            return kind(place, timeout=120), False

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get_nowait().close()


def _drained(answer: http.client.HTTPResponse) -> None:
    answer.read()


def _filled(answer: http.client.HTTPResponse, out: memoryview) -> None:
    done = 0
    while done < len(out):
        count = answer.readinto(out[done:])
        if not count:
            raise OSError(f"the answer ended after {done} of {len(out)} bytes")
        done += count
    answer.read()


class _S3:
    def __init__(self, bucket: str, prefix: str, options: Mapping[str, Any]) -> None:
        from botocore.config import Config
        from botocore.session import Session

        kwargs = options.get("client_kwargs") or {}
        session = Session(profile=options.get("profile"))
        self._client = session.create_client(
            "s3",
            region_name=kwargs.get("region_name"),
            endpoint_url=options.get("endpoint_url") or kwargs.get("endpoint_url"),
            aws_access_key_id=options.get("key"),
            aws_secret_access_key=options.get("secret"),
            aws_session_token=options.get("token"),
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )
        self._bucket, self._prefix = bucket, prefix

    def put(self, key: str) -> _Request:
        return self._signed("put_object", "PUT", key)

    def get(self, key: str) -> _Request:
        return self._signed("get_object", "GET", key)

    def _signed(self, action: str, method: str, key: str) -> _Request:
        parameters = {"Bucket": self._bucket, "Key": self._prefix + key}
        url = self._client.generate_presigned_url(action, parameters, _HOUR, method)
        return _Request(method, url, {})


class _Gcs:
    def __init__(self, bucket: str, prefix: str, options: Mapping[str, Any]) -> None:
        self._endpoint = options.get("endpoint_url") or "https://storage.googleapis.com"
        self._bucket, self._prefix = quote(bucket, safe=""), prefix
        self._headers = {"Content-Type": "application/octet-stream"}
        if options.get("token") != "anon":
            import google.auth
            from google.auth.transport.requests import Request

            scope = "https://www.googleapis.com/auth/devstorage.read_write"
            credentials, _ = google.auth.default(scopes=[scope])
            credentials.refresh(Request())  # type: ignore[no-untyped-call]  # google-auth's
            self._headers["Authorization"] = f"Bearer {credentials.token}"

    def put(self, key: str) -> _Request:
        path = f"upload/storage/v1/b/{self._bucket}/o?uploadType=media&name={self._name(key)}"
        return _Request("POST", f"{self._endpoint}/{path}", self._headers)

    def get(self, key: str) -> _Request:
        path = f"storage/v1/b/{self._bucket}/o/{self._name(key)}?alt=media"
        return _Request("GET", f"{self._endpoint}/{path}", self._headers)

    def _name(self, key: str) -> str:
        return quote(self._prefix + key, safe="")


class _Azure:
    def __init__(self, container: str, prefix: str, options: Mapping[str, Any]) -> None:
        from azure.storage.blob import ContainerClient, ContainerSasPermissions
        from azure.storage.blob import generate_container_sas as sas

        client = ContainerClient.from_connection_string(options["connection_string"], container)
        self._query = sas(
            client.account_name,
            container,
            account_key=client.credential.account_key,
            permission=ContainerSasPermissions(read=True, write=True, create=True),
            expiry=datetime.now(UTC) + timedelta(seconds=_HOUR),
        )
        self._url, self._prefix = client.url.partition("?")[0], prefix

    def put(self, key: str) -> _Request:
        return _Request("PUT", self._blob(key), {"x-ms-blob-type": "BlockBlob"})

    def get(self, key: str) -> _Request:
        return _Request("GET", self._blob(key), {})

    def _blob(self, key: str) -> str:
        return f"{self._url}/{quote(self._prefix + key)}?{self._query}"


_STORES: Mapping[str, Callable[[str, str, Mapping[str, Any]], _Addresses]] = {
    "s3": _S3,
    "gs": _Gcs,
    "gcs": _Gcs,
}
