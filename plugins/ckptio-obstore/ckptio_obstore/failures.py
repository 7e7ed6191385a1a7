"""What obstore raises, as the contract's errors; and the guard against use after a fork."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ckptio import (
    AlreadyExistsError,
    CkptioError,
    InvalidKeyError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    StoreUnavailableError,
)
from obstore import exceptions

__all__ = ["errors"]

_KINDS: list[tuple[type[Exception], type[StorageError]]] = [
    (FileNotFoundError, NotFoundError),
    (exceptions.AlreadyExistsError, AlreadyExistsError),
    (exceptions.PreconditionError, PreconditionFailedError),
    (exceptions.PermissionDeniedError, PermissionDeniedError),
    (exceptions.UnauthenticatedError, PermissionDeniedError),
    (exceptions.InvalidPathError, InvalidKeyError),
]
# Only the text tells these from other failures.
_BUSY = re.compile(r"status code: (?:408|429|50[0234])\b|HTTP error|HttpError|client error")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist")
_NO_CREDENTIALS = re.compile(r"169\.254\.|metadata\.google|/metadata/identity")

_used_by: int | None = None


def _check_process(where: str) -> None:
    # obstore's threads belong to the process that first used it. In a forked child it would wait
    # for them forever, and spoil the parent's connections.
    global _used_by
    if _used_by is None:
        _used_by = os.getpid()
    elif _used_by != os.getpid():
        raise StorageError(
            f"{where}: obstore cannot be used in a process forked from one that used it; start "
            "workers with the 'spawn' or 'forkserver' method, or open the URI without '+obstore'"
        )


@contextmanager
def errors(where: str, endpoint: str) -> Iterator[None]:
    """Turn what obstore raises into the contract's errors, and refuse to hang after a fork.

    Parameters
    ----------
    where : str
        The URI of the key, for the message.
    endpoint : str
        Where requests go.
    """
    _check_process(where)
    try:
        yield
    except CkptioError:
        raise
    except (exceptions.BaseError, OSError, ValueError) as error:
        full = str(error)
        text = " ".join(full.partition("\n\nDebug source")[0].split())[:500]
        raise _kind(error, full)(f"{where} (at {endpoint}): {_meaning(full)}{text}") from error


def _kind(error: Exception, text: str) -> type[StorageError]:
    if _NO_CREDENTIALS.search(text):
        return PermissionDeniedError
    if _NO_BUCKET.search(text):
        return StorageError
    for foreign, ours in _KINDS:
        if isinstance(error, foreign):
            return ours
    return StoreUnavailableError if _BUSY.search(text) else StorageError


def _meaning(text: str) -> str:
    if _NO_CREDENTIALS.search(text):
        return "no credentials were found; pass them as storage options, or anon=True. "
    if _NO_BUCKET.search(text):
        return "there is no such bucket or container. "
    return ""
