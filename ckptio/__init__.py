"""Save and restore JAX checkpoints on any storage.

    ckptio.save(uri, tree)          ckptio.restore(uri)          ckptio.open(uri)

The public names are imported when they are first used: ``import ckptio`` loads neither JAX, nor a
driver, nor a store's SDK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptio.backend import Backend, Limits, ObjectInfo, Upload
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
        UnknownSchemeError,
        UnsupportedFormatError,
        UnsupportedLeafError,
    )
    from ckptio.hooks import hookimpl, open_backend, plugin_manager
    from ckptio.leaf import Leaf
    from ckptio.options import RestoreOptions, SaveOptions
    from ckptio.restoring import RestoreReport, restore
    from ckptio.saving import SaveReport, save

_HOMES = {
    "backend": "Backend Limits ObjectInfo Upload",
    "checkpoint": "Checkpoint collect_garbage delete exists open",
    "errors": (
        "AlreadyExistsError CkptioError CorruptionError DeadlineExceededError DriverConflictError "
        "DriverUnavailableError InvalidKeyError InvalidOptionError InvalidURIError "
        "LeafNotFoundError ManifestError MismatchError NotFoundError PermissionDeniedError "
        "PreconditionFailedError StorageError StorageFullError StoreUnavailableError "
        "UnknownSchemeError UnsupportedFormatError UnsupportedLeafError"
    ),
    "hooks": "hookimpl open_backend plugin_manager",
    "leaf": "Leaf",
    "options": "RestoreOptions SaveOptions",
    "restoring": "RestoreReport restore",
    "saving": "SaveReport save",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__version__ = "0.1.0"
__all__ = sorted(_HOME)  # noqa: PLE0605  # derived, so that it cannot go stale


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ckptio' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"ckptio.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
