"""``s3://bucket/prefix``: Amazon S3 and what speaks its protocol.

Storage options are spelled as for s3fs.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any

from ckptio.backend import (
    Backend,
    Buffer,
    Limits,
    ObjectInfo,
    PutMode,
    Sink,
    Upload,
    check_key,
)
from ckptio.errors import (
    CorruptionError,
    DriverUnavailableError,
    InvalidKeyError,
    InvalidURIError,
    NotFoundError,
    StorageError,
    StoreUnavailableError,
)
from ckptio.hooks import hookimpl

try:
    from botocore.exceptions import ClientError
    from botocore.response import StreamingBody

    from ckptio_backends.event_loop import PerProcess
    from ckptio_backends.http_bodies import ignore, receive
    from ckptio_backends.s3_client import Body, Settings, connect
    from ckptio_backends.s3_errors import code_of, error_of_code, mapped
except ImportError as error:
    raise DriverUnavailableError(
        f"s3:// needs more packages ({error}): pip install 'ckptio[s3]'"
    ) from error

__all__ = ["S3Backend"]

# Access points are named by an ARN, which holds a slash of its own.
_PLACE = re.compile(r"s3://(arn:[^/]+:accesspoint[:/][^/]+|[^/]+)(?:/(.*))?", re.DOTALL)
_BATCH = 1000  # keys that one DeleteObjects takes
_OWNER = "ckptio-upload"


class S3Backend(Backend):
    """Objects of one bucket below one prefix."""

    limits = Limits(
        part_size=16 << 20,
        min_part_size=5 << 20,
        max_part_size=5 << 30,
        max_parts=10_000,
        max_put=5 << 30,
        read_size=32 << 20,
        read_gap=1 << 20,
        read_buffer=1 << 20,
        # Threads that wait for one another's interpreter cost more than they bring.
        concurrency=min(16, max(8, 4 * (os.cpu_count() or 1))),
    )

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(uri)
        place = _PLACE.fullmatch(self.uri)
        if place is None:
            raise InvalidURIError(f"{uri!r} names no bucket: write s3://bucket/prefix")
        self._bucket, root = place[1], place[2] or ""
        try:
            check_key(root, prefix=True)
        except InvalidKeyError as error:
            raise InvalidURIError(f"{uri!r}: {error}") from error
        self._root = f"{root}/" if root else ""
        self._options = dict(storage_options or {})
        self._settings = Settings.parse(self._options)
        if self._settings.concurrency:
            self.limits = replace(self.limits, concurrency=self._settings.concurrency)
        self._endpoint: str = self._settings.client.get("endpoint_url") or "Amazon S3"
        self._bucket_seen = False
        self._client = PerProcess(self._connect)

    def __reduce__(self) -> tuple[type[S3Backend], tuple[str, dict[str, Any]]]:
        return type(self), (self.uri, self._options)

    def put(
        self, key: str, data: Buffer, *, mode: PutMode = "overwrite", if_match: str | None = None
    ) -> ObjectInfo:
        condition: dict[str, str] = {"IfNoneMatch": "*"} if mode == "create" else {}
        if if_match is not None:
            condition["IfMatch"] = if_match
        path, body = self._path(key), Body(data)
        with self.errors(key, condition):
            answer = self.call("put_object", Key=path, Body=body, **condition)
        return ObjectInfo(key, len(body), answer["ETag"], _date(answer))

    def start_upload(self, key: str, size: int, part_size: int) -> _S3Upload:
        return _S3Upload(self, key, self._path(key), size, part_size)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        if not len(buffer):
            if self.head(key).size < start:
                raise CorruptionError(f"{self.describe(key)} ends before byte {start}")
            return
        self.read_through(key, start, len(buffer), buffer, ignore)

    def read_through(self, key: str, start: int, size: int, buffer: memoryview, sink: Sink) -> None:
        path = self._path(key)
        with self.errors(key):
            answer = self.call("get_object", Key=path, Range=f"bytes={start}-{start + size - 1}")
            body = answer["Body"]
            try:
                self._check_range(key, answer, start, size)
                what = f"{self.describe(key)} ({self._endpoint})"
                receive(_raw(body), size, buffer, sink, what)
            finally:
                body.close()

    def _check_range(self, key: str, answer: Mapping[str, Any], start: int, size: int) -> None:
        length, content_range = answer["ContentLength"], answer.get("ContentRange", "")
        total = content_range.rpartition("/")[2] if content_range else str(start + length)
        if total.isdecimal() and int(total) < start + size:
            raise CorruptionError(
                f"{self.describe(key)} ends at byte {total}, before byte {start + size}"
            )
        right = content_range.startswith(f"bytes {start}-") if content_range else not start
        if not right or length != size:
            raise StoreUnavailableError(
                f"{self.describe(key)} ({self._endpoint}): asked for {size} bytes from {start}, "
                f"the server sends {length} bytes ({content_range or 'the whole object'})"
            )

    def read(self, key: str) -> bytes:
        """Return one whole object, in one request."""
        path = self._path(key)
        with self.errors(key):
            body = self.call("get_object", Key=path)["Body"]
            try:
                return bytes(body.read())
            finally:
                body.close()

    def head(self, key: str) -> ObjectInfo:
        answer = self.look_up(key)
        modified = answer["LastModified"].timestamp()
        return ObjectInfo(key, answer["ContentLength"], answer["ETag"], modified)

    def look_up(self, key: str) -> Mapping[str, Any]:
        """Return S3's answer to a HEAD."""
        path = self._path(key)
        try:
            with self.errors(key):
                answer: Mapping[str, Any] = self.call("head_object", Key=path)
        except NotFoundError:
            self._check_bucket()
            raise
        return answer

    def _check_bucket(self) -> None:
        """Tell a missing bucket from a missing key, which the answer to a HEAD does not."""
        if self._bucket_seen:
            return
        try:
            with self.errors():
                self.call("head_bucket")
        except NotFoundError as error:
            raise NotFoundError(
                f"{self.uri} ({self._endpoint}): the bucket {self._bucket!r} does not exist"
            ) from error
        except StorageError:
            pass  # it may be forbidden to look at the bucket: then it is the key that is missing
        self._bucket_seen = True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        below = self._below(prefix)
        found = []
        with self.errors(prefix):
            for page in self._pages("list_objects_v2", Prefix=below):
                for entry in page.get("Contents", ()):
                    if (key := self._key(entry["Key"])) is not None:
                        modified = entry["LastModified"].timestamp()
                        found.append(ObjectInfo(key, entry["Size"], entry["ETag"], modified))
        # Not every server lists in the order of the keys; Amazon's directory buckets don't either.
        yield from sorted(found, key=lambda info: info.key)

    def list_children(self, prefix: str = "") -> Iterator[str]:
        below = self._below(prefix)
        names = set()
        with self.errors(prefix):
            for page in self._pages("list_objects_v2", Prefix=below, Delimiter="/"):
                names |= {entry["Prefix"][len(below) :] for entry in page.get("CommonPrefixes", ())}
                names |= {entry["Key"][len(below) :] for entry in page.get("Contents", ())}
        yield from sorted(names - {"", "/"})

    def delete(self, keys: Iterable[str]) -> None:
        paths = iter([self._path(key) for key in keys])
        while batch := [*islice(paths, _BATCH)]:
            with self.errors():
                answer = self.call(
                    "delete_objects",
                    Delete={"Objects": [{"Key": path} for path in batch], "Quiet": True},
                )
            failed = [e for e in answer.get("Errors", ()) if e.get("Code") != "NoSuchKey"]
            if failed:
                raise self._not_deleted(failed)

    def _not_deleted(self, failed: Sequence[Mapping[str, str]]) -> Exception:
        kinds = {error_of_code(entry.get("Code", "")) for entry in failed}
        listed = "; ".join(
            f"{entry.get('Key', '')[len(self._root) :]}: {entry.get('Code')} {entry.get('Message')}"
            for entry in failed[:3]
        )
        # Trying again helps only if it may help for each of them.
        kind = kinds.pop() if len(kinds) == 1 else StorageError
        return kind(f"{self.uri} ({self._endpoint}): {len(failed)} not deleted: {listed}")

    def discard_uploads(self, older_than: float) -> int:
        limit, count = time.time() - older_than, 0
        with self.errors():
            pages = [*self._pages("list_multipart_uploads", Prefix=self._root)]
        for entry in (entry for page in pages for entry in page.get("Uploads", ())):
            key = self._key(entry["Key"])
            if key is not None and entry["Initiated"].timestamp() <= limit:
                count += self.abort_upload(key, entry["Key"], entry["UploadId"])
        return count

    def abort_upload(self, key: str, path: str, upload_id: str) -> bool:
        """Abort a multipart upload; return whether it was still there."""
        with self.errors(key):
            try:
                self.call("abort_multipart_upload", Key=path, UploadId=upload_id)
            except ClientError as error:
                if code_of(error) != "NoSuchUpload":
                    raise
                return False
        return True

    @property
    def user_metadata(self) -> Mapping[str, str]:
        """Metadata that the user wants on every object."""
        return dict(self._settings.request.get("Metadata", {}))

    def close(self) -> None:
        client = self._client.take()
        if client is not None:
            client.close()

    def call(self, method: str, **parameters: Any) -> Any:
        """Send one request about the bucket."""
        client = self._client.get()
        return getattr(client, method)(**self._parameters(client, method, parameters))

    def _pages(self, method: str, **parameters: Any) -> Iterator[Mapping[str, Any]]:
        client = self._client.get()
        pages: Iterable[Mapping[str, Any]] = client.get_paginator(method).paginate(
            **self._parameters(client, method, parameters)
        )
        yield from pages

    def _parameters(
        self, client: Any, method: str, parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        given = {"Bucket": self._bucket, **parameters}
        if self._settings.request:
            operation = client.meta.method_to_api_mapping[method]
            known = client.meta.service_model.operation_model(operation).input_shape.members
            extra = {k: v for k, v in self._settings.request.items() if k in known}
            return {**extra, **given}
        return given

    def _connect(self) -> Any:
        client = connect(self._settings)
        self._endpoint = client.meta.endpoint_url
        return client

    def errors(
        self, key: str = "", condition: Collection[str] = ()
    ) -> AbstractContextManager[None]:
        """Turn what botocore raises into the contract's errors."""
        return mapped(self.describe(key), self._bucket, lambda: self._endpoint, condition)

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    def _below(self, prefix: str) -> str:
        return self._root + (f"{check_key(prefix)}/" if prefix else "")

    def _key(self, path: str) -> str | None:
        """Return the key of what a listing names; None for what no key can name."""
        try:
            return check_key(path[len(self._root) :])
        except InvalidKeyError:
            return None  # a marker that stands for a directory, or another program's odd name


class _S3Upload(Upload):
    """A multipart upload: it becomes an object when it is completed, and not before."""

    def __init__(self, backend: S3Backend, key: str, path: str, size: int, part_size: int) -> None:
        self._backend = backend
        self._key = key
        self._path = path
        self._size = size
        self._part_size = part_size
        self._parts: dict[int, dict[str, Any]] = {}
        self._info: ObjectInfo | None = None
        # Written into the object's metadata: tells it from anyone else's under the same key.
        self._token = secrets.token_hex(16)
        with backend.errors(key):
            answer = backend.call(
                "create_multipart_upload",
                Key=path,
                Metadata={**backend.user_metadata, _OWNER: self._token},
            )
        self._id: str = answer["UploadId"]

    def write_part(self, offset: int, data: Buffer) -> None:
        number = offset // self._part_size + 1
        with self._backend.errors(self._key):
            answer = self._backend.call(
                "upload_part",
                Key=self._path,
                UploadId=self._id,
                PartNumber=number,
                Body=Body(data),
            )
        # S3 wants back the checksums of the parts, if the user turned them on.
        checksums = {k: v for k, v in answer.items() if k.startswith("Checksum")}
        self._parts[number] = {"PartNumber": number, "ETag": answer["ETag"], **checksums}

    def complete(self) -> ObjectInfo:
        if self._info is None:
            if not self._size:
                self.write_part(0, b"")
            self._info = self._complete()
        return self._info

    def _complete(self) -> ObjectInfo:
        where = self._backend.describe(self._key)
        wanted = max(1, -(-self._size // self._part_size))
        if len(self._parts) != wanted:
            raise StorageError(f"{where}: {len(self._parts)} of {wanted} parts were written")
        with self._backend.errors(self._key):
            try:
                answer = self._backend.call(
                    "complete_multipart_upload",
                    Key=self._path,
                    UploadId=self._id,
                    MultipartUpload={"Parts": [part for _, part in sorted(self._parts.items())]},
                )
            except ClientError as error:
                if code_of(error) != "NoSuchUpload":
                    raise
                return self._completed_before(error)
        return ObjectInfo(self._key, self._size, answer["ETag"], _date(answer))

    def _completed_before(self, error: Exception) -> ObjectInfo:
        """Look whether an earlier try succeeded and only its answer was lost."""
        lost = StorageError(
            f"{self._backend.describe(self._key)}: the upload is gone: somebody aborted it, or a "
            "lifecycle rule of the bucket"
        )
        try:
            found = self._backend.look_up(self._key)
        except NotFoundError:
            raise lost from error
        if found.get("Metadata", {}).get(_OWNER) != self._token:
            raise lost from error
        modified = found["LastModified"].timestamp()
        return ObjectInfo(self._key, found["ContentLength"], found["ETag"], modified)

    def abort(self) -> None:
        self._backend.abort_upload(self._key, self._path, self._id)


def _raw(body: Any) -> Any:
    """Return what urllib3 made of an answer; botocore's wrapper if that computes a checksum."""
    return getattr(body, "_raw_stream", body) if type(body) is StreamingBody else body


def _date(answer: Mapping[str, Any]) -> float:
    """Return the server's time of an answer: that of a write is not told otherwise."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date).timestamp() if date else time.time()


@hookimpl
def ckptio_open_backend(
    uri: str, scheme: str, storage_options: Mapping[str, Any]
) -> S3Backend | None:
    """Open ``s3://bucket/prefix``; storage options are s3fs's."""
    if scheme != "s3":
        return None
    return S3Backend(uri, storage_options)
