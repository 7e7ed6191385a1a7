"""The driver: the backend contract on an obstore store."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import obstore
from ckptio import (
    Backend,
    Buffer,
    CorruptionError,
    Limits,
    ObjectInfo,
    PreconditionFailedError,
    PutMode,
    StorageError,
    StoreUnavailableError,
    Upload,
    check_key,
)
from obstore.exceptions import BaseError

from ckptio_obstore.failures import errors
from ckptio_obstore.options import NO_RETRIES, RETRIES, Config, make_store
from ckptio_obstore.upload import StreamedUpload

__all__ = ["ObstoreBackend"]

MIB = 1 << 20
_BATCH = 256  # what Azure deletes in one request
_MIN_PARTS = {"s3": 5 * MIB, "gs": 5 * MIB, "az": 1}
_MAX_PARTS = {"s3": 10_000, "gs": 10_000, "az": 50_000}


class ObstoreBackend(Backend):
    """A bucket or container, or what is below a path in one.

    Parameters
    ----------
    uri : str
        ``s3://bucket/path``, ``gs://bucket/path`` or ``az://container/path``.
    storage_options : mapping
        As s3fs, gcsfs or adlfs take them, or by obstore's names.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        super().__init__(uri)
        self._options = dict(storage_options)
        self._config = Config.parse(self.uri, storage_options)
        scheme = self._config.scheme
        self.limits = Limits(
            part_size=8 * MIB,
            min_part_size=_MIN_PARTS[scheme],
            max_parts=_MAX_PARTS[scheme],
            max_part_size=4000 * MIB,
            max_put=4000 * MIB,
            read_size=8 * MIB,
            read_gap=1 * MIB,
            concurrency=12,
        )
        self._store = make_store(self._config, NO_RETRIES)
        self._streaming_store = make_store(self._config, RETRIES)
        self._uploads: weakref.WeakSet[StreamedUpload] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[ObstoreBackend], tuple[str, dict[str, Any]]]:
        return type(self), (self.uri, self._options)

    def put(
        self, key: str, data: Buffer, *, mode: PutMode = "overwrite", if_match: str | None = None
    ) -> ObjectInfo:
        path = self._path(key)
        condition: Any = mode
        if if_match is not None:
            condition = {"e_tag": f'"{if_match}"'}
            if self._config.scheme == "gs":  # compares generations
                condition = {"version": if_match}
        in_parts = condition == "overwrite" and len(data) > 2 * self.limits.part_size
        with self._errors(key):
            try:
                result = obstore.put(
                    self._store,
                    path,
                    data,
                    mode=condition,
                    use_multipart=in_parts,
                    chunk_size=self.limits.part_size,
                )
            except FileNotFoundError as error:
                if if_match is not None:
                    raise PreconditionFailedError(f"{self.describe(key)} is gone") from error
                raise
        return ObjectInfo(key, len(data), self._etag(result), time.time())

    def start_upload(self, key: str, size: int, part_size: int) -> Upload:
        path = self._path(key)
        if not size:
            return super().start_upload(key, size, part_size)

        def send(parts: Iterator[bytes]) -> ObjectInfo:
            with self._errors(key):
                result = obstore.put(
                    self._streaming_store,
                    path,
                    parts,
                    use_multipart=True,
                    chunk_size=part_size,
                    max_concurrency=self.limits.concurrency,
                )
            return ObjectInfo(key, size, self._etag(result), time.time())

        with self._errors(key):  # refuses a forked child here, not in the upload's thread
            upload = StreamedUpload(self.describe(key), size, part_size, send)
        self._uploads.add(upload)
        return upload

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        path, end = self._path(key), start + len(buffer)
        if not len(buffer):
            self._check_end(key, end)
            return
        with self._errors(key):
            try:
                data = obstore.get_range(self._store, path, start=start, end=end)
            except BaseError as error:
                # A range past the end is an error like any other here: the size tells.
                with suppress(StorageError):
                    self._check_end(key, end, error)
                raise
        if len(data) != len(buffer):
            self._check_end(key, end)
            raise StoreUnavailableError(
                f"{self.describe(key)}: asked for {len(buffer)} bytes, got {len(data)}"
            )
        buffer[:] = memoryview(data)

    def _check_end(self, key: str, end: int, cause: Exception | None = None) -> None:
        size = self.head(key).size
        if size < end:
            raise CorruptionError(
                f"{self.describe(key)} ends at byte {size}, before byte {end}"
            ) from cause

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._errors(key):
            return self._info(obstore.head(self._store, path))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        path = self._path(prefix, prefix=True)
        with self._errors(prefix):
            # Not every store lists in order.
            found = obstore.list(self._store, path or None).collect()
        yield from sorted(map(self._info, found), key=lambda info: info.key)

    def list_children(self, prefix: str = "") -> Iterator[str]:
        path = self._path(prefix, prefix=True)
        with self._errors(prefix):
            found = obstore.list_with_delimiter(self._store, path or None)
        skip = len(path) + 1 if path else 0
        names = [f"{below.rstrip('/')[skip:]}/" for below in found["common_prefixes"]]
        yield from sorted(names + [info["path"][skip:] for info in found["objects"]])

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        for i in range(0, len(paths), _BATCH):
            batch = paths[i : i + _BATCH]
            with self._errors(""):
                try:
                    obstore.delete(self._store, batch)
                except FileNotFoundError:
                    # One was absent; which others were deleted is not said.
                    for path in batch:
                        with suppress(FileNotFoundError):
                            obstore.delete(self._store, path)

    def discard_uploads(self, older_than: float) -> int:
        """Abort this instance's own uploads that nobody touched; obstore lists no others."""
        idle = [upload for upload in list(self._uploads) if upload.idle > older_than]
        for upload in idle:
            self._uploads.discard(upload)
            upload.abort()
        return len(idle)

    def _path(self, key: str, *, prefix: bool = False) -> str:
        check_key(key, prefix=prefix)
        return "/".join(filter(None, (self._config.root, key)))

    def _info(self, meta: Mapping[str, Any]) -> ObjectInfo:
        skip = len(self._config.root) + 1 if self._config.root else 0
        return ObjectInfo(
            meta["path"][skip:], meta["size"], self._etag(meta), meta["last_modified"].timestamp()
        )

    def _etag(self, found: Mapping[str, Any]) -> str:
        names = ("version", "e_tag") if self._config.scheme == "gs" else ("e_tag", "version")
        # Azure quotes an etag in one answer and not in another.
        return str(found[names[0]] or found[names[1]] or "").strip('"')

    def _errors(self, key: str) -> AbstractContextManager[None]:
        return errors(self.describe(key), self._config.endpoint)
