"""Where an open checkpoint comes from: ckptio's own format, or another program's seen as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptio.backend import Backend
from ckptio.dtypes import Units
from ckptio.manifest import Manifest
from ckptio.options import RestoreOptions
from ckptio.reader import Reader
from ckptio.restore_plan import Read, Want

__all__ = ["BoxReader", "Source"]


class BoxReader(Protocol):
    """Reads boxes of leaves; `Reader` is the one for leaves that are runs of bytes."""

    def plan(self, wants: Sequence[Want]) -> list[Read]:
        """Plan the reads for some boxes."""

    def run(self, reads: Sequence[Read], outs: Sequence[Units]) -> Iterable[Read]:
        """Carry reads out in parallel; yield each when its boxes have what it brings them."""

    def check_sizes(self, objects: Iterable[int]) -> None:
        """Compare the sizes of objects (by their numbers) with the manifest's."""

    def verify(self, objects: Iterable[int]) -> Iterable[int]:
        """Read every block of some objects and check it; yield the bytes of each read."""


class ReaderFactory(Protocol):
    """Makes a reader of a source's data."""

    def __call__(
        self,
        backend: Backend,
        manifest: Manifest,
        options: RestoreOptions,
        *,
        verify: bool = True,
        count: Callable[[int], None] = ...,
    ) -> BoxReader:
        """Return a reader; `count` is told how many bytes each read moved."""


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Source:
    """One checkpoint in some store, whoever wrote it.

    Attributes
    ----------
    backend : Backend
        The store; closing the source closes it.
    manifest : Manifest
        What is where.
    format : str
        ``ckptio``, ``safetensors`` or ``orbax``.
    uri : str
        What to call it in messages.
    checksums : bool
        Whether the manifest has them, so that what is read can be verified.
    reader : callable
        Makes the reader of the data.
    release : callable
        Frees what the reader needs besides the backend.
    """

    backend: Backend
    manifest: Manifest
    format: str
    uri: str
    checksums: bool = True
    reader: ReaderFactory = Reader
    release: Callable[[], None] = _nothing

    def close(self) -> None:
        """Release connections, and what else was opened."""
        self.release()
        self.backend.close()
