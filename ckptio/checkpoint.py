"""An existing checkpoint: `open` it, look at its leaves, verify it; `exists`, `delete`, `copy`."""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from ckptio import commit, hooks, tree
from ckptio.arrays import empty
from ckptio.backend import Backend
from ckptio.boxes import Box
from ckptio.errors import (
    InvalidKeyError,
    LeafNotFoundError,
    NotFoundError,
    UnsupportedFormatError,
)
from ckptio.leaf import Leaf
from ckptio.operation import Operation
from ckptio.options import RestoreOptions
from ckptio.progress import track
from ckptio.restore_plan import Want
from ckptio.retry import RetryingBackend
from ckptio.source import BoxReader, Source

__all__ = ["Checkpoint", "collect_garbage", "delete", "exists", "open"]


class Checkpoint:
    """One saved pytree; nothing but its manifest is read before a leaf is looked at.

    Use it as a context manager, or call `close`, to release the store's connections.

    Attributes
    ----------
    uri : str
    manifest : Manifest
        What is where.
    format : str
        ``ckptio``, or whose it is: ``safetensors``, ``orbax``.
    bytes_read : int
        Bytes of data that were read from the store through this object so far.
    """

    def __init__(self, source: Source) -> None:
        self.uri = source.uri
        self.manifest = source.manifest
        self.format = source.format
        self.bytes_read = 0
        self._source = source
        self._counting = threading.Lock()

    @cached_property
    def leaves(self) -> Mapping[str, Leaf]:
        """All leaves by path, in the order of the tree."""
        return {
            entry.path: Leaf(entry, partial(self._read, number))
            for number, entry in enumerate(self.manifest.leaves)
        }

    @property
    def tree(self) -> Any:
        """The saved structure, with a `Leaf` at every leaf."""
        return tree.unflatten(self.manifest.structure, [*self.leaves.values()])

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the user gave to `save`."""
        return self.manifest.metadata

    @property
    def created(self) -> datetime:
        """When it was committed, by the clock of the machine that did."""
        return self.manifest.created

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves in memory."""
        return self.manifest.nbytes

    def __getitem__(self, path: str) -> Leaf:
        try:
            return self.leaves[path]
        except KeyError:
            raise LeafNotFoundError(
                f"{self.uri} has no leaf {path!r}{_hint(path, self.leaves)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def __contains__(self, path: object) -> bool:
        return path in self.leaves

    def __repr__(self) -> str:
        from ckptio.units import format_bytes

        return f"<Checkpoint {self.uri}: {len(self):,} leaves, {format_bytes(self.nbytes)}>"

    def reader(self, options: RestoreOptions, *, verify: bool = True) -> BoxReader:
        """Return a reader of this checkpoint's data; without checksums, it verifies nothing."""
        source = self._source
        return source.reader(
            source.backend,
            self.manifest,
            options,
            verify=verify and source.checksums,
            count=self._count,
        )

    def verify(self, *, options: RestoreOptions | None = None, progress: bool = False) -> None:
        """Read everything and compare every block with its checksum.

        Raises
        ------
        CorruptionError
            At the first difference; it names object, bytes and leaf.
        UnsupportedFormatError
            If it is another program's and has no checksums.
        """
        if not self._source.checksums:
            raise UnsupportedFormatError(
                f"{self.uri} is in the {self.format} format, which has no checksums: there is "
                "nothing to verify it with (ckptio convert makes a checkpoint that has them)"
            )
        reader = self.reader(options or RestoreOptions())
        objects = range(len(self.manifest.objects))
        reader.check_sizes(objects)
        total = sum(entry.size for entry in self.manifest.objects)
        for _ in track(reader.verify(objects), total, "verifying", show=progress):
            pass

    def close(self) -> None:
        """Release the store's connections. Leaves cannot be read afterwards."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.bytes_read += nbytes

    def _read(self, number: int, box: Box) -> npt.NDArray[Any]:
        stored = self.manifest.leaves[number].stored
        units = empty(stored.units_shape(box.shape), stored.unit)
        reader = self.reader(RestoreOptions())
        for _ in reader.run(reader.plan([Want(number, box)]), [units]):
            pass
        return stored.from_units(units)


def _hint(path: str, leaves: Mapping[str, Leaf]) -> str:
    if any(other.startswith(f"{path}/") for other in leaves):
        return ": it is a container; its leaves are below it"
    near = difflib.get_close_matches(path, list(leaves)[:10_000], n=3)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


def open(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open a checkpoint; reads its manifest and nothing else.

    Other programs' checkpoints are recognised: a ``.safetensors`` file, a Hugging Face directory
    of them, an Orbax checkpoint. They have no checksums, so nothing of them is verified.

    Raises
    ------
    NotFoundError
        If there is none.
    ManifestError
        If its manifest is damaged.
    UnsupportedFormatError
        If it was written by a newer version.

    Examples
    --------
    >>> import ckptio, numpy as np
    >>> _ = ckptio.save("memory://doc/open", {"w": np.ones((2, 2)), "step": 7}, metadata={"v": 1})
    >>> with ckptio.open("memory://doc/open") as checkpoint:
    ...     print(list(checkpoint), checkpoint.metadata)
    ['step', 'w'] {'v': 1}
    """
    if os.fspath(uri).endswith(".safetensors"):
        from ckptio import formats

        if (source := formats.open_file(uri, storage_options)) is not None:
            return Checkpoint(source)
    backend = hooks.open_backend(uri, storage_options)
    try:
        return Checkpoint(_found(backend))
    except BaseException:
        backend.close()
        raise


def _found(backend: Backend) -> Source:
    """Return what is at the backend's root: ckptio's own, or else another program's."""
    retrying = RetryingBackend(backend, Operation(f"opening {backend.uri}"))
    try:
        return Source(backend, commit.load(retrying), "ckptio", backend.uri)
    except NotFoundError:
        from ckptio import formats

        if (source := formats.recognise(backend, retrying)) is None:
            raise
        return source
    except InvalidKeyError as error:
        raise NotFoundError(f"there is no checkpoint at {backend.uri}: it is a file") from error


@contextmanager
def _connected(
    doing: str, uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> Iterator[Backend]:
    with hooks.open_backend(uri, storage_options) as backend:
        yield RetryingBackend(backend, Operation(f"{doing} {backend.uri}"))


def exists(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> bool:
    """Whether there is a committed checkpoint of ckptio's own; never served from a cache.

    That is what `save` would refuse to overwrite and `delete` deletes. Another program's checkpoint
    is none of ckptio's: whether there is one that can be read, `open` tells.

    Examples
    --------
    >>> import ckptio
    >>> ckptio.exists("memory://doc/never-saved")
    False
    """
    with _connected("looking for", uri, storage_options) as backend:
        return commit.is_there(backend)


def delete(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Delete a checkpoint, its manifest first, so that half of it is never seen.

    What is not ckptio's own below the URI stays, another program's checkpoint too. So does the data
    of uncommitted attempts, one of which may be at work: see `collect_garbage`.

    Raises
    ------
    NotFoundError
        If there is none.
    """
    with _connected("deleting", uri, storage_options) as backend:
        commit.remove(backend)


def collect_garbage(
    uri: str | os.PathLike[str],
    *,
    grace: float = commit.GRACE,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Delete what attempts that died left behind, in every checkpoint below the URI.

    Parameters
    ----------
    grace : float
        Seconds for which an uncommitted attempt must have been silent.

    Returns
    -------
    int
        How many objects and unfinished uploads were deleted.
    """
    with _connected("cleaning up", uri, storage_options) as backend:
        return commit.collect(backend, grace)
