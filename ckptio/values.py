"""Leaves that live on the host: Python and NumPy values as arrays, and back.

Every leaf is stored as an array; its *kind* says what it was. An int is an int64, or, when that
does not hold it, its little-endian two's complement bytes; a str is its UTF-8 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ARRAY_KINDS", "HOST_KINDS", "decode", "encode"]

Array = npt.NDArray[Any]

ARRAY_KINDS = ("jax", "numpy", "numpy_scalar")
"""Kinds whose dtype and shape are the user's own."""

HOST_KINDS = ("bool", "int", "float", "complex", "str", "bytes")
"""Python's kinds, whose dtype and shape are ours."""

_INT64 = np.iinfo(np.int64)


def encode(value: object) -> tuple[str, Array]:
    """Return the kind of a host value and the array that stores it.

    Raises
    ------
    TypeError
        If it is of no type that can be saved, with advice.
    """
    # Exact types: a subclass (an IntEnum, a masked array) would come back as something else.
    kind = type(value)
    if kind is bool:
        return "bool", np.asarray(value, np.bool_)
    if kind is int:
        return "int", _encode_int(value)  # type: ignore[arg-type]  # kind is int
    if kind is float:
        return "float", np.asarray(value, np.float64)
    if kind is complex:
        return "complex", np.asarray(value, np.complex128)
    if isinstance(value, str) and kind is str:
        return "str", np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
    if isinstance(value, bytes) and kind is bytes:
        return "bytes", np.frombuffer(value, np.uint8)
    if isinstance(value, np.generic):
        return "numpy_scalar", np.asarray(value)
    if isinstance(value, np.ndarray) and kind in (np.ndarray, np.memmap):
        return "numpy", value.view(np.ndarray)
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be saved")


def _encode_int(value: int) -> Array:
    if _INT64.min <= value <= _INT64.max:
        return np.asarray(value, np.int64)
    length = value.bit_length() // 8 + 1
    return np.frombuffer(value.to_bytes(length, "little", signed=True), np.uint8)


def decode(kind: str, array: Array) -> object:
    """Return the value of a kind from the array that stored it.

    Raises
    ------
    ValueError
        If the array cannot be of that kind.
    """
    match kind:
        case "bool" | "int" | "float" | "complex" if array.ndim == 0:
            return array.item()
        case "int":
            return int.from_bytes(array.tobytes(), "little", signed=True)
        case "str":
            return array.tobytes().decode("utf-8", "surrogatepass")
        case "bytes":
            return array.tobytes()
        case "numpy_scalar" if array.ndim == 0:
            return array[()]
        case "numpy" | "jax":
            return array
    raise ValueError(f"an array of shape {array.shape} is not of kind {kind!r}")
