"""The verb `save`: prepare, write, publish."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from ckptio import commit, hooks, tree
from ckptio.backend import Backend, ObjectInfo
from ckptio.errors import AlreadyExistsError, CkptioError, InvalidOptionError
from ckptio.leaves import SavedLeaf, describe
from ckptio.manifest import ChunkTable, Manifest, ObjectEntry
from ckptio.operation import Operation
from ckptio.options import SaveOptions
from ckptio.progress import track
from ckptio.retry import RetryingBackend
from ckptio.save_plan import ChunkPlan, ObjectPlan, assign, chunks_by_leaf, plan_objects
from ckptio.transfer import Transfer
from ckptio.units import format_bytes
from ckptio.writer import ObjectWriter

__all__ = ["SaveReport", "save"]

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
        rate = self.nbytes / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"saved {format_bytes(self.nbytes)}, {self.leaves:,} leaves, {self.objects:,} "
            f"object{'s' * (self.objects != 1)} to {self.uri} in {self.seconds:.2f} s "
            f"({rate:.2f} GB/s)"
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
    options = options or SaveOptions()
    prepared = _prepare(tree, metadata)
    with hooks.open_backend(uri, storage_options) as opened:
        operation = Operation(f"saving to {opened.uri}", options.deadline)
        backend = RetryingBackend(opened, operation)
        replaces = commit.find(backend)
        if replaces is not None and not overwrite:
            raise AlreadyExistsError(
                f"there already is a checkpoint at {backend.uri}: pass overwrite=True to replace it"
            )
        attempt = commit.new_attempt()
        hooks.notify("ckptio_save_started", uri=backend.uri, attempt=attempt)
        try:
            report = _attempt(
                backend, operation, prepared, attempt, replaces, options, began, progress
            )
        except BaseException as error:
            commit.abandon(backend, attempt)
            hooks.notify("ckptio_save_failed", uri=backend.uri, error=error)
            raise
        _log.info("%s", report)
        hooks.notify("ckptio_save_committed", uri=backend.uri, report=report)
        return report


@dataclass(frozen=True)
class _Prepared:
    structure: tree.Structure
    leaves: Sequence[SavedLeaf]
    metadata: Mapping[str, Any]


def _prepare(pytree: object, metadata: Mapping[str, Any] | None) -> _Prepared:
    structure, named = tree.flatten(pytree)
    checked = dict(metadata or {})
    try:
        if json.loads(json.dumps(checked, allow_nan=False)) != checked:
            raise ValueError("it does not come back from JSON as it went in")
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(f"metadata must be what JSON can hold: {error}") from error
    return _Prepared(structure, describe(named), checked)


def _attempt(
    backend: Backend,
    operation: Operation,
    prepared: _Prepared,
    attempt: str,
    replaces: ObjectInfo | None,
    options: SaveOptions,
    began: float,
    progress: bool,
) -> SaveReport:
    leaves = prepared.leaves
    plans = [leaf.plan for leaf in leaves]
    objects = plan_objects(
        plans,
        assign(plans).get(0, []),
        prefix=commit.data_prefix(attempt, 0),
        object_size=options.object_size,
        metadata={"format": "ckptio", "attempt": attempt},
    )
    checksums = _write(backend, operation, leaves, objects, options, progress)
    manifest = Manifest(
        attempt=attempt,
        created=datetime.now(UTC),
        metadata=prepared.metadata,
        structure=prepared.structure,
        leaves=tuple(leaf.entry for leaf in leaves),
        objects=tuple(ObjectEntry(plan.key, plan.size) for plan in objects),
        chunks=_chunk_table(leaves, objects),
        checksums=tuple(checksums),
    )
    replaced = commit.attempt_at(backend) if replaces is not None else None
    commit.publish(backend, manifest, replaces)
    nbytes = sum(plan.size for plan in objects)
    seconds = time.monotonic() - began
    if replaced is not None:
        # From here on the new checkpoint exists: nothing that goes wrong may undo it.
        commit.discard(backend, replaced)
    return SaveReport(backend.uri, attempt, nbytes, len(leaves), len(objects), seconds)


def _write(
    backend: Backend,
    operation: Operation,
    leaves: Sequence[SavedLeaf],
    objects: Sequence[ObjectPlan],
    options: SaveOptions,
    progress: bool,
) -> list[Any]:
    """Write the data objects; return the checksums of each one's blocks."""

    def source(chunk: ChunkPlan) -> Any:
        return leaves[chunk.leaf].read(chunk.box)

    plans = [leaf.plan for leaf in leaves]
    writers = [ObjectWriter(backend, plan, plans, source, options.part_size) for plan in objects]
    buffer_size = max((w.buffer_size for w in writers), default=0)
    transfer = Transfer(
        operation,
        concurrency=options.concurrency or backend.limits.concurrency,
        memory=options.memory,
    )
    written = transfer.run(chain.from_iterable(w.tasks() for w in writers), buffer_size)
    try:
        total = sum(plan.size for plan in objects)
        for _ in track(written, total, "saving", show=progress):
            pass
    except BaseException:
        for writer in writers:
            try:
                writer.abort()
            except CkptioError as error:
                _log.warning("an upload was left behind at %s: %s", backend.uri, error)
        raise
    return [writer.checksums for writer in writers]


def _chunk_table(leaves: Sequence[SavedLeaf], objects: Sequence[ObjectPlan]) -> ChunkTable:
    rows = chunks_by_leaf(objects, len(leaves))
    for number, leaf in enumerate(leaves):
        if leaf.same_as is not None:
            rows[number] = rows[leaf.same_as]
    return ChunkTable.build([len(leaf.plan.shape) for leaf in leaves], rows)
