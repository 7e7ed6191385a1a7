"""What file systems behind fsspec raise, as the contract's errors."""

from __future__ import annotations

import errno

from ckptio.errors import (
    AlreadyExistsError,
    InvalidKeyError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
    StoreUnavailableError,
)

__all__ = ["translate"]

_ERRORS: list[tuple[type[Exception], type[StorageError]]] = [
    (FileNotFoundError, NotFoundError),
    (FileExistsError, AlreadyExistsError),
    (PermissionError, PermissionDeniedError),
    (NotADirectoryError, InvalidKeyError),
    (IsADirectoryError, InvalidKeyError),
    (ConnectionError, StoreUnavailableError),
    (TimeoutError, StoreUnavailableError),
    (EOFError, StoreUnavailableError),
]
# Of libraries that may not be installed, so by name: ftplib, aiohttp, paramiko.
_UNAVAILABLE = {"error_temp", "ClientConnectionError", "ServerTimeoutError", "SSHException"}


def translate(error: Exception, where: str) -> StorageError:
    """Return the contract's error for what a file system raised at a place."""
    text = str(error) or type(error).__name__
    if isinstance(error, NotImplementedError):
        text = f"this file system cannot do that (is it read-only?): {text}"
    return _kind(error)(f"{where}: {text}")


def _kind(error: Exception) -> type[StorageError]:
    # fsspec's HTTP calls every refusal a missing file; the status is in the cause.
    for status in (getattr(error, "status", None), getattr(error.__cause__, "status", None)):
        if status in (401, 403):
            return PermissionDeniedError
        if status in (408, 429, 500, 502, 503, 504):
            return StoreUnavailableError
    for foreign, ours in _ERRORS:
        if isinstance(error, foreign):
            return ours
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError
    if any(base.__name__ in _UNAVAILABLE for base in type(error).__mro__):
        return StoreUnavailableError
    return StorageError
