"""Bodies of requests and answers that are the caller's own memory, through the SDK's raw hooks.

The SDK itself would gather every body in ``bytes`` of its own, for a download more than once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckptio.backend import Sink
from ckptio.errors import CorruptionError, StorageError, StoreUnavailableError
from ckptio_backends.http_bodies import receive

__all__ = ["Incoming", "Outgoing"]

_SENT_PIECE = 256 << 10
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Outgoing:
    """A ``raw_request_hook`` that sends the caller's memory in place of the request's body.

    It goes out in pieces, because the socket's timeout is for each: with one for a whole part, a
    slow line would never get a part through.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, len(self._view), _SENT_PIECE):
            yield self._view[start : start + _SENT_PIECE]

    def __call__(self, request: Any) -> None:
        if self._view:
            request.http_request.data = self


class Incoming:
    """A ``raw_response_hook`` that reads the answer's body through the caller's memory.

    Parameters
    ----------
    where : str
        The object's URI, for messages.
    start : int
        The first byte asked for.
    size : int
        Bytes asked for; all of them come, or an error is raised.
    buffer, sink : memoryview, callable
        As in `ckptio.Backend.read_through`.
    """

    def __init__(self, where: str, start: int, size: int, buffer: memoryview, sink: Sink) -> None:
        self._where = where
        self._start = start
        self._size = size
        self._buffer = buffer
        self._sink = sink
        self._came = False

    def __call__(self, response: Any) -> None:
        answer = response.http_response
        if answer.status_code >= 300:
            return  # the SDK raises what that is
        try:
            self._check_range(answer.status_code, answer.headers.get("Content-Range", ""))
            what = f"{self._where}, byte {self._start}"
            raw = answer.internal_response.raw
            receive(raw, self._size, self._buffer, self._sink, what)
            self._came = True
        except BaseException:
            # A connection with half a body in it is of no more use.
            answer.internal_response.close()
            raise

    def check(self) -> None:
        """Raise unless the body came."""
        if not self._came:
            raise StoreUnavailableError(f"{self._where}: no data came for byte {self._start}")

    def _check_range(self, status: int, content_range: str) -> None:
        match = _RANGE.fullmatch(content_range)
        start, stop = (int(match[1]), int(match[2]) + 1) if match else (-1, -1)
        wanted = self._start + self._size
        if status != 206 or start != self._start or stop > wanted or match is None:
            raise StorageError(
                f"{self._where}: bytes {self._start}:{wanted} were asked for, the store answered "
                f"{status} with {content_range or 'no range'!r}"
            )
        if stop < wanted:
            raise CorruptionError(f"{self._where} ends at byte {match[3]}, before byte {wanted}")
