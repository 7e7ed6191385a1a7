"""Attempts, and how one becomes the checkpoint: by the atomic creation of the manifest.

Keys of an attempt: ``data/<attempt>/p00000-000.safetensors`` and ``parts/<attempt>/…``. Nothing
refers to them before the manifest does, so an attempt that died is invisible garbage.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import defaultdict

from ckptio import manifest as manifests
from ckptio.backend import Backend, ObjectInfo
from ckptio.errors import (
    AlreadyExistsError,
    CkptioError,
    CorruptionError,
    InvalidKeyError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
)
from ckptio.manifest import MANIFEST, Manifest

__all__ = [
    "GRACE",
    "attempt_at",
    "collect",
    "data_prefix",
    "discard",
    "find",
    "is_there",
    "load",
    "new_attempt",
    "publish",
    "remove",
    "to_replace",
]

_log = logging.getLogger("ckptio")

GRACE = 24 * 3600.0
"""Seconds after which what an uncommitted attempt wrote last counts as abandoned."""

_OURS = re.compile(
    r"(?P<root>(?:.*/)?)(?:data|parts)/(?P<attempt>[0-9a-f]{16})/p\d{5,}[-.][^/]*", re.DOTALL
)
_ATTEMPT = re.compile(rb'"attempt":"([0-9a-f]{16})"')


def new_attempt() -> str:
    """Return a fresh attempt id."""
    return os.urandom(8).hex()


def data_prefix(attempt: str, process: int) -> str:
    """Return the prefix of the keys of a process's data objects."""
    return f"data/{attempt}/p{process:05d}"


def part_key(attempt: str, process: int) -> str:
    """Return the key of a process's part of the manifest."""
    return f"parts/{attempt}/p{process:05d}.json"


def meeting_point(attempt: str) -> str:
    """Return the key of what process 0 writes first, for the others to see that they share it."""
    return f"parts/{attempt}/p00000-leaves.json"


def find(backend: Backend) -> ObjectInfo | None:
    """Look the manifest up; None if there is no checkpoint."""
    try:
        return backend.head(MANIFEST)
    except NotFoundError:
        return None


def is_there(backend: Backend) -> bool:
    """Whether there is a checkpoint of ckptio's own, be it damaged."""
    beginning = bytearray(len(manifests.BEGINNING))
    try:
        backend.read_into(MANIFEST, 0, memoryview(beginning))
    except (NotFoundError, InvalidKeyError):  # a file in the place of a directory is one of these
        return False
    except CorruptionError:  # it is shorter
        return True
    return beginning == manifests.BEGINNING or not manifests.is_foreign(backend.read(MANIFEST))


def to_replace(backend: Backend, *, overwrite: bool) -> ObjectInfo | None:
    """Return the manifest that a new checkpoint will replace; None if there is none.

    Raises
    ------
    AlreadyExistsError
        If there is one that may not be replaced: without `overwrite`, or another program's.
    """
    found = find(backend)
    if found is None:
        return None
    if not is_there(backend):
        raise AlreadyExistsError(
            f"{backend.describe(MANIFEST)} is another program's, and is not overwritten: save to "
            "another place, or move it away"
        )
    if not overwrite:
        raise AlreadyExistsError(
            f"there already is a checkpoint at {backend.uri}: pass overwrite=True to replace it"
        )
    return found


def load(backend: Backend) -> Manifest:
    """Read and check the manifest.

    Raises
    ------
    NotFoundError
        If there is no checkpoint.
    ManifestError, UnsupportedFormatError
        If it cannot be used.
    """
    try:
        data = backend.read(MANIFEST)
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no checkpoint at {backend.uri} (no {MANIFEST}: nothing was saved there, or "
            "a save did not finish)"
        ) from error
    return manifests.decode(data, backend.describe(MANIFEST))


def publish(backend: Backend, manifest: Manifest, replaces: ObjectInfo | None) -> None:
    """Create the manifest, and with it the checkpoint.

    Parameters
    ----------
    replaces : ObjectInfo, optional
        The manifest to be overwritten; without one there must be none.

    Raises
    ------
    AlreadyExistsError
        If another writer was faster.
    """
    data = manifest.encode()
    try:
        if replaces is None:
            backend.put(MANIFEST, data, mode="create")
        else:
            backend.put(MANIFEST, data, if_match=replaces.etag)
    except (AlreadyExistsError, PreconditionFailedError) as error:
        # The answer to our own request may have been lost, and this be the answer to a retry.
        if not _is_ours(backend, manifest.attempt):
            raise AlreadyExistsError(
                f"another checkpoint was saved to {backend.uri} in the meantime; it was kept"
            ) from error


