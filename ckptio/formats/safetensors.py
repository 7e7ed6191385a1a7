"""safetensors files, and Hugging Face's directories of them, as a `Manifest`.

Nothing but headers is read, and everything in them is checked before it is used: the format has no
checksums, so that what is read later cannot be verified. The tree is a flat dict from tensor names
to tensors: a dot in a name divides nothing (``only="encoder.layer.3.*"`` takes one layer), and a
``/`` in a name is written ``~1`` in the leaf's path, as everywhere.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from typing import Any, TypeGuard

from ckptio import dtypes, tree
from ckptio.backend import Backend, ObjectInfo, check_key
from ckptio.boxes import Box
from ckptio.errors import InvalidKeyError, ManifestError, NotFoundError, UnsupportedFormatError
from ckptio.manifest import ChunkTable, LeafEntry, Manifest, ObjectEntry
from ckptio.operation import Operation
from ckptio.transfer import Transfer

__all__ = ["DTYPES", "MAX_HEADER", "Tensor", "manifest_of_directory", "manifest_of_file"]

MAX_HEADER = 100_000_000
"""Bytes of the longest header that is read, as in the format's own library."""
MAX_INDEX = 1 << 28
"""Bytes of the longest index of a directory that is read."""
MAX_RANK = 64
"""Dimensions that a NumPy array can have."""
FIRST_READ = 1 << 16
"""Bytes read at once in the hope that the header is among them."""

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn",
}
"""The format's names of dtypes, and ours."""

_LAYOUT_DIFFERS = ("F6_E2M3", "F6_E3M2")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: `start` in bytes from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class _File:
    info: ObjectInfo
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str]


def manifest_of_file(store: Backend, key: str) -> Manifest:
    """Read one file's header.

    Raises
    ------
    ManifestError
        If it is malformed; the message says how.
    """
    file = _read_header(store, key)
    return _manifest([file], {tensor.name: 0 for tensor in file.tensors}, file.metadata)


def manifest_of_directory(store: Backend, names: Sequence[str]) -> Manifest:
    """Read the index of a directory and the headers that it names, or the only file there is.

    Parameters
    ----------
    names : sequence of str
        What the directory holds.

    Raises
    ------
    ManifestError
        If index or files are malformed, or contradict each other.
    UnsupportedFormatError
        If there are several files and nothing says which of them belong together.
    """
    index = _only_one(
        [name for name in names if name.endswith(".safetensors.index.json")],
        "model.safetensors.index.json",
    )
    if index is not None:
        return _manifest_of_index(store, index)
    files = [name for name in names if name.endswith(".safetensors")]
    file = _only_one(files, "model.safetensors")
    if file is None:
        raise UnsupportedFormatError(
            f"{store.uri} holds several safetensors files and no model.safetensors.index.json that "
            f"says which belong together: open one of them, such as {store.describe(files[0])}"
        )
    return manifest_of_file(store, file)


def _only_one(names: Sequence[str], usual: str) -> str | None:
    """Return the name that programs look for, else the only one; None if there are several."""
    if usual in names:
        return usual
    return names[0] if len(names) == 1 else None


def _manifest_of_index(store: Backend, index: str) -> Manifest:
    where = store.describe(index)
    info = store.head(index)
    if info.size > MAX_INDEX:
        raise ManifestError(f"{where} is {info.size} bytes long: that is no index of a model")
    try:
        document = _load(store.read(index))
        if not isinstance(weight_map := document.get("weight_map"), dict):
            raise ValueError("it has no 'weight_map'")
        for name, key in weight_map.items():
            if not isinstance(key, str):
                raise ValueError(f"tensor {name!r} lies in {key!r}, which is no file name")
            _check_name(name)
            check_key(key)
    except (ValueError, RecursionError, InvalidKeyError) as error:
        raise ManifestError(f"{where} is not a valid index: {error}") from error
    keys = sorted(set(weight_map.values()))
    operation = Operation(f"opening {store.uri}")
    transfer = Transfer(operation, concurrency=store.limits.concurrency, memory=MAX_HEADER)

    def read(key: str) -> tuple[str, _File]:
        try:
            return key, _read_header(store, key)
        except NotFoundError as error:
            raise ManifestError(f"{where} names {key!r}, which is missing") from error

    files = dict(transfer.map(read, keys))
    numbers = {key: number for number, key in enumerate(keys)}
    owner = {name: numbers[key] for name, key in weight_map.items()}
    metadata = document.get("metadata")
    return _manifest(
        [files[key] for key in keys],
        owner,
        metadata if isinstance(metadata, dict) else {},
        where,
    )


