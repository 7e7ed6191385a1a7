"""Save and restore JAX checkpoints on any storage.

    ckptio.save(uri, tree)          ckptio.restore(uri)          ckptio.open(uri)

Importing this loads neither JAX, nor a driver, nor a store's SDK: each is imported when it is
first needed; so are the verbs that most programs never call.
"""

from typing import TYPE_CHECKING

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
    ProcessFailedError,
    SaveCancelledError,
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
from ckptio.pending import PendingSave
from ckptio.restoring import RestoreReport, restore
from ckptio.saving import SaveReport, save, save_async

if TYPE_CHECKING:
    from ckptio import every, keep
    from ckptio.converting import ConvertReport, convert
    from ckptio.copying import CopyReport, copy
    from ckptio.manager import CheckpointManager

__version__ = "0.1.0"

__all__ = [
    "AlreadyExistsError",
    "Backend",
    "Buffer",
    "Checkpoint",
    "CheckpointManager",
    "CkptioError",
    "ConvertReport",
    "CopyReport",
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
    "PendingSave",
    "PermissionDeniedError",
    "PreconditionFailedError",
    "ProcessFailedError",
    "PutMode",
    "RestoreOptions",
    "RestoreReport",
    "SaveCancelledError",
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
    "convert",
    "copy",
    "delete",
    "every",
    "exists",
    "hookimpl",
    "keep",
    "open",
    "open_backend",
    "plugin_manager",
    "restore",
    "save",
    "save_async",
]

_LATER = {
    "CheckpointManager": "manager",
    "ConvertReport": "converting",
    "CopyReport": "copying",
    "convert": "converting",
    "copy": "copying",
    "every": "every",
    "keep": "keep",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'ckptio' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"ckptio.{_LATER[name]}")
    value: object = module if _LATER[name] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
