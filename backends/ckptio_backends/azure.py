"""``az://``, ``abfs://``, ``abfss://``: Azure Blob Storage and Data Lake Storage Gen2.

It uses the Azure SDK's synchronous client from the core's threads, and lends it the caller's own
memory: bodies go out from there and come in to there, without a copy of a part. Measured beside
the asynchronous client it moves as much with about half the processor time, and needs no event
loop. Options and URIs are adlfs's: see `ckptio_backends.azure_account`.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
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
    AlreadyExistsError,
    CorruptionError,
    DriverUnavailableError,
    NotFoundError,
    PreconditionFailedError,
)
from ckptio.hooks import hookimpl
from ckptio.options import SaveOptions

try:
    from azure.core import MatchConditions
    from azure.core.exceptions import HttpResponseError
    from azure.storage.blob import BlobBlock, BlobClient, BlobPrefix, BlobProperties

    from ckptio_backends.azure_account import (
        Connection,
        Place,
        check_name,
        check_options,
        connect,
    )
    from ckptio_backends.azure_bodies import Incoming, Outgoing
    from ckptio_backends.azure_errors import mapped, refusal
    from ckptio_backends.event_loop import PerProcess
    from ckptio_backends.http_bodies import ignore
except ImportError as error:
    raise DriverUnavailableError(
        f"Azure Blob Storage needs more packages ({error}): pip install 'ckptio[azure]'"
    ) from error

__all__ = ["AzureBackend"]

_SCHEMES = ("az", "abfs", "abfss")
_BATCH = 256  # subrequests in one batch: the service's limit
_PAGE = 5000  # names in one answer: the service's limit
# Threads that wait for one another's interpreter cost more than they bring.
_REQUESTS = min(16, max(8, 4 * (os.cpu_count() or 1)))


def _part_size(requests: int) -> int:
    # A request costs the SDK 6 ms of CPU time: as large as a save's memory allows for all of them.
    return max(4 << 20, SaveOptions().memory // requests)


class AzureBackend(Backend):
    """Block blobs below one prefix of a container.

    Parameters
    ----------
    uri : str
        ``az://container/prefix`` or ``abfs[s]://container@account.dfs.core.windows.net/prefix``.
    storage_options : mapping
        As adlfs takes them.
    """

    limits = Limits(
        part_size=_part_size(_REQUESTS),
        max_part_size=4000 << 20,
        max_parts=50_000,
        max_put=5000 << 20,
        read_size=64 << 20,  # each request costs processor time: 30 were 4 % faster than 59
        read_gap=1 << 20,
        read_buffer=1 << 20,
        concurrency=_REQUESTS,
    )

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        super().__init__(uri)
        place = Place.parse(self.uri)
        options = dict(storage_options)
        check_options(options, place)
        self._options = options
        self._root = place.root
        self._connections = PerProcess(lambda: connect(place, options))
        self.request_options = {"timeout": options["timeout"]} if options.get("timeout") else {}
        if wanted := options.get("max_concurrency"):
            self.limits = replace(self.limits, concurrency=wanted, part_size=_part_size(wanted))
        self._connections.get()  # so that options which make no client fail here

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.uri, self._options)

    @property
    def _connection(self) -> Connection:
        return self._connections.get()

    def put(
        self, key: str, data: Buffer, *, mode: PutMode = "overwrite", if_match: str | None = None
    ) -> ObjectInfo:
        view, blob = memoryview(data).cast("B"), self.blob(key)
        conditions: dict[str, Any] = {"overwrite": mode != "create"}
        if if_match is not None:
            conditions |= {
                "etag": f'"{if_match}"',
                "match_condition": MatchConditions.IfNotModified,
            }
        try:
            with self.errors(key):
                answer = blob.upload_blob(
                    b"",
                    length=len(view),
                    raw_request_hook=Outgoing(view),
                    **conditions,
                    **self.request_options,
                )
        except PreconditionFailedError as error:
            if mode == "create":  # how the service answers while another creator is at work
                raise AlreadyExistsError(f"{self.describe(key)} already exists") from error
            raise
        except NotFoundError as error:
            if if_match is None or _code(error.__cause__) == "ContainerNotFound":
                raise
            raise PreconditionFailedError(
                f"{self.describe(key)} changed: wanted etag {if_match!r}, it is gone"
            ) from error
        return _written(key, len(view), answer)

    def start_upload(self, key: str, size: int, part_size: int) -> _AzureUpload:
        return _AzureUpload(self, key, size, part_size)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        if not len(buffer):
            size = self.head(key).size
            if start > size:
                raise CorruptionError(
                    f"{self.describe(key)} ends at byte {size}, before byte {start}"
                )
            return
        view = buffer.cast("B")
        self.read_through(key, start, len(view), view, ignore)

    def read_through(self, key: str, start: int, size: int, buffer: memoryview, sink: Sink) -> None:
        where = self.describe(key)
        blob, incoming = self.blob(key), Incoming(where, start, size, buffer, sink)
        with self.errors(key):
            try:
                blob.download_blob(start, size, raw_response_hook=incoming, **self.request_options)
            except HttpResponseError as error:
                if error.status_code != 416:
                    raise
                found = self.head(key).size
                raise CorruptionError(
                    f"{where} ends at byte {found}, before byte {start + size}"
                ) from error
        incoming.check()

    def head(self, key: str) -> ObjectInfo:
        blob = self.blob(key)
        with self.errors(key):
            found = blob.get_blob_properties(**self.request_options)
        if _is_directory(found):
            raise NotFoundError(f"{self.describe(key)} does not exist: it is a directory")
        return _info(key, found)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        below = self._below(prefix)
        skip = len(self._below(""))
        with self.errors(prefix):
            found = [
                _info(blob.name[skip:], blob)
                for blob in self._connection.container.list_blobs(below, **_listing())
                if not blob.name.endswith("/") and not _is_directory(blob)
            ]
        # The service sorts by name, but whole directories at a time where those are real.
        found.sort(key=lambda info: info.key)
        yield from found

    def list_children(self, prefix: str = "") -> Iterator[str]:
        below = self._below(prefix)
        skip = len(below)
        names = set()
        with self.errors(prefix):
            for item in self._connection.container.walk_blobs(below, **_listing()):
                name = item.name[skip:]
                if isinstance(item, BlobPrefix) or _is_directory(item):
                    name = name.rstrip("/") + "/"
                if name.strip("/"):
                    names.add(name)
        yield from sorted(names)

    def delete(self, keys: Iterable[str]) -> None:
        names = {self._name(key): key for key in keys}
        pending = iter(names)
        while batch := [*itertools.islice(pending, _BATCH)]:
            with self.errors(names[batch[0]]):
                answers = self._connection.container.delete_blobs(
                    *batch, raise_on_any_failure=False
                )
                for answer in answers:
                    code = answer.headers.get("x-ms-error-code", "")
                    absent = answer.status_code == 404 and code != "ContainerNotFound"
                    if answer.status_code >= 300 and not absent:
                        where = f"deleting {len(batch)} objects of {self.uri}"
                        raise refusal(answer.status_code, code, where, self._connection.endpoint)

    def close(self) -> None:
        connection = self._connections.take()
        if connection is not None:
            connection.close()

    def errors(self, key: str) -> AbstractContextManager[None]:
        """Turn what the SDK raises into the contract's errors."""
        return mapped(self.describe(key), self._connection.endpoint)

    def blob(self, key: str) -> BlobClient:
        """Return the SDK's client for a key."""
        return self._connection.container.get_blob_client(self._name(key))

    def _name(self, key: str) -> str:
        check_key(key)
        return check_name(f"{self._root}/{key}" if self._root else key)

    def _below(self, prefix: str) -> str:
        check_key(prefix, prefix=True)
        name = "/".join(part for part in (self._root, prefix) if part)
        return name + "/" if name else ""


