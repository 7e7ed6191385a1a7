"""Columns of integers inside a JSON document: little-endian, zstd-compressed, base64.

Neighbours in a chunk table differ little, so most columns are stored as differences (the first
one from 0, wrapping at 64 bits), which zstd turns into almost nothing.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

__all__ = ["Column", "decode", "encode"]

MAX_ROWS = 1 << 27
"""Longest column that is written or read: bounds what a lying length can make us allocate."""


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One encoded column."""

    rows: int
    codec: str
    data: str


def encode(values: npt.ArrayLike, *, differences: bool = True) -> Column:
    """Encode a column of integers of up to 64 bits.

    Raises
    ------
    ValueError
        If it has more than `MAX_ROWS` rows.
    """
    column = np.asarray(values).astype("<u8", copy=False)
    if column.size > MAX_ROWS:
        raise ValueError(f"a column of {column.size} rows is longer than {MAX_ROWS}")
    if differences:
        column = np.diff(column, prepend=np.zeros(1, "<u8"))
    packed = zstandard.ZstdCompressor(level=1).compress(column.tobytes())
    codec = "diff+zstd" if differences else "zstd"
    return Column(column.size, codec, base64.b64encode(packed).decode("ascii"))


def decode(column: Column) -> npt.NDArray[Any]:
    """Return the values of a column as int64 (differences) or uint64.

    Raises
    ------
    ValueError
        If it is malformed.
    """
    if column.codec not in ("diff+zstd", "zstd") or not 0 <= column.rows <= MAX_ROWS:
        raise ValueError(f"a column has codec {column.codec!r} and {column.rows} rows")
    try:
        packed = base64.b64decode(column.data, validate=True)
        if zstandard.frame_content_size(packed) != column.rows * 8:
            raise ValueError("a column is not as long as it says")
        raw = zstandard.ZstdDecompressor().decompress(packed)
    except (binascii.Error, zstandard.ZstdError) as error:
        raise ValueError(f"a column cannot be decoded: {error}") from error
    values = np.frombuffer(raw, "<u8")
    if values.size != column.rows:
        raise ValueError("a column is not as long as it says")
    if column.codec == "zstd":
        return values
    return np.cumsum(values, dtype=np.uint64).view(np.int64)