def _is_ours(backend: Backend, attempt: str) -> bool:
    try:
        return load(backend).attempt == attempt
    except CkptioError:
        return False


def attempt_at(backend: Backend) -> str | None:
    """Return the attempt that the manifest names, be it damaged otherwise."""
    try:
        match = _ATTEMPT.search(backend.read(MANIFEST))
    except NotFoundError:
        return None
    return match[1].decode() if match else None


def remove(backend: Backend) -> None:
    """Delete the checkpoint: first the manifest, then the data.

    Other attempts' data stays, for one of them may be at work; see `collect`.

    Raises
    ------
    NotFoundError
        If there is no checkpoint.
    """
    if not is_there(backend):
        raise NotFoundError(f"there is no checkpoint at {backend.uri}")
    attempt = attempt_at(backend)
    backend.delete([MANIFEST])
    if attempt is not None:
        _delete_data(backend, attempt)


def abandon(backend: Backend, attempt: str) -> None:
    """Delete what a failed attempt wrote, unless it was committed after all.

    The request that creates the manifest may have been carried out although we never heard so;
    where that cannot be found out, the data stays.
    """
    try:
        committed = attempt_at(backend) == attempt
    except CkptioError as error:
        _log.warning("attempt %s may have left data at %s: %s", attempt, backend.uri, error)
        return
    if not committed:
        discard(backend, attempt)


def discard(backend: Backend, attempt: str, process: int | None = None) -> None:
    """Delete what one attempt wrote; failures are logged, for it can be collected later.

    Parameters
    ----------
    process : int, optional
        Only what this process wrote.
    """
    try:
        _delete_data(backend, attempt, "" if process is None else f"p{process:05d}")
    except Exception:
        _log.warning("attempt %s left data at %s", attempt, backend.uri, exc_info=True)


def discard_parts(backend: Backend, attempt: str) -> None:
    """Delete the parts of a manifest that is committed; failures are logged."""
    try:
        backend.delete([info.key for info in backend.list(f"parts/{attempt}")])
    except Exception:
        _log.warning("attempt %s left parts at %s", attempt, backend.uri, exc_info=True)


def _delete_data(backend: Backend, attempt: str, begin: str = "") -> None:
    for kind in ("data", "parts"):
        below = f"{kind}/{attempt}"
        keys = [info.key for info in backend.list(below)]
        backend.delete([key for key in keys if key.startswith(f"{below}/{begin}")])


def collect(backend: Backend, grace: float) -> int:
    """Delete what dead attempts left anywhere below the backend's URI; return how many objects.

    An attempt is dead if no manifest has its id and its newest object is older than `grace`
    seconds.
    """
    newest: dict[tuple[str, str], float] = defaultdict(float)
    keys: dict[tuple[str, str], list[str]] = defaultdict(list)
    for info in backend.list():
        if match := _OURS.fullmatch(info.key):
            attempt = match["root"], match["attempt"]
            newest[attempt] = max(newest[attempt], info.modified)
            keys[attempt].append(info.key)
    old = time.time() - grace
    dead = [attempt for attempt, modified in newest.items() if modified <= old]
    # Manifests are read after the listing, so that one committed in between is seen.
    committed = {root: _committed(backend, root) for root in {root for root, _ in dead}}
    doomed = [key for at in dead if at[1] != committed[at[0]] for key in keys[at]]
    backend.delete(doomed)
    try:
        return len(doomed) + backend.discard_uploads(grace)
    except PermissionDeniedError as error:
        # Stores ask for a permission of its own, which a training job may well not have.
        _log.warning("unfinished uploads at %s were left alone: %s", backend.uri, error)
        return len(doomed)


def _committed(backend: Backend, root: str) -> str | None:
    key = f"{root}{MANIFEST}"
    try:
        return manifests.decode(backend.read(key), backend.describe(key)).attempt
    except NotFoundError:
        return None
