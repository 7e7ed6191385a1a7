"""Every error that ckptio raises on its own account.

CkptioError
├── InvalidURIError (ValueError)          a URI that names no place
├── InvalidOptionError (ValueError)       an argument or option that makes no sense
├── UnknownSchemeError (ValueError)       no driver claims the URI's scheme
├── DriverConflictError                   two distributions claim one scheme
├── DriverUnavailableError (ImportError)  the driver is there, what it needs is not
├── UnsupportedLeafError (TypeError)      a leaf or key that cannot be saved
├── MismatchError (ValueError)            the checkpoint is not what the target asks for
├── LeafNotFoundError (KeyError)          no leaf has that path
├── DeadlineExceededError (TimeoutError)  the whole operation took too long
├── ProcessFailedError                    another process of the program failed
├── SaveCancelledError                    a save in the background was cancelled
├── UnsupportedFormatError                written by a newer, or by another, program
├── CorruptionError                       stored bytes are not the bytes that were saved
│   └── ManifestError                     the manifest is damaged, or contradicts itself
└── StorageError                          what a backend reports, with URI and key
    ├── InvalidKeyError (ValueError)
    ├── NotFoundError (FileNotFoundError)
    ├── AlreadyExistsError (FileExistsError)
    ├── PermissionDeniedError (PermissionError)
    ├── PreconditionFailedError           the object changed since it was looked at
    ├── StorageFullError                  no space, or over a quota
    └── StoreUnavailableError             worth a retry: busy, cut off, timed out
        └── StoreUnreachableError         no connection at all: refused, name unknown
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AlreadyExistsError",
    "CkptioError",
    "CorruptionError",
    "DeadlineExceededError",
    "DriverConflictError",
    "DriverUnavailableError",
    "InvalidKeyError",
    "InvalidOptionError",
    "InvalidURIError",
    "LeafNotFoundError",
    "ManifestError",
    "MismatchError",
    "NotFoundError",
    "PermissionDeniedError",
    "PreconditionFailedError",
    "ProcessFailedError",
    "SaveCancelledError",
    "StorageError",
    "StorageFullError",
    "StoreUnavailableError",
    "StoreUnreachableError",
    "UnknownSchemeError",
    "UnsupportedFormatError",
    "UnsupportedLeafError",
]


class CkptioError(Exception):
    """Base of all errors of this library."""

    # KeyError would print the repr of its argument, OSError an errno: ours print their message.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidURIError(CkptioError, ValueError):
    """The URI names no place: malformed, or damaged on its way here."""


class InvalidOptionError(CkptioError, ValueError):
    """An argument, option or storage option that makes no sense."""


class UnknownSchemeError(CkptioError, ValueError):
    """No installed driver claims the URI's scheme."""


class DriverConflictError(CkptioError):
    """Two distributions claim the same scheme."""


class DriverUnavailableError(CkptioError, ImportError):
    """A driver exists, but cannot be imported; the message says what to install."""


class UnsupportedLeafError(CkptioError, TypeError):
    """A leaf, or a key of a container, of a type that cannot be saved."""


class MismatchError(CkptioError, ValueError):
    """The checkpoint does not fit the target.

    Attributes
    ----------
    differences : tuple of str
        Every difference, one line each.
    """

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class LeafNotFoundError(CkptioError, KeyError):
    """The checkpoint has no leaf of that path."""


class DeadlineExceededError(CkptioError, TimeoutError):
    """The operation did not finish within the seconds that it was given."""


class ProcessFailedError(CkptioError):
    """Another process of the program failed or died; the message names it, and the cause."""


class SaveCancelledError(CkptioError):
    """A save in the background was cancelled before it was committed."""


class UnsupportedFormatError(CkptioError):
    """The checkpoint's format, or something in it, is newer than this library."""


class CorruptionError(CkptioError):
    """Stored bytes differ from the bytes that were saved."""


class ManifestError(CorruptionError):
    """The manifest is damaged, or says what cannot be."""


class StorageError(CkptioError):
    """A store refused or failed; the message names URI, key and cause."""


class InvalidKeyError(StorageError, ValueError):
    """The key is not a relative path of plain segments, or this store cannot hold it."""


class NotFoundError(StorageError, FileNotFoundError):
    """There is no such object or checkpoint."""


class AlreadyExistsError(StorageError, FileExistsError):
    """The object or checkpoint exists already, and was not to be overwritten."""


class PermissionDeniedError(StorageError, PermissionError):
    """The store does not let us."""


class PreconditionFailedError(StorageError):
    """The object changed since its etag was read."""


class StorageFullError(StorageError):
    """There is no space left, or a quota is used up."""


class StoreUnavailableError(StorageError):
    """The store is busy or did not finish its answer; the same call may succeed later."""


class StoreUnreachableError(StoreUnavailableError):
    """No connection to the store could be made; the message names the endpoint."""
