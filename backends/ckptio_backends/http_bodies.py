"""Answers' bodies into the caller's memory, for drivers whose SDK talks through urllib3.

What urllib3 hands out has passed through `bytes` of its own, which costs a third of a download's
processor time and holds the interpreter while it is copied. A body that is neither compressed nor
checked on its way is therefore read from the connection itself.
"""

from __future__ import annotations

import http.client
from typing import Any

import urllib3.exceptions

from ckptio.backend import Sink
from ckptio.errors import StoreUnavailableError

__all__ = ["ignore", "receive"]

# urllib3's own errors, and those of the connection underneath.
_BROKEN = (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)


def receive(body: Any, size: int, buffer: memoryview, sink: Sink, what: str) -> None:
    """Pass a body's bytes on through a buffer.

    Parameters
    ----------
    body : urllib3.HTTPResponse
        Its connection returns to the pool with its last byte.
    size : int
        Bytes of the body.
    buffer, sink : memoryview, callable
        As in `ckptio.Backend.read_through`.
    what : str
        What is read from where, for messages.

    Raises
    ------
    StoreUnavailableError
        If the answer breaks off, or nothing comes in time.
    """
    # The name is private to urllib3; where it should change, its own way still works.
    connection = getattr(body, "_fp", None)
    if not isinstance(connection, http.client.HTTPResponse):
        connection = None
    source = body if connection is None else connection
    done = 0
    while done < size:
        piece = buffer[: min(len(buffer), size - done)]
        filled = 0
        try:
            while filled < len(piece):
                count = source.readinto(piece[filled:])
                if not count:
                    raise http.client.IncompleteRead(b"", size - done - filled)
                filled += count
            if done + filled == size and connection is not None and connection.isclosed():
                body.read()  # nothing is left: urllib3 notices, and keeps the connection
        except _BROKEN as error:
            silent = isinstance(error, TimeoutError | urllib3.exceptions.ReadTimeoutError)
            how = "the store stopped answering" if silent else "the answer broke off"
            raise StoreUnavailableError(
                f"{what}: {how} after {done + filled} of {size} bytes ({type(error).__name__})"
            ) from error
        sink(piece)
        done += filled


def ignore(piece: memoryview) -> None:
    """Leave a piece where it is: a sink for buffers that hold everything."""
