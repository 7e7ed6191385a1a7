"""A JSON document whose last field is the XXH3-64 of all bytes before it."""

from __future__ import annotations

import re

import msgspec
import xxhash

__all__ = ["is_sealed", "is_sound", "seal"]

_SEAL = re.compile(rb',"checksum":"([0-9a-f]{16})"\}\n?\Z')


def seal(document: msgspec.Struct) -> bytes:
    """Encode a document, closed by its checksum."""
    body = msgspec.json.encode(document)[:-1]
    return body + b',"checksum":"%016x"}\n' % xxhash.xxh3_64_intdigest(body)


def is_sealed(data: bytes) -> bool:
    """Whether a document ends in a checksum, be it right or wrong."""
    return _SEAL.search(data) is not None


def is_sound(data: bytes) -> bool:
    """Whether a document ends in the checksum of what stands before it."""
    found = _SEAL.search(data)
    if found is None:
        return False
    return xxhash.xxh3_64_intdigest(data[: found.start()]) == int(found[1], 16)
