"""One object written part by part, from any thread and in any order, complete after the last."""

from __future__ import annotations

import threading

from ckptio.backend import Backend, Upload

__all__ = ["ObjectUpload"]


class ObjectUpload:
    """An object on its way; one that fits in a single part is put with one request.

    Parameters
    ----------
    size, part_size : int
        In bytes.
    """

    def __init__(self, backend: Backend, key: str, size: int, part_size: int) -> None:
        self.key = key
        self.size = size
        self.part_size = part_size
        self._backend = backend
        self._single = size <= part_size and size <= backend.limits.max_put
        self._lock = threading.Lock()
        self._left = len(self.starts)
        self._upload: Upload | None = None
        self._completed = False

    @property
    def starts(self) -> range:
        """Where its parts begin; an empty object has one part all the same."""
        return range(0, max(self.size, 1), self.part_size)

    def write(self, start: int, data: memoryview) -> None:
        """Write one part, and complete the object if it is the last one."""
        if self._single:
            self._backend.put(self.key, data)
            return
        with self._lock:
            if self._upload is None:
                self._upload = self._backend.start_upload(self.key, self.size, self.part_size)
            upload = self._upload
        upload.write_part(start, data)
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            upload.complete()
            self._completed = True

    def abort(self) -> None:
        """Give up an upload that was not completed."""
        if self._upload is not None and not self._completed:
            self._upload.abort()
