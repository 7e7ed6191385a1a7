"""The verb `convert`: any checkpoint that opens, rewritten as ckptio's own or as safetensors.

Everything streams: each part of an object that is written asks the source for the boxes of leaves
that it holds, so that a checkpoint larger than memory converts.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ckptio import commit, hooks, tree
from ckptio.backend import Backend, ObjectInfo
from ckptio.boxes import Box
from ckptio.checkpoint import Checkpoint
from ckptio.checkpoint import open as open_checkpoint
from ckptio.errors import AlreadyExistsError, InvalidOptionError, MismatchError
from ckptio.export import Export, describe_leaves, export_objects
from ckptio.manifest import ChunkTable, Manifest, ObjectEntry
from ckptio.operation import Operation
from ckptio.options import SaveOptions
from ckptio.retry import RetryingBackend
from ckptio.rewriting import Rewriter
from ckptio.save_plan import ChunkPlan, LeafPlan, ObjectPlan, plan_objects
from ckptio.saving import SaveReport
from ckptio.units import format_bytes, format_pace

__all__ = ["ConvertReport", "convert"]

_log = logging.getLogger("ckptio")

SUFFIX = ".safetensors"
SHARD_SIZE = 5_000_000_000
"""Bytes above which a safetensors file is divided, as other programs do."""


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did; prints as one line.

    Attributes
    ----------
    uri : str
        Of the result.
    nbytes : int
        Bytes written.
    leaves, objects : int
        How many.
    seconds : float
    """

    uri: str
    nbytes: int
    leaves: int
    objects: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"wrote {format_bytes(self.nbytes)}, {self.leaves:,} leaves, {self.objects:,} "
            f"object{'s' * (self.objects != 1)} to {self.uri} in "
            f"{format_pace(self.nbytes, self.seconds)}"
        )


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    only: str | Iterable[str] | None = None,
    cast: bool = False,
    separator: str = ".",
    max_shard_size: int = SHARD_SIZE,
    overwrite: bool = False,
    verify: bool = True,
    options: SaveOptions | None = None,
    src_storage_options: Mapping[str, Any] | None = None,
    dst_storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> ConvertReport:
    """Rewrite a checkpoint in another format, streaming.

    A `dst` that ends in ``.safetensors`` is written for other programs: one file, or, above
    `max_shard_size`, several with an index beside them (``model-00001-of-00003.safetensors``,
    ``model.safetensors.index.json``). Any other `dst` becomes a checkpoint of ckptio's own, from
    an Orbax or safetensors one.

    In a safetensors file every leaf is a tensor that is called by its keys, joined by `separator`:
    Python numbers and NumPy scalars have no dimensions, typed PRNG keys are their data.

    Parameters
    ----------
    only : str or iterable of str, optional
        Globs over leaf paths; the rest is left out.
    cast : bool
        For safetensors: widen what the format lacks to what holds every value of it. int2 and int4
        become I8, uint2 and uint4 U8, the smaller floats BF16. Strings, bytes, times, complex128
        and ints of more than 64 bits have no such dtype.
    separator : str
        For safetensors: between the keys of a path.
    max_shard_size : int
        For safetensors: bytes of tensors in one file, unless one tensor alone is larger.
    overwrite : bool
        Replace what is at `dst`.
    verify : bool
        Check what is read against its checksums, where the source has them.
    options : SaveOptions, optional
        Memory, concurrency, part size, deadline; for ckptio's own, the object size.
    src_storage_options, dst_storage_options : mapping, optional
        For the drivers, in fsspec's own spelling.
    progress : bool
        Show a progress bar.

    Raises
    ------
    NotFoundError
        If there is nothing at `src` that opens.
    AlreadyExistsError
        If there is something at `dst`.
    MismatchError
        If leaves cannot be safetensors' tensors; it lists all of them, and nothing was written.

    Examples
    --------
    >>> import ckptio, numpy as np
    >>> _ = ckptio.save("memory://doc/convert", {"layer": {"w": np.ones(3)}, "step": 7})
    >>> report = ckptio.convert("memory://doc/convert", "memory://doc/out/model.safetensors")
    >>> ckptio.restore("memory://doc/out/model.safetensors")
    {'layer.w': array([1., 1., 1.]), 'step': array(7)}
    """
    began = time.monotonic()
    options = options or SaveOptions()
    if max_shard_size <= 0:
        raise InvalidOptionError(f"max_shard_size must be positive, not {max_shard_size!r}")
    to_file = os.fspath(dst).endswith(SUFFIX)
    with open_checkpoint(src, storage_options=src_storage_options) as checkpoint:
        numbers = _chosen(checkpoint, only)
        if to_file:
            from ckptio import formats

            # Named before anything is opened: what cannot be written is said first.
            exports = describe_leaves(checkpoint, numbers, separator, cast=cast)
            root, name = formats.parent(dst)
        else:
            exports, root, name = [], os.fspath(dst), ""
        with hooks.open_backend(root, dst_storage_options) as opened:
            operation = Operation(f"converting {checkpoint.uri}", options.deadline)
            backend = RetryingBackend(opened, operation)
            rewriter = Rewriter(
                checkpoint, backend, operation, options, verify=verify, progress=progress
            )
            if to_file:
                written = _to_files(
                    checkpoint, rewriter, backend, name, exports, max_shard_size, overwrite
                )
            else:
                written = _to_checkpoint(
                    checkpoint, rewriter, backend, numbers, only, options, overwrite
                )
            report = ConvertReport(
                backend.describe(name),
                sum(plan.size for plan in written),
                len(numbers),
                len(written),
                time.monotonic() - began,
            )
    _log.info("%s", report)
    return report


