"""Save and restore JAX checkpoints on any storage.

    ckptio.save(uri, tree)          ckptio.restore(uri)          ckptio.open(uri)

Importing this loads neither JAX, nor a driver, nor a store's SDK: each is imported when it is
first needed.
"""

from ckptio.backend import Backend, Buffer, Limits, ObjectInfo, PutMode, Upload, check_key
from ckptio.checkpoint import Checkpoint, collect_garbage, delete, exists, open
from ckptio.errors import (
    AlreadyExistsError,
    CkptioError,
    CorruptionError,
    DeadlineExceededError,
    DriverConflictError,
    DriverUnavailableError,
    InvalidKeyError,
    InvalidOptionError,
    InvalidURIError,
    LeafNotFoundError,
    ManifestError,
    MismatchError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    StorageFullError,
    StoreUnavailableError,
    StoreUnreachableError,
    UnknownSchemeError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)
from ckptio.hooks import hookimpl, open_backend, plugin_manager
from ckptio.leaf import Leaf
from ckptio.options import RestoreOptions, SaveOptions
from ckptio.restoring import RestoreReport, restore
from ckptio.saving import SaveReport, save

__version__ = "0.1.0"

__all__ = [
    "AlreadyExistsError",
    "Backend",
    "Buffer",
    "Checkpoint",
    "CkptioError",
    "CorruptionError",
    "DeadlineExceededError",
    "DriverConflictError",
    "DriverUnavailableError",
    "InvalidKeyError",
    "InvalidOptionError",
    "InvalidURIError",
    "Leaf",
    "LeafNotFoundError",
    "Limits",
    "ManifestError",
    "MismatchError",
    "NotFoundError",
    "ObjectInfo",
    "PermissionDeniedError",
    "PreconditionFailedError",
    "PutMode",
    "RestoreOptions",
    "RestoreReport",
    "SaveOptions",
    "SaveReport",
    "StorageError",
    "StorageFullError",
    "StoreUnavailableError",
    "StoreUnreachableError",
    "UnknownSchemeError",
    "UnsupportedFormatError",
    "UnsupportedLeafError",
    "Upload",
    "check_key",
    "collect_garbage",
    "delete",
    "exists",
    "hookimpl",
    "open",
    "open_backend",
    "plugin_manager",
    "restore",
    "save",
]
