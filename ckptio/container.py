"""The header of a data object, which makes it a valid safetensors file.

Format: 8 bytes with the header's length (little-endian), the header as JSON padded with spaces so
that data begins at a multiple of 4 KiB, then the chunks without holes.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

__all__ = ["header"]

ALIGN = 4096


def header(
    tensors: Iterable[tuple[str, str, list[int], int]], metadata: dict[str, str]
) -> tuple[bytes, list[int]]:
    """Build a header.

    Parameters
    ----------
    tensors : iterable of (name, dtype, shape, nbytes)
        In the order in which their bytes follow.
    metadata : dict
        For the format's ``__metadata__``.

    Returns
    -------
    header : bytes
        Length included; a multiple of 4 KiB.
    offsets : list of int
        Where each tensor begins, in bytes from the start of the object.
    """
    table: dict[str, object] = {"__metadata__": metadata}
    ends = []
    end = 0
    for name, dtype, shape, nbytes in tensors:
        begin, end = end, end + nbytes
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        ends.append(end)
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
    text += b" " * (-(8 + len(text)) % ALIGN)
    base = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [base + begin for begin in [0, *ends][:-1]]