def _manifest(
    files: Sequence[_File], owner: Mapping[str, int], metadata: Mapping[str, Any], index: str = ""
) -> Manifest:
    """Make a manifest of the tensors that `owner` names, each in the file of that number."""
    tables = [{tensor.name: tensor for tensor in file.tensors} for file in files]
    leaves: list[LeafEntry] = []
    rows: list[list[tuple[int, int, Box]]] = []
    structure: dict[str, int] = {}
    for name in sorted(owner):
        tensor = tables[owner[name]].get(name)
        if tensor is None:
            key = files[owner[name]].info.key
            raise ManifestError(f"{index} says that {key!r} holds {name!r}, which it does not")
        structure[name] = len(leaves)
        leaves.append(LeafEntry(tree.segment(name), "numpy", tensor.dtype, tensor.shape))
        whole = Box.whole(tensor.shape)
        rows.append([(owner[name], tensor.start, whole)] if whole.size else [])
    return Manifest(
        attempt="",
        created=datetime.fromtimestamp(max((f.info.modified for f in files), default=0.0), UTC),
        metadata=dict(metadata),
        structure={"dict": structure},
        leaves=tuple(leaves),
        objects=tuple(ObjectEntry(file.info.key, file.info.size) for file in files),
        chunks=ChunkTable.build([len(leaf.shape) for leaf in leaves], rows),
        checksums=(),
    )


def _read_header(store: Backend, key: str) -> _File:
    info = store.head(key)
    where = store.describe(key)
    if info.size < 8:
        raise ManifestError(f"{where} is {info.size} bytes long: no safetensors file is")
    first = bytearray(min(info.size, FIRST_READ))
    store.read_into(key, 0, memoryview(first))
    (length,) = struct.unpack_from("<Q", first)
    if length > MAX_HEADER:
        raise ManifestError(
            f"{where} is not a safetensors file: its header would be {length} bytes long, more "
            f"than {MAX_HEADER}"
        )
    if 8 + length > info.size:
        raise ManifestError(
            f"{where} is {info.size} bytes long and says that its header alone is {length}: cut "
            "off, or not a safetensors file"
        )
    header = first[8 : 8 + length]
    if missing := length - len(header):
        rest = bytearray(missing)
        store.read_into(key, len(first), memoryview(rest))
        header += rest
    try:
        tensors, metadata = _parse(bytes(header), 8 + length, info.size)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where} is not a valid safetensors file: {error}") from error
    except NotImplementedError as error:
        raise UnsupportedFormatError(f"{where} cannot be read: {error}") from error
    return _File(info, tensors, metadata)


def _parse(header: bytes, base: int, size: int) -> tuple[tuple[Tensor, ...], Mapping[str, str]]:
    """Check a header; `base` is where data begins and `size` where it ends, in bytes."""
    document = _load(header)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is not a table of strings")
    extents = []
    tensors = []
    for name, entry in document.items():
        _check_name(name)
        dtype, shape, begin, end = _entry(name, entry, size - base)
        extents.append((begin, end, name))
        tensors.append(Tensor(name, dtype, shape, base + begin))
    at = 0
    for begin, end, name in sorted(extents):
        if begin < at:
            raise ValueError(f"tensor {name!r} overlaps another one")
        if begin > at:
            raise ValueError(
                f"bytes {at}:{begin} of its data, before {name!r}, belong to no tensor"
            )
        at = end
    if at != size - base:
        raise ValueError(f"its data is {size - base} bytes long, its tensors are {at}")
    return tuple(tensors), metadata


def _entry(name: str, entry: object, available: int) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {name!r} is described by {_brief(entry)}")
    code, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if code in _LAYOUT_DIFFERS:
        raise NotImplementedError(f"tensor {name!r} has dtype {code}, packed in 6 bits")
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {_brief(code)}, which is none of the format's")
    # NumPy refuses such lengths too, be another one 0.
    if not _integers(shape) or len(shape) > MAX_RANK or prod(n or 1 for n in shape) >= 1 << 56:
        raise ValueError(f"tensor {name!r} has shape {_brief(shape)}")
    if not _integers(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has data_offsets {_brief(offsets)}")
    begin, end = offsets
    if not begin <= end <= available:
        raise ValueError(
            f"tensor {name!r} has data_offsets {_brief(offsets)}, of {available} bytes of data"
        )
    stored = dtypes.parse(DTYPES[code])
    bits = prod(shape) * stored.bits
    if bits != (end - begin) * 8:
        raise ValueError(
            f"tensor {name!r} of dtype {code} and shape {_brief(shape)} takes {bits / 8:g} bytes, "
            f"its data_offsets are {end - begin} apart"
        )
    return stored.name, tuple(shape), begin, end


def _integers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in value)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _load(text: bytes) -> dict[str, Any]:
    """Decode a JSON object strictly: UTF-8, no name twice, no NaN."""
    document = json.loads(
        text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
    )
    if not isinstance(document, dict):
        raise ValueError("it does not begin with a JSON object")
    return document


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {_brief(name)} occurs twice")
        found[name] = value
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name {_brief(name)} is not Unicode") from None
