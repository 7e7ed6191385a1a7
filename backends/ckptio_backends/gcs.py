"""``gs://`` and ``gcs://``: Google Cloud Storage.

Storage options are gcsfs's (``token``, ``project``, ``endpoint_url``, ``requester_pays``, …), and
so are the environment variables that it reads. `timeout` and `requests_timeout` bound each request.

An object of several parts is uploaded as temporary objects below ``.ckptio-parts/`` of the
backend's root, which compose requests join and which are then deleted. They are invisible through
the driver. What a killed process leaves behind, `GcsBackend.discard_uploads` removes, or a
lifecycle rule of the bucket::

    {"action": {"type": "Delete"}, "condition": {"age": 2, "matchesSuffix": [".ckptio-part"]}}

A bucket with a soft delete policy keeps deleted parts, at cost, for as long as the policy says.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Any, ClassVar

from ckptio.backend import Backend, Buffer, Fill, Limits, ObjectInfo, PutMode, Upload, check_key
from ckptio.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidKeyError,
    InvalidURIError,
    PreconditionFailedError,
    StorageError,
    StoreUnavailableError,
)
from ckptio.hooks import hookimpl
from ckptio_backends.gcs_client import Answer, Client, Request, object_path
from ckptio_backends.gcs_errors import foreign_errors
from ckptio_backends.gcs_session import check_options
from ckptio_backends.gcs_upload import MAX_PARTS, PARTS, ComposedUpload, upload_of

# After the modules that turn a missing gcsfs into advice: it needs fsspec.
from ckptio_backends.event_loop import PerProcess  # isort: skip

__all__ = ["GcsBackend"]

_DELETE_BATCH = 1000  # then credentials are looked at again


class GcsBackend(Backend):
    """Objects below one prefix of a bucket.

    Parameters
    ----------
    uri : str
        ``gs://bucket/prefix``; taken literally, nothing in it is percent-decoded.
    options : mapping
        gcsfs's.
    """

    limits = Limits(
        # An object of several parts is composed of temporary ones, each one more object to write,
        # to delete, and, in a bucket with soft delete, to pay for. Only what one connection would
        # take too long for is worth it.
        object_size=64 << 20,
        put_size=128 << 20,
        # Large parts and few requests at once, as Google's own transfer manager has them; on two
        # cores, four were 1.1 times as fast as eight, and 1.7 times as fast as 16 of half the size.
        part_size=32 << 20,
        max_parts=MAX_PARTS,
        max_part_size=5 << 30,
        max_put=5 << 30,
        read_size=16 << 20,
        read_gap=2 << 20,
        concurrency=min(16, max(4, 2 * (os.cpu_count() or 1))),
    )

    FIELDS: ClassVar[str] = "name,size,generation,updated"

    def __init__(self, uri: str, options: Mapping[str, Any]) -> None:
        super().__init__(uri)
        check_options(options)
        self.bucket, _, root = self.uri.partition("://")[2].partition("/")
        if not self.bucket:
            raise InvalidURIError(f"{uri!r} names no bucket: write gs://bucket/prefix")
        try:
            self._root = f"{check_key(root)}/" if root else ""
        except InvalidKeyError as error:
            raise InvalidURIError(f"{uri!r}: {error}") from error
        self._options = dict(options)
        self._client = PerProcess(lambda: Client(self._options))

    def __reduce__(self) -> tuple[type[GcsBackend], tuple[str, dict[str, Any]]]:
        return type(self), (self.uri, self._options)

    def put(
        self, key: str, data: Buffer, *, mode: PutMode = "overwrite", if_match: str | None = None
    ) -> ObjectInfo:
        name = self.name(key)
        if mode == "create":
            return self.store(name, data, "0", AlreadyExistsError)
        if if_match is None:
            return self.store(name, data)
        # A generation of 0 would mean that there must be no object.
        if not if_match.isascii() or not if_match.isdigit() or not int(if_match):
            raise PreconditionFailedError(
                f"{self.describe(key)} cannot have etag {if_match!r}: on gs:// it is a generation"
            )
        return self.store(name, data, if_match, PreconditionFailedError)

    def put_through(self, key: str, size: int, buffer: memoryview, fill: Fill) -> ObjectInfo:
        if not size:
            return self.put(key, b"")
        with self._errors(key):
            feed, answer = self._client.get().begin(self._creation(self.name(key)), size)
        try:
            feed.fill(buffer, fill)
        except BaseException:
            answer.cancel()
            raise
        with self._errors(key):
            return self._whole(self._parse(answer.result().json()), size)

    def start_upload(self, key: str, size: int, part_size: int) -> Upload:
        self.name(key)
        return ComposedUpload(self, key, size, part_size)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        end = start + len(view)
        if view:
            request = Request(
                method="GET",
                path=object_path(self.bucket, self.name(key)),
                query={"alt": "media"},
                into=view,
                start=start,
            )
            with self._errors(key):
                size = self._client.get().call(request).size
        else:
            size = self.head(key).size
        if size is None or size < end:
            raise CorruptionError(f"{self.describe(key)} ends at byte {size}, before byte {end}")

    def head(self, key: str) -> ObjectInfo:
        path = object_path(self.bucket, self.name(key))
        return self._look(key, Request(method="GET", path=path, query=self._fields()))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        below = self.name(prefix, prefix=True)
        for page in self._pages(prefix, {"prefix": below}):
            for item in page.get("items", ()):
                if _is_ours(item["name"][len(self._root) :]):
                    yield self._parse(item)

    def list_children(self, prefix: str = "") -> Iterator[str]:
        below = self.name(prefix, prefix=True)
        for page in self._pages(prefix, {"prefix": below, "delimiter": "/"}):
            found = [*page.get("prefixes", ()), *(item["name"] for item in page.get("items", ()))]
            for child in sorted(name[len(below) :] for name in found):
                if _is_ours(child.removesuffix("/")):
                    yield child

    def delete(self, keys: Iterable[str]) -> None:
        self.delete_names([self.name(key) for key in keys])

    def discard_uploads(self, older_than: float) -> int:
        limit = time.time() - older_than
        names, youngest = defaultdict[str, set[str]](set), defaultdict[str, float](float)
        for page in self._pages("", {"prefix": self._root}):
            for item in page.get("items", ()):
                if (upload := upload_of(name := item["name"])) is not None:
                    names[upload].add(name)
                    youngest[upload] = max(youngest[upload], self._parse(item).modified)
        old = [upload for upload, modified in youngest.items() if modified <= limit]
        self.delete_names(name for upload in old for name in names[upload])
        return len(old)

    def close(self) -> None:
        if (client := self._client.take()) is not None:
            client.close()

    # For uploads, which work with the names of temporary objects too.

    def name(self, key: str, *, prefix: bool = False) -> str:
        """Return the object's name in the bucket; that of a prefix ends in a slash."""
        check_key(key, prefix=prefix)
        if PARTS in key.split("/"):
            raise InvalidKeyError(f"keys cannot have a segment {PARTS!r}: {key!r}")
        return self._root + (f"{key}/" if prefix and key else key)

    def temporary_name(self, key: str) -> str:
        """Return the name in the bucket of what only an upload sees."""
        return self._root + key

    def store(
        self,
        name: str,
        data: Buffer,
        generation: str | None = None,
        conflict: type[StorageError] = StorageError,
    ) -> ObjectInfo:
        """Write one object, if it is at the wanted generation."""
        request = self._creation(name, data)
        if generation is not None:
            # In this form emulators keep the precondition too.
            query = {"uploadType": "multipart", "ifGenerationMatch": generation}
            headers, body = _multipart(name, data)
            request = replace(request, query={**request.query, **query}, headers=headers, body=body)
        return self.finish(name[len(self._root) :], request, memoryview(data).nbytes, conflict)

    def _creation(self, name: str, *body: Buffer) -> Request:
        query = {**self._fields(), "name": name, "uploadType": "media"}
        path = "upload/" + object_path(self.bucket)
        return Request(method="POST", path=path, query=query, body=body)

    def finish(
        self, key: str, request: Request, size: int, conflict: type[StorageError] = StorageError
    ) -> ObjectInfo:
        """Make a request that creates an object, which must have the given size then."""
        return self._whole(self._look(key, request, conflict), size)

    def _whole(self, info: ObjectInfo, size: int) -> ObjectInfo:
        if info.size != size:
            raise StoreUnavailableError(
                f"{self.describe(info.key)} was stored with {info.size} bytes instead of {size}"
            )
        return info

    def call_all(self, key: str, requests: Sequence[Request]) -> Sequence[Answer]:
        """Make several requests, in parallel, on behalf of one key."""
        with self._errors(key):
            return self._client.get().call_all(requests)

    def delete_names(self, names: Iterable[str]) -> None:
        """Delete objects by their names in the bucket."""
        waiting = iter(names)
        while batch := [*islice(waiting, _DELETE_BATCH)]:
            requests = [
                Request(method="DELETE", path=object_path(self.bucket, name), absent_ok=True)
                for name in batch
            ]
            key = batch[0][len(self._root) :] if len(batch) == 1 else ""
            self.call_all(key, requests)

    def _pages(self, prefix: str, query: dict[str, str]) -> Iterator[dict[str, Any]]:
        query = {**query, "fields": f"items({self.FIELDS}),prefixes,nextPageToken"}
        while True:
            request = Request(method="GET", path=object_path(self.bucket), query=query)
            with self._errors(prefix):
                page = self._client.get().call(request).json()
            yield page
            if not (token := page.get("nextPageToken")):
                return
            query["pageToken"] = token

    def _look(
        self, key: str, request: Request, conflict: type[StorageError] = StorageError
    ) -> ObjectInfo:
        with self._errors(key, conflict):
            return self._parse(self._client.get().call(request).json())

    def _errors(
        self, key: str, conflict: type[StorageError] = StorageError
    ) -> AbstractContextManager[None]:
        return foreign_errors(self.describe(key), self.bucket, self._client.get, conflict)

    def _fields(self) -> dict[str, str]:
        return {"fields": self.FIELDS}

    def _parse(self, item: Mapping[str, Any]) -> ObjectInfo:
        return ObjectInfo(
            item["name"][len(self._root) :],
            int(item["size"]),
            str(item["generation"]),
            datetime.fromisoformat(item["updated"]).timestamp(),
        )


def _is_ours(key: str) -> bool:
    """Whether a name in the bucket can be a key: no directory marker, no part of an upload."""
    segments = key.split("/")
    return PARTS not in segments and not {"", ".", ".."}.intersection(segments)


def _multipart(name: str, data: Buffer) -> tuple[dict[str, str], list[Buffer]]:
    """Return headers and body of an upload with its metadata in front."""
    boundary = secrets.token_hex(16)
    metadata = json.dumps({"name": name, "contentType": "application/octet-stream"})
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{metadata}\r\n"
        f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    tail = f"\r\n--{boundary}--\r\n"
    headers = {"Content-Type": f"multipart/related; boundary={boundary}"}
    return headers, [head.encode(), data, tail.encode()]


@hookimpl
def ckptio_open_backend(
    uri: str, scheme: str, storage_options: Mapping[str, Any]
) -> GcsBackend | None:
    """Open a prefix of a bucket."""
    return GcsBackend(uri, storage_options) if scheme in ("gs", "gcs") else None
