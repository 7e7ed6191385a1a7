"""The verbs `save` and `save_async`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptio import hooks, processes
from ckptio.attempt import Attempt, prepare
from ckptio.operation import Operation
from ckptio.options import SaveOptions
from ckptio.pending import PendingSave, wait_for_others
from ckptio.rendezvous import DEADLINE, Rendezvous
from ckptio.units import format_bytes, format_pace

__all__ = ["SaveReport", "save", "save_async"]

_log = logging.getLogger("ckptio")


@dataclass(frozen=True)
class SaveReport:
    """What a save did; prints as one line.

    Attributes
    ----------
    uri : str
    attempt : str
        Its id, part of every data object's key.
    nbytes : int
        Bytes of all data objects.
    leaves, objects : int
        How many.
    seconds : float
        From the call to the commit.
    """

    uri: str
    attempt: str
    nbytes: int
    leaves: int
    objects: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"saved {format_bytes(self.nbytes)}, {self.leaves:,} leaves, {self.objects:,} "
            f"object{'s' * (self.objects != 1)} to {self.uri} in "
            f"{format_pace(self.nbytes, self.seconds)}"
        )


def save(
    uri: str | os.PathLike[str],
    tree: object,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> SaveReport:
    """Save a pytree; return once the checkpoint exists and is durable.

    A save that is running in the background is waited for first. In a program of several JAX
    processes, all of them call this, in the same order; each writes its own shards.

    Parameters
    ----------
    uri : str or os.PathLike
        Where to: ``gs://bucket/run/step-100``, or a local path.
    tree : pytree
        Of JAX and NumPy arrays, typed PRNG keys, and Python numbers, strings and bytes.
    overwrite : bool
        Replace a checkpoint that is already there. It stays whole until the new one is.
    metadata : mapping, optional
        Anything that JSON can hold; comes back as `Checkpoint.metadata`.
    options : SaveOptions, optional
        Memory, concurrency, sizes, deadline.
    storage_options : mapping, optional
        For the driver, in fsspec's own spelling.
    progress : bool
        Show a progress bar.

    Returns
    -------
    SaveReport

    Raises
    ------
    AlreadyExistsError
        If there is a checkpoint already and `overwrite` is false, or another writer won.
    UnsupportedLeafError
        If something in the tree cannot be saved; nothing was written.
    StorageError
        If the store failed; the attempt was abandoned, and an earlier checkpoint is untouched.

    Examples
    --------
    >>> import ckptio, numpy as np
    >>> report = ckptio.save("memory://doc/save", {"w": np.zeros((2, 3)), "step": 7})
    >>> report.leaves, report.objects
    (2, 1)
    """
    began = time.monotonic()
    attempt = _begin(uri, tree, overwrite, metadata, options, storage_options, progress)
    return _finish(attempt, began)


def save_async(
    uri: str | os.PathLike[str],
    tree: object,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> PendingSave[SaveReport]:
    """Save a pytree in the background; return once the caller may change everything.

    What is saved is the state at the call: NumPy arrays are copied, `jax.Array` on CPU devices are
    kept without a copy (they are immutable, and may be donated), those on accelerators are copied
    to the host. One save is written at a time: a call that comes while an earlier one is being
    written waits for it first, so that memory never holds more than one copy.

    Parameters are those of `save`. When the interpreter exits, ``options.at_exit`` says whether a
    save that is still running is finished or abandoned.

    Returns
    -------
    PendingSave
        Its `~PendingSave.result` returns the report, or raises what went wrong.

    Raises
    ------
    AlreadyExistsError, UnsupportedLeafError, StorageError
        What can be known at once is raised here, as by `save`.

    Examples
    --------
    >>> import ckptio, numpy as np
    >>> weights = np.zeros(3)
    >>> pending = ckptio.save_async("memory://doc/async", {"w": weights})
    >>> weights[:] = 1
    >>> _ = pending.result(timeout=60)
    >>> ckptio.restore("memory://doc/async")["w"].tolist()
    [0.0, 0.0, 0.0]
    """
    began = time.monotonic()
    attempt = _begin(uri, tree, overwrite, metadata, options, storage_options, progress)
    try:
        attempt.hold()
    except BaseException as error:
        attempt.fail(error)
        raise
    return PendingSave(attempt, lambda: _finish(attempt, began))


def _begin(
    uri: str | os.PathLike[str],
    tree: object,
    overwrite: bool,
    metadata: Mapping[str, Any] | None,
    options: SaveOptions | None,
    storage_options: Mapping[str, Any] | None,
    progress: bool,
) -> Attempt:
    """Prepare in the caller's thread: everything that can be known at once is known then."""
    wait_for_others()
    options = options or SaveOptions()
    group = processes.current()
    seconds = options.deadline or (DEADLINE if group.count > 1 else None)
    operation = Operation(f"saving to {os.fspath(uri)}", seconds)
    rendezvous = Rendezvous(group, operation)
    try:
        prepared = prepare(tree, metadata)
        opened = hooks.open_backend(uri, storage_options)
    except BaseException as error:
        rendezvous.refuse(error)
        raise
    attempt = Attempt(opened, operation, rendezvous, prepared, options, progress)
    try:
        attempt.start(overwrite)
    except BaseException:
        opened.close()
        raise
    return attempt


def _finish(attempt: Attempt, began: float) -> SaveReport:
    with attempt.opened:
        nbytes, objects = attempt.run()
        report = SaveReport(
            attempt.opened.uri,
            attempt.id,
            nbytes,
            len(attempt.prepared.leaves),
            objects,
            time.monotonic() - began,
        )
        _log.info("%s", report)
        hooks.notify("ckptio_save_committed", uri=report.uri, report=report)
        return report