def _chosen(checkpoint: Checkpoint, only: str | Iterable[str] | None) -> list[int]:
    """Return the numbers of the leaves that are wanted."""
    paths = [*checkpoint]
    if only is None:
        return [*range(len(paths))]
    pattern = tree.Pattern(only)
    if idle := pattern.unmatched(paths):
        raise MismatchError(
            "\n".join(f"{glob!r} matches no leaf of {checkpoint.uri}" for glob in idle), idle
        )
    return [number for number, path in enumerate(paths) if pattern.matches(path)]


def _to_files(
    checkpoint: Checkpoint,
    rewriter: Rewriter,
    backend: Backend,
    name: str,
    exports: Sequence[Export],
    max_shard_size: int,
    overwrite: bool,
) -> Sequence[ObjectPlan]:
    metadata = _file_metadata(checkpoint)
    plans, index = export_objects(exports, name, max_shard_size, metadata)
    index_key = f"{name}.index.json"
    keys = [*(plan.key for plan in plans), index_key]
    if not overwrite and (there := [key for key in keys if backend.exists(key)]):
        raise AlreadyExistsError(
            f"{backend.describe(there[0])} exists: pass overwrite=True to replace it"
        )
    rewriter.write(plans, [export.plan for export in exports], [export.leaf for export in exports])
    if index is not None:
        # Last, so that it never names what is not there.
        backend.put(index_key, json.dumps(index, indent=2, ensure_ascii=False).encode())
    elif overwrite:
        # An earlier index would still send readers to the files of then.
        backend.delete([index_key])
    return plans


