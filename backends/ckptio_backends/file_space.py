"""Space for a file before its content is there, where the system can reserve it."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

__all__ = ["reserve"]

_CANNOT = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def reserve(fd: int, size: int) -> None:
    """Give a new file its size, and the space for it if the file system can tell it at once.

    Into space that is there, several threads write side by side; into a hole, ext4 and others let
    only one write at a time. And a device without enough room says so before anything is written.

    `os.posix_fallocate` is not it: on a file system that cannot reserve, the C library writes to
    every block instead.
    """
    if not (_fallocate and _reserved(fd, size)):
        os.truncate(fd, size)


def _reserved(fd: int, size: int) -> bool:
    while _fallocate(fd, 0, 0, size):
        number = ctypes.get_errno()
        if number in _CANNOT:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def _found() -> Any:
    # Where a file's offset has the C library's plain type: 64 bits.
    if ctypes.sizeof(ctypes.c_long) < 8:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return function


_fallocate = _found()
