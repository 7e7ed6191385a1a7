"""An object's bytes, as they come, against the checksums of its blocks."""

from __future__ import annotations

import xxhash

from ckptio.chunk_table import BLOCK, UInt64s

__all__ = ["BlockCheck"]


class BlockCheck:
    """Checks consecutive bytes of an object, in pieces of any size.

    A block is known to be what was saved with its last byte, not before.

    Parameters
    ----------
    checksums : ndarray of uint64
        Of all blocks of the object: XXH3-64.
    start, stop : int
        Bytes of the object that come: from a block's first on, up to a block's end.
    """

    def __init__(self, checksums: UInt64s, start: int, stop: int) -> None:
        self._checksums = checksums
        self._at = start
        self._stop = stop
        self._digest = xxhash.xxh3_64()

    def damaged(self, data: memoryview) -> tuple[int, int] | None:
        """Take the next bytes; return the first block that ends in them and is another."""
        taken = 0
        while taken < len(data):
            first = self._at // BLOCK * BLOCK
            end = min(first + BLOCK, self._stop)
            piece = data[taken : taken + end - self._at]
            taken += len(piece)
            self._at += len(piece)
            self._digest.update(piece)
            if self._at == end:
                if self._digest.intdigest() != self._checksums[first // BLOCK]:
                    return first, end
                self._digest.reset()
        return None