def _file_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the metadata as the format has it: strings; what is none becomes JSON."""
    found = {
        str(key): value if isinstance(value, str) else json.dumps(value)
        for key, value in checkpoint.metadata.items()
    }
    # Other programs' readers refuse a file that does not say which framework's layout it has.
    return {"format": "pt", **found}


def _to_checkpoint(
    checkpoint: Checkpoint,
    rewriter: Rewriter,
    backend: Backend,
    numbers: Sequence[int],
    only: str | Iterable[str] | None,
    options: SaveOptions,
    overwrite: bool,
) -> Sequence[ObjectPlan]:
    replaces = commit.to_replace(backend, overwrite=overwrite)
    attempt = commit.new_attempt()
    began = time.monotonic()
    hooks.notify("ckptio_save_started", uri=backend.uri, attempt=attempt)
    try:
        written = _attempt(checkpoint, rewriter, backend, numbers, only, options, attempt, replaces)
    except BaseException as error:
        commit.abandon(backend, attempt)
        hooks.notify("ckptio_save_failed", uri=backend.uri, error=error)
        raise
    nbytes = sum(plan.size for plan in written)
    seconds = time.monotonic() - began
    report = SaveReport(backend.uri, attempt, nbytes, len(numbers), len(written), seconds)
    hooks.notify("ckptio_save_committed", uri=backend.uri, report=report)
    return written


def _attempt(
    checkpoint: Checkpoint,
    rewriter: Rewriter,
    backend: Backend,
    numbers: Sequence[int],
    only: str | Iterable[str] | None,
    options: SaveOptions,
    attempt: str,
    replaces: ObjectInfo | None,
) -> Sequence[ObjectPlan]:
    source = checkpoint.manifest
    entries = [source.leaves[number] for number in numbers]
    tied = _tied(source, numbers)
    plans = [LeafPlan(entry.path, entry.stored, entry.shape, ()) for entry in entries]
    whole = [Box.whole(entry.shape) for entry in entries]
    objects = plan_objects(
        plans,
        [
            ChunkPlan(i, box, plans[i].dtype.stored_nbytes(box.size))
            for i, box in enumerate(whole)
            if box.size and i not in tied
        ],
        prefix=commit.data_prefix(attempt, 0),
        object_size=options.object_size or backend.limits.object_size,
        metadata={"format": "ckptio", "attempt": attempt},
    )
    checksums = rewriter.write(objects, plans, numbers)
    rows: list[list[tuple[int, int, Box]]] = [[] for _ in entries]
    for number, plan in enumerate(objects):
        for chunk in plan.chunks:
            rows[chunk.leaf].append((number, chunk.offset, chunk.box))
    for i, other in tied.items():
        rows[i] = rows[other]
    structure = source.structure
    if only is not None:
        keep = [False] * len(source.leaves)
        for number in numbers:
            keep[number] = True
        structure = _renumber(
            tree.prune(structure, keep, tree.Pattern(only)),
            {number: i for i, number in enumerate(numbers)},
        )
    manifest = Manifest(
        attempt=attempt,
        created=datetime.now(UTC),
        metadata=source.metadata,
        structure=structure,
        leaves=tuple(entries),
        objects=tuple(ObjectEntry(plan.key, plan.size) for plan in objects),
        chunks=ChunkTable.build([len(entry.shape) for entry in entries], rows),
        checksums=tuple(checksums),
    )
    replaced = commit.attempt_at(backend) if replaces is not None else None
    commit.publish(backend, manifest, replaces)
    if replaced is not None:
        commit.discard(backend, replaced)
    return objects


def _tied(manifest: Manifest, numbers: Sequence[int]) -> dict[int, int]:
    """Return, for leaves that are the very same bytes as an earlier one, which one that is."""
    table = manifest.chunks
    first: dict[tuple[Any, ...], int] = {}
    tied = {}
    for i, number in enumerate(numbers):
        part = slice(table.first[number], table.first[number + 1])
        entry = manifest.leaves[number]
        where = (
            entry.dtype,
            entry.shape,
            table.objects[part].tobytes(),
            table.offsets[part].tobytes(),
        )
        if not table.counts[number]:
            continue
        if (earlier := first.setdefault(where, i)) != i:
            tied[i] = earlier
    return tied


def _renumber(structure: tree.Structure, numbers: Mapping[int, int]) -> tree.Structure:
    """Return a structure whose leaves have new numbers."""
    if isinstance(structure, int):
        return numbers[structure]
    if isinstance(structure, list):
        return [_renumber(node, numbers) for node in structure]
    if structure is None:
        return None
    if "dict" in structure:
        return {"dict": {key: _renumber(n, numbers) for key, n in structure["dict"].items()}}
    if "items" in structure:
        pairs = [[key, _renumber(node, numbers)] for key, node in structure["items"]]
        return {**structure, "items": pairs}
    kind = "tuple" if "tuple" in structure else "children"
    return {**structure, kind: [_renumber(node, numbers) for node in structure[kind]]}
