"""Answers' bodies into the caller's memory, for drivers whose SDK talks through urllib3.

What urllib3 hands out has passed through `bytes` of its own, which costs a third of a download's
processor time and holds the interpreter while it is copied. A body that is neither compressed nor
checked on its way is therefore read from the connection itself.
"""

from __future__ import annotations

import http.client
import socket
import sys
from contextlib import suppress
from typing import Any

import urllib3.exceptions

from ckptio.backend import Sink
from ckptio.errors import StoreUnavailableError

__all__ = ["ignore", "receive"]

_WAKE = 256 << 10
"""Bytes of a body for which a thread is woken. Waking it for each packet costs its sender, if that
is on the same machine: of one server's time in the kernel a fifth."""

_TAIL = 2 * _WAKE  # a body's last bytes, of which some may be in a buffer of http.client's or TLS's

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
        If the answer breaks off, or nothing comes in time (from a long body: less than 256 KiB).
    """
    # The name is private to urllib3; where it should change, its own way still works.
    connection = getattr(body, "_fp", None)
    if not isinstance(connection, http.client.HTTPResponse):
        connection = None
    source = body if connection is None else connection
    waits = _Waits(body, size)
    done = 0
    while done < size:
        piece = buffer[: min(len(buffer), size - done)]
        filled = 0
        try:
            while filled < len(piece):
                left = size - done - filled
                count = source.readinto(piece[filled : filled + waits.at_once(left)])
                if not count:
                    raise http.client.IncompleteRead(b"", left)
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


class _Waits:
    """Lets each wait for a body's bytes last until many are there, but for the last of them.

    A connection that is kept has to be as it was before; one on which reading fails is closed.

    Parameters
    ----------
    body : urllib3.HTTPResponse
    size : int
        Bytes of the body; short ones are waited for as ever.
    """

    def __init__(self, body: Any, size: int) -> None:
        self._socket: Any = None
        # Linux sees to it that the socket's buffer holds as much (before 4.18 it did not); other
        # systems were not tried.
        if sys.platform == "linux" and size > 2 * _TAIL:
            with suppress(AttributeError, OSError):
                sock = body.connection.sock
                if _wake_at(sock, _WAKE) >= _WAKE:
                    self._socket = sock
                else:
                    _wake_at(sock, 1)

    def at_once(self, left: int) -> int:
        """Return how many of the bytes that are left to ask for."""
        if self._socket is None:
            return left
        if left > _TAIL:
            return left - _TAIL
        _wake_at(self._socket, 1)
        self._socket = None
        return left


def _wake_at(sock: Any, count: int) -> int:
    """Set the bytes that wake a waiting reader; return how many the socket's buffer holds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
    held: int = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    return held


def ignore(piece: memoryview) -> None:
    """Leave a piece where it is: a sink for buffers that hold everything."""
