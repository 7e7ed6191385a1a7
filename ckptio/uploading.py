"""One object written part by part, from any thread and in any order, complete after the last."""

from __future__ import annotations

import hashlib
import threading
from contextlib import AbstractContextManager

from ckptio.backend import Backend, ObjectInfo, Upload

__all__ = ["Etags", "ObjectUpload"]


class Etags:
    """Whether a store's etags tell what it received: the MD5, or that of the parts' MD5s.

    S3 gives such etags, unless the object is encrypted with a key of its own, and so do most
    servers that speak its protocol. Elsewhere an etag is just a version: digests are computed only
    until the first one turns out so.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
    """

    def __init__(self) -> None:
        self.promising = True

    def acknowledge(self, info: ObjectInfo, digests: dict[int, bytes], parts: int) -> bool:
        """Compare an object's etag with the digests of what was sent, by the parts' offsets."""
        if len(digests) != parts:
            return False
        whole = b"".join(digest for _, digest in sorted(digests.items()))
        composed = hashlib.md5(whole, usedforsecurity=False).hexdigest()
        etag = info.etag.strip('"')
        same = etag == f"{composed}-{parts}" or (parts == 1 and etag == whole.hex())
        self.promising = self.promising and same
        return same


class ObjectUpload:
    """An object on its way; one that fits in a single part is put with one request.

    Parameters
    ----------
    size, part_size : int
        In bytes.
    turn : context manager
        Held for each part's request: see `Transfer`.
    etags : Etags, optional
        Shared by all uploads to one store, where it is to be known what the store received.

    Attributes
    ----------
    acknowledged : bool
        Whether the store has said that it received what was sent.
    """

    def __init__(
        self,
        backend: Backend,
        key: str,
        size: int,
        part_size: int,
        turn: AbstractContextManager[object],
        etags: Etags | None = None,
    ) -> None:
        self.key = key
        self.size = size
        self.part_size = part_size
        self.acknowledged = False
        self._backend = backend
        self._turn = turn
        self._etags = etags
        self._single = size <= part_size and size <= backend.limits.max_put
        self._lock = threading.Lock()
        self._left = len(self.starts)
        self._digests: dict[int, bytes] = {}
        self._upload: Upload | None = None
        self._completed = False

    @property
    def starts(self) -> range:
        """Where its parts begin; an empty object has one part all the same."""
        return range(0, max(self.size, 1), self.part_size)

    def write(self, start: int, data: memoryview) -> None:
        """Write one part, and complete the object if it is the last one."""
        if self._etags is not None and self._etags.promising:
            digest = hashlib.md5(data, usedforsecurity=False).digest()
            with self._lock:
                self._digests[start] = digest
        if self._single:
            with self._turn:
                info = self._backend.put(self.key, data)
            self._written(info)
            return
        with self._lock:
            if self._upload is None:
                self._upload = self._backend.start_upload(self.key, self.size, self.part_size)
            upload = self._upload
        with self._turn:
            upload.write_part(start, data)
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._written(upload.complete())

    def _written(self, info: ObjectInfo) -> None:
        self._completed = True
        if self._etags is not None:
            parts = len(self.starts)
            self.acknowledged = self._etags.acknowledge(info, self._digests, parts)

    def abort(self) -> None:
        """Give up an upload that was not completed."""
        if self._upload is not None and not self._completed:
            self._upload.abort()