class _AzureUpload(Upload):
    """Blocks staged under ids of this upload's own, so that two writers of a key never mix.

    Staged blocks are invisible; what is never committed is discarded by the service after a week,
    and cannot be deleted before.
    """

    def __init__(self, backend: AzureBackend, key: str, size: int, part_size: int) -> None:
        self._backend = backend
        self._key = key
        self._size = size
        self._part_size = part_size
        self._token = secrets.token_hex(16)
        backend.blob(key)  # an impossible key is refused here

    def write_part(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if not view:
            return  # the service has no empty blocks
        with self._backend.errors(self._key):
            self._backend.blob(self._key).stage_block(
                self._block_id(offset),
                b"",
                length=len(view),
                raw_request_hook=Outgoing(view),
                **self._backend.request_options,
            )

    def complete(self) -> ObjectInfo:
        # Repeating it after its answer was lost is fine: the ids name the committed blocks then.
        blocks = [BlobBlock(self._block_id(at)) for at in range(0, self._size, self._part_size)]
        with self._backend.errors(self._key):
            answer = self._backend.blob(self._key).commit_block_list(
                blocks, **self._backend.request_options
            )
        return _written(self._key, self._size, answer)

    def abort(self) -> None:
        """Nothing is visible, and the service discards what was staged."""

    def _block_id(self, offset: int) -> str:
        return f"{self._token}-{offset // self._part_size:08d}"


def _written(key: str, size: int, answer: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(key, size, answer["etag"].strip('"'), answer["last_modified"].timestamp())


def _info(key: str, found: BlobProperties) -> ObjectInfo:
    return ObjectInfo(key, found.size, found.etag.strip('"'), found.last_modified.timestamp())


def _listing() -> dict[str, Any]:
    # Where directories are real they are listed too; only metadata tells them apart.
    return {"include": ["metadata"], "results_per_page": _PAGE}


def _is_directory(found: BlobProperties) -> bool:
    return bool((found.metadata or {}).get("hdi_isfolder", "").lower() == "true")


def _code(error: BaseException | None) -> str:
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code))


@hookimpl
def ckptio_open_backend(
    uri: str, scheme: str, storage_options: Mapping[str, Any]
) -> AzureBackend | None:
    """Open a prefix of a container; storage options are those of adlfs."""
    return AzureBackend(uri, storage_options) if scheme in _SCHEMES else None
