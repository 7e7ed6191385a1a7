"""`Part`: what one process contributes to the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ckptio.chunk_table import (
    ChunkTable,
    ObjectEntry,
    UInt64s,
    decode_checksums,
    encode_checksums,
)
from ckptio.columns import Column
from ckptio.columns import decode as decode_column
from ckptio.columns import encode as encode_column
from ckptio.errors import ManifestError
from ckptio.manifest import FORMAT
from ckptio.sealed import is_sound, seal

__all__ = ["Part"]


class _PartDocument(msgspec.Struct):
    """The JSON of one process's part."""

    format: str
    attempt: str
    process: int
    ranks: Column
    objects: list[ObjectEntry]
    chunks: dict[str, Column]
    blocks: Column


@dataclass(frozen=True, eq=False)
class Part:
    """What one process contributes: its objects, its chunks, its checksums."""

    objects: tuple[ObjectEntry, ...]
    chunks: ChunkTable
    checksums: tuple[UInt64s, ...]

    def encode(self, attempt: str, process: int) -> bytes:
        """Return the bytes of ``parts/<attempt>/p00000.json``."""
        return seal(
            _PartDocument(
                format=f"ckptio/{FORMAT[0]}.{FORMAT[1]}",
                attempt=attempt,
                process=process,
                ranks=encode_column(self.chunks.ranks),
                objects=list(self.objects),
                chunks=self.chunks.encode(),
                blocks=encode_checksums(self.checksums),
            )
        )

    @classmethod
    def decode(cls, data: bytes, where: str) -> Part:
        """Read a part; `Manifest` checks its content.

        Raises
        ------
        ManifestError
            If it is damaged.
        """
        if not is_sound(data):
            raise ManifestError(f"{where} is damaged: its checksum does not match its content")
        document = msgspec.json.decode(data, type=_PartDocument)
        return cls(
            tuple(document.objects),
            ChunkTable.decode(document.chunks, decode_column(document.ranks)),
            decode_checksums(document.blocks, document.objects),
        )

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """Join the parts of all processes."""
        return cls(
            tuple(entry for part in parts for entry in part.objects),
            ChunkTable.joined([p.chunks for p in parts], [len(p.objects) for p in parts]),
            tuple(checksums for part in parts for checksums in part.checksums),
        )
