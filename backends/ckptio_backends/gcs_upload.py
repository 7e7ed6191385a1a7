"""Uploads in parts: temporary objects, joined by the service and then deleted."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING

from ckptio.backend import Buffer, ObjectInfo, Upload
from ckptio.errors import CkptioError, InvalidOptionError, StoreUnavailableError
from ckptio_backends.gcs_client import Request, object_path

if TYPE_CHECKING:
    from ckptio_backends.gcs import GcsBackend

__all__ = ["MAX_PARTS", "PARTS", "ComposedUpload", "part_name", "upload_of"]

PARTS = ".ckptio-parts"
_SUFFIX = ".ckptio-part"
_COMPONENTS = 32
"""Objects that one compose request joins: a limit of the service."""
MAX_PARTS = _COMPONENTS**3
_DELETE_PAUSES = (0.2, 1.0)

_log = logging.getLogger("ckptio")


def part_name(upload: str, what: str) -> str:
    """Return the key of a temporary object.

    All of them end alike, wherever they are, so that one lifecycle rule of a bucket catches them;
    they are not in a folder per upload, because a bucket with a hierarchical namespace would keep
    the empty folder.
    """
    return f"{PARTS}/{upload}-{what}{_SUFFIX}"


def upload_of(key: str) -> str | None:
    """Return which upload a temporary object belongs to, None for any other key."""
    *above, last = key.split("/")
    if not above or above[-1] != PARTS or not last.endswith(_SUFFIX):
        return None
    return "/".join([*above, last.partition("-")[0]])


class ComposedUpload(Upload):
    """Parts as objects of their own; `complete` composes them into one, in up to three levels.

    A single part stays in memory until `complete` puts it.
    """

    def __init__(self, backend: GcsBackend, key: str, size: int, part_size: int) -> None:
        self._backend = backend
        self._key = key
        self._size = size
        self._part_size = part_size
        self._id = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._only: bytes | None = b"" if size == 0 else None
        self._parts: dict[int, str] = {}
        self._made: set[str] = set()
        self._info: ObjectInfo | None = None

    def write_part(self, offset: int, data: Buffer) -> None:
        length = memoryview(data).nbytes
        wanted = min(self._part_size, self._size - offset)
        if offset % self._part_size or length != wanted:
            raise InvalidOptionError(
                f"{self._backend.describe(self._key)}: {length} bytes at {offset} are no part of "
                f"an upload of {self._size} bytes in parts of {self._part_size}"
            )
        if self._size <= self._part_size:
            self._only = bytes(data)
            return
        name = self._temporary(f"{offset:016x}")
        self._backend.store(name, data)
        with self._lock:
            self._parts[offset] = name

    def complete(self) -> ObjectInfo:
        if self._info is None:
            if self._only is not None:
                self._info = self._backend.put(self._key, self._only)
            else:
                self._info = self._compose()
        self._clean_up()
        return self._info

    def abort(self) -> None:
        self._only = None
        with self._lock:
            made = sorted(self._made)
        self._backend.delete_names(made)
        with self._lock:
            self._made.difference_update(made)

    def _temporary(self, what: str) -> str:
        """Return the name of a temporary object, noted for deletion before it can exist."""
        name = self._backend.temporary_name(part_name(self._id, what))
        with self._lock:
            self._made.add(name)
        return name

    def _compose(self) -> ObjectInfo:
        missing = [o for o in range(0, self._size, self._part_size) if o not in self._parts]
        if missing:
            raise InvalidOptionError(
                f"{self._backend.describe(self._key)}: the upload cannot be completed without its "
                f"part at {missing[0]} ({len(missing)} are missing)"
            )
        names = [name for _, name in sorted(self._parts.items())]
        level = 0
        while len(names) > _COMPONENTS:
            level += 1
            groups = [names[i : i + _COMPONENTS] for i in range(0, len(names), _COMPONENTS)]
            joined = [self._temporary(f"{level}-{i:06x}") for i in range(len(groups))]
            self._backend.call_all(
                self._key,
                [self._join(to, group) for to, group in zip(joined, groups, strict=True)],
            )
            names = joined
        whole = self._join(self._backend.name(self._key), names)
        return self._backend.finish(self._key, whole, self._size)

    def _join(self, to: str, names: list[str]) -> Request:
        content = {
            "sourceObjects": [{"name": name} for name in names],
            "destination": {"contentType": "application/octet-stream"},
        }
        return Request(
            method="POST",
            path=object_path(self._backend.bucket, to) + "/compose",
            query={"fields": self._backend.FIELDS},
            headers={"Content-Type": "application/json"},
            body=[json.dumps(content).encode()],
        )

    def _clean_up(self) -> None:
        # The object is there, whole: what stays behind must not make a failure of that.
        for pause in (*_DELETE_PAUSES, None):
            try:
                self.abort()
                return
            except CkptioError as error:
                if pause is None or not isinstance(error, StoreUnavailableError):
                    where = self._backend.describe(self._key)
                    _log.warning("temporary objects of %s stay behind: %s", where, error)
                    return
                time.sleep(pause)
