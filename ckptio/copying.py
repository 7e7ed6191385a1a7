"""The verb `copy`: from any store to any store, streaming, verified, resumable, committed last.

The copy has the same keys and the same attempt id: it is the same checkpoint. So what an earlier
try left behind can be recognised, and is not copied again where its blocks are sound.

What was written is committed only once it is known to have arrived as it was sent: because the
store's etag is its MD5, as S3's mostly are, or else because it was read back. A connection without
TLS protects nothing, and not every server compares the digest that a request was signed with.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

from ckptio import commit, formats, hooks
from ckptio import manifest as manifests
from ckptio.backend import Backend, ObjectInfo
from ckptio.errors import (
    AlreadyExistsError,
    CkptioError,
    CorruptionError,
    InvalidOptionError,
    NotFoundError,
    PreconditionFailedError,
    UnsupportedFormatError,
)
from ckptio.manifest import BLOCK, MANIFEST, Manifest, ObjectEntry
from ckptio.operation import Operation
from ckptio.options import RestoreOptions, SaveOptions
from ckptio.progress import track
from ckptio.reader import read_size
from ckptio.restore_plan import Read
from ckptio.retry import RetryingBackend
from ckptio.source import Source
from ckptio.transfer import Transfer
from ckptio.units import format_bytes, format_pace
from ckptio.uploading import Etags, ObjectUpload
from ckptio.writer import part_size

__all__ = ["CopyReport", "copy"]

_log = logging.getLogger("ckptio")


@dataclass(frozen=True)
class CopyReport:
    """What a copy did; prints as one line.

    Attributes
    ----------
    uri : str
        Of the copy.
    nbytes : int
        Bytes copied.
    objects : int
        Data objects copied.
    kept : int
        Data objects that were there already, and sound.
    seconds : float
    """

    uri: str
    nbytes: int
    objects: int
    kept: int
    seconds: float

    def __str__(self) -> str:
        kept = f"{_objects(self.kept)} there already, and sound" if self.kept else ""
        if self.kept and not self.objects:
            return f"nothing to copy to {self.uri}: {kept}"
        what = f"{format_bytes(self.nbytes)}, {_objects(self.objects)} to {self.uri}"
        pace = format_pace(self.nbytes, self.seconds)
        return f"copied {what} in {pace}{kept and '; ' + kept}"


def _objects(count: int) -> str:
    return f"{count:,} object{'s' * (count != 1)}"


def copy(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    read_back: bool = True,
    options: SaveOptions | None = None,
    src_storage_options: Mapping[str, Any] | None = None,
    dst_storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> CopyReport:
    """Copy a checkpoint; return once the copy exists and is durable.

    Every block is compared with its checksum on the way, and what arrived before it is committed.
    A copy that was interrupted leaves what it wrote, and the next one to the same place goes on
    from there; what is never finished is removed by `collect_garbage`. Copying once more what is
    there already checks it, and repairs what is damaged.

    Parameters
    ----------
    src, dst : str or os.PathLike
        From where, and to where.
    overwrite : bool
        Replace another checkpoint at `dst`; it stays whole until the copy is complete.
    read_back : bool
        Read what was written before it is committed, where the store's etag does not tell that it
        arrived whole. Without it, the connection and the store are trusted.
    options : SaveOptions, optional
        Memory, concurrency, part size, deadline.
    src_storage_options, dst_storage_options : mapping, optional
        For the drivers, in fsspec's own spelling.
    progress : bool
        Show a progress bar.

    Raises
    ------
    NotFoundError
        If there is no checkpoint at `src`.
    AlreadyExistsError
        If there is another one at `dst`.
    CorruptionError
        If a block is not what was saved, at the source or once it was written; the copy does not
        come into being.

    Examples
    --------
    >>> import ckptio, numpy as np
    >>> _ = ckptio.save("memory://doc/copied", {"w": np.ones(3)})
    >>> report = ckptio.copy("memory://doc/copied", "memory://doc/the-copy")
    >>> report.objects, ckptio.restore("memory://doc/the-copy")
    (1, {'w': array([1., 1., 1.])})
    """
    began = time.monotonic()
    options = options or SaveOptions()
    if os.fspath(src).endswith(formats.SUFFIX) and (
        file := formats.open_file(src, src_storage_options)
    ):
        file.close()
        raise _foreign(file)
    with (
        hooks.open_backend(src, src_storage_options) as source,
        hooks.open_backend(dst, dst_storage_options) as target,
    ):
        if source.uri == target.uri:
            raise InvalidOptionError(f"cannot copy {source.uri} to itself")
        operation = Operation(f"copying {source.uri} to {target.uri}", options.deadline)
        report = _copy(
            RetryingBackend(source, operation),
            RetryingBackend(target, operation),
            operation,
            options,
            overwrite=overwrite,
            read_back=read_back,
            progress=progress,
            began=began,
        )
    _log.info("%s", report)
    return report


def _copy(
    source: Backend,
    target: Backend,
    operation: Operation,
    options: SaveOptions,
    *,
    overwrite: bool,
    read_back: bool,
    progress: bool,
    began: float,
) -> CopyReport:
    encoded, manifest = _load(source)
    there = commit.attempt_at(target)
    replaces = commit.to_replace(target, overwrite=overwrite or there == manifest.attempt)
    transfer = Transfer.of_data(operation, target.limits, options)
    _check_source(source, manifest, transfer)
    missing = _missing(target, manifest, transfer, show=progress)
    etags = Etags()
    uploads = [
        ObjectUpload(
            target,
            entry.key,
            entry.size,
            part_size(target.limits, options.part_size, entry.size),
            transfer.turn,
            etags,
        )
        for entry in (manifest.objects[number] for number in missing)
    ]
    size = max((min(u.part_size, -(-u.size // BLOCK) * BLOCK) for u in uploads), default=0)
    total = sum(upload.size for upload in uploads)
    tasks = (
        partial(_copy_part, source, manifest, number, upload, start)
        for number, upload in zip(missing, uploads, strict=True)
        for start in upload.starts
    )
    try:
        for _ in track(transfer.run(tasks, size), total, "copying", show=progress and total > 0):
            pass
    except BaseException:
        # What is complete stays, for the next try; what is not can only be in the way.
        for upload in uploads:
            try:
                upload.abort()
            except CkptioError as error:
                _log.warning("an upload was left behind at %s: %s", target.uri, error)
        raise
    if read_back:
        unknown = [n for n, u in zip(missing, uploads, strict=True) if not u.acknowledged]
        if damaged := _damaged(target, manifest, unknown, transfer, "reading back", show=progress):
            raise CorruptionError(
                f"{target.describe(manifest.objects[min(damaged)].key)} is not what was sent: it "
                "was damaged on its way there, or by the store; nothing was committed to the "
                "destination (copy again: what is sound there is kept)"
            )
    _publish(target, encoded, manifest, replaces, there)
    return CopyReport(
        target.uri,
        total,
        len(missing),
        len(manifest.objects) - len(missing),
        time.monotonic() - began,
    )


def _load(source: Backend) -> tuple[bytes, Manifest]:
    try:
        encoded = source.read(MANIFEST)
        return encoded, manifests.decode(encoded, source.describe(MANIFEST))
    except NotFoundError as error:
        if (found := formats.recognise(source, source)) is not None:
            found.release()
            raise _foreign(found) from error
        raise NotFoundError(f"there is no checkpoint at {source.uri}") from error


def _foreign(found: Source) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{found.uri} is in the {found.format} format: only ckptio's own checkpoints can be copied "
        "as they are; ckptio.convert makes one of it"
    )


def _check_source(source: Backend, manifest: Manifest, transfer: Transfer) -> None:
    """Look before anything is copied whether all objects are there, as long as they were."""

    def check(entry: ObjectEntry) -> None:
        where = source.describe(entry.key)
        try:
            size = source.head(entry.key).size
        except NotFoundError as error:
            raise CorruptionError(f"{where} is missing, which the manifest names") from error
        if size != entry.size:
            raise CorruptionError(f"{where} has {size} bytes, was saved with {entry.size}")

    for _ in transfer.map(check, manifest.objects):
        pass


def _missing(
    target: Backend, manifest: Manifest, transfer: Transfer, *, show: bool
) -> Sequence[int]:
    """Return the numbers of the objects that are not at the target yet, or not sound there."""

    def with_its_size(number: int) -> int | None:
        entry = manifest.objects[number]
        try:
            return number if target.head(entry.key).size == entry.size else None
        except NotFoundError:
            return None

    numbers = range(len(manifest.objects))
    there = sorted(n for n in transfer.map(with_its_size, numbers) if n is not None)
    damaged = _damaged(target, manifest, there, transfer, "checking", show=show)
    sound = {*there} - damaged
    return [number for number in numbers if number not in sound]


def _damaged(
    target: Backend,
    manifest: Manifest,
    numbers: Sequence[int],
    transfer: Transfer,
    label: str,
    *,
    show: bool,
) -> set[int]:
    """Read objects at the target; return the numbers of those that are not what was saved."""
    if not numbers:
        return set()
    step = read_size(target.limits, RestoreOptions())
    reads = [
        Read(number, start, min(start + step, size))
        for number in numbers
        for size in [manifest.objects[number].size]
        for start in range(0, size, step)
    ]
    found = set()

    def results() -> Iterator[int]:
        for read, sound in transfer.run(
            (partial(_is_sound, target, manifest, read) for read in reads), step
        ):
            if not sound:
                found.add(read.object)
            yield read.stop - read.start

    total = sum(manifest.objects[number].size for number in numbers)
    for _ in track(results(), total, label, show=show):
        pass
    return found


def _is_sound(
    target: Backend, manifest: Manifest, read: Read, buffer: memoryview
) -> tuple[Read, bool]:
    data = buffer[: read.stop - read.start]
    try:
        target.read_into(manifest.objects[read.object].key, read.start, data)
    except (CorruptionError, NotFoundError):
        return read, False
    blocks = _damaged_blocks(manifest, read.object, read.start, data)
    return read, next(blocks, None) is None


def _copy_part(
    source: Backend,
    manifest: Manifest,
    number: int,
    upload: ObjectUpload,
    start: int,
    buffer: memoryview,
) -> int:
    entry = manifest.objects[number]
    data = buffer[: min(upload.part_size, entry.size - start)]
    source.read_into(entry.key, start, data)
    for at in _damaged_blocks(manifest, number, start, data):
        raise CorruptionError(
            f"{source.describe(entry.key)} is damaged, or was on its way from there: the checksum "
            f"of bytes {at}:{min(at + BLOCK, entry.size)} does not match; nothing was committed to "
            "the destination"
        )
    upload.write(start, data)
    return len(data)


def _damaged_blocks(manifest: Manifest, number: int, start: int, data: memoryview) -> Iterator[int]:
    """Yield where blocks begin that are not what was saved."""
    checksums = manifest.checksums[number]
    for at in range(0, len(data), BLOCK):
        digest = xxhash.xxh3_64_intdigest(data[at : at + BLOCK])
        if digest != checksums[(start + at) // BLOCK]:
            yield start + at


def _publish(
    target: Backend,
    encoded: bytes,
    manifest: Manifest,
    replaces: ObjectInfo | None,
    there: str | None,
) -> None:
    """Create the manifest, byte for byte the source's, and with it the copy."""
    if there == manifest.attempt and target.read(MANIFEST) == encoded:
        return
    try:
        if replaces is None:
            info = target.put(MANIFEST, encoded, mode="create")
        else:
            info = target.put(MANIFEST, encoded, if_match=replaces.etag)
        arrived = target.read(MANIFEST) == encoded
        if not arrived:
            # Damaged on its way, like any object: but this one is seen already.
            target.put(MANIFEST, encoded, if_match=info.etag)
            arrived = target.read(MANIFEST) == encoded
    except (AlreadyExistsError, PreconditionFailedError) as error:
        # The answer to our own request may have been lost, and this be the answer to a retry.
        if commit.attempt_at(target) != manifest.attempt:
            raise AlreadyExistsError(
                f"another checkpoint was saved to {target.uri} in the meantime; it was kept"
            ) from error
        arrived = target.read(MANIFEST) == encoded
    if not arrived:
        where = target.describe(MANIFEST)
        raise CorruptionError(f"{where} is not what was sent, nor was it at the second try")
    if there is not None and there != manifest.attempt:
        commit.discard(target, there)
