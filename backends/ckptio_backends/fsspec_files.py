"""What fsspec tells about a file, as the contract's `ObjectInfo`."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ckptio.backend import ObjectInfo

__all__ = ["modified", "object_info"]

# Every file system has names of its own for these.
_IDENTITY = ("ETag", "etag", "md5", "md5Hash", "checksum", "ino", "unique", "generation")
_TIMES = ("mtime", "modify", "modified", "LastModified", "last_modified", "updated")


def object_info(key: str, found: Mapping[str, Any]) -> ObjectInfo:
    """Return what is known of an object, with an etag made of all that changes with content."""
    size = int(found["size"])
    known = [str(found[name]) for name in _IDENTITY + _TIMES if found.get(name) is not None]
    etag = hashlib.blake2b("\0".join([str(size), *known]).encode(), digest_size=12).hexdigest()
    return ObjectInfo(key, size, etag, modified(found))


def modified(found: Mapping[str, Any]) -> float:
    """Return when a file changed, in seconds since the epoch."""
    for name in _TIMES:
        value = found.get(name)
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # not a time that we can read
                digits = value.partition(".")[0]
                if digits.isdigit():  # as FTP writes it
                    return datetime.strptime(digits, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()
                return datetime.fromisoformat(value).timestamp()
    return time.time()  # never older than anything: nothing is collected by mistake
