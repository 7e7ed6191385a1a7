"""A request's body on its way from the thread that makes it to the event loop that sends it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from ckptio.backend import Fill

__all__ = ["Feed"]

_PIECE = 512 << 10
_AHEAD = 2
"""Pieces that are made before they can be sent."""


class Feed:
    """So many bytes, a few pieces ahead of whoever reads them.

    Parameters
    ----------
    size : int
        Of all pieces together.
    loop : AbstractEventLoop
        On which they are read.
    """

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop) -> None:
        self.size = size
        self._loop = loop
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = threading.Semaphore(_AHEAD)
        self._ended = False

    def fill(self, buffer: memoryview, fill: Fill) -> None:
        """Make all pieces, by way of a buffer; return early if nobody reads any more.

        Parameters
        ----------
        fill : callable
            As in `ckptio.Backend.put_through`.
        """
        for at in range(0, self.size, len(buffer)):
            filled = buffer[: min(len(buffer), self.size - at)]
            fill(at, filled)
            for start in range(0, len(filled), _PIECE):
                self._room.acquire()
                if self._ended:
                    return
                # A copy: what sends it may hold it for longer than the buffer keeps it.
                piece = bytes(filled[start : start + _PIECE])
                self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def end(self) -> None:
        """Let the thread go on: nobody reads any more."""
        self._ended = True
        self._room.release()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self.size
        while left:
            piece = await self._pieces.get()
            left -= len(piece)
            yield piece
            self._room.release()
