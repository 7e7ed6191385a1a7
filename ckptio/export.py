"""Leaves as another program's tensors: their names, their dtypes, and the files they go to.

Sources: https://github.com/huggingface/safetensors#format, and for divided files
https://huggingface.co/docs/huggingface_hub/package_reference/serialization
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptio import container, dtypes
from ckptio.boxes import Box
from ckptio.checkpoint import Checkpoint
from ckptio.dtypes import StoredDtype
from ckptio.errors import MismatchError
from ckptio.manifest import LeafEntry
from ckptio.save_plan import ChunkPlan, LeafPlan, ObjectPlan

__all__ = ["Export", "describe_leaves", "export_objects"]

_CODES = {
    "complex64": "C64",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn": "F4",
}
"""What newer versions of the format name; ckptio's own objects have it as bytes."""

_WIDER = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}


@dataclass(frozen=True)
class Export:
    """One leaf as a tensor.

    Attributes
    ----------
    leaf : int
        Its number in the checkpoint.
    name : str
        Of the tensor.
    code : str
        The format's name of its dtype.
    plan : LeafPlan
        Its dtype in the file, and its shape.
    """

    leaf: int
    name: str
    code: str
    plan: LeafPlan

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.plan.dtype.stored_nbytes(prod(self.plan.shape))


def describe_leaves(
    checkpoint: Checkpoint, numbers: Sequence[int], separator: str, *, cast: bool
) -> list[Export]:
    """Decide how each leaf is written.

    Raises
    ------
    MismatchError
        If some cannot be, or two get one name; it lists them all.
    """
    exports = []
    problems = []
    owner: dict[str, str] = {}
    for number in numbers:
        entry = checkpoint.manifest.leaves[number]
        name = separator.join(
            part.replace("~1", "/").replace("~0", "~") for part in entry.path.split("/")
        )
        if name in owner or name == "__metadata__":
            other = owner.get(name, "the format's own metadata")
            problems.append(f"{entry.path}: would be called {name!r}, as is {other}")
            continue
        owner[name] = entry.path
        found = _dtype(entry, cast=cast)
        if isinstance(found, str):
            problems.append(f"{entry.path}: {found}")
            continue
        code = _CODES.get(found.name, found.safetensors)
        exports.append(Export(number, name, code, LeafPlan(entry.path, found, entry.shape, ())))
    if problems:
        lines = "".join(f"\n  {line}" for line in problems)
        raise MismatchError(
            f"{len(problems)} of {checkpoint.uri}'s leaves cannot be written as safetensors "
            f"(choose others with only=):{lines}",
            problems,
        )
    return exports


def _dtype(entry: LeafEntry, *, cast: bool) -> StoredDtype | str:
    """Return the dtype in the file, or why there is none."""
    stored = entry.stored
    if entry.kind in ("str", "bytes"):
        return f"is a Python {entry.kind}, which the format has not"
    if entry.kind == "int" and entry.shape:
        return "is an int of more than 64 bits, which the format has not"
    if stored.numpy.kind in "SUmM" or stored.name == "complex128":
        return f"is {stored.name}, which the format has not"
    even = stored.bits >= 8 or prod(entry.shape) * stored.bits % 8 == 0
    if (stored.safetensors != "U8" or stored.name == "uint8" or stored.name in _CODES) and even:
        return stored
    wider = _WIDER.get(stored.name, "bfloat16")
    if not cast:
        return f"is {stored.name}, which the format has not: cast=True writes it as {wider}"
    return dtypes.parse(wider)


def export_objects(
    exports: Sequence[Export], name: str, max_size: int, metadata: Mapping[str, str]
) -> tuple[list[ObjectPlan], dict[str, Any] | None]:
    """Lay tensors out in files.

    Parameters
    ----------
    name : str
        Of the file, if one is enough.
    max_size : int
        Bytes of the tensors of one file; one tensor alone may be larger.

    Returns
    -------
    plans : list of ObjectPlan
        Their chunks' leaves are numbers in `exports`.
    index : dict or None
        What the index says, if there are several files.
    """
    groups: list[list[int]] = []
    filled = 0
    for number, export in enumerate(exports):
        if not groups or (groups[-1] and filled + export.nbytes > max_size):
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += export.nbytes
    groups = groups or [[]]
    if len(groups) == 1:
        return [_object(exports, groups[0], name, metadata)], None
    stem = name.removesuffix(".safetensors")
    keys = [f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    plans = [
        _object(exports, group, key, metadata) for group, key in zip(groups, keys, strict=True)
    ]
    index = {
        "metadata": {"total_size": sum(export.nbytes for export in exports)},
        "weight_map": {
            exports[number].name: key
            for group, key in zip(groups, keys, strict=True)
            for number in group
        },
    }
    return plans, index


def _object(
    exports: Sequence[Export], numbers: Sequence[int], key: str, metadata: Mapping[str, str]
) -> ObjectPlan:
    # Wider elements first, so that every tensor is aligned without holes.
    ordered = sorted(numbers, key=lambda n: (-exports[n].plan.dtype.itemsize, exports[n].name))
    header, offsets = container.header(
        [
            (exports[n].name, exports[n].code, list(exports[n].plan.shape), exports[n].nbytes)
            for n in ordered
        ],
        dict(metadata),
    )
    chunks = tuple(
        ChunkPlan(n, Box.whole(exports[n].plan.shape), exports[n].nbytes, offset)
        for n, offset in zip(ordered, offsets, strict=True)
    )
    end = chunks[-1].offset + chunks[-1].nbytes if chunks else len(header)
    return ObjectPlan(key, header, chunks, end)
