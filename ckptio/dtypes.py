"""NumPy and ml_dtypes dtypes as they are stored, and the packing of sub-byte elements.

Stored elements are little-endian. To move them, everything else works on *units*: unsigned
integers as wide as an element, or as its widest power of two up to 8 bytes with a trailing axis
of lanes (complex128 is two lanes of 8 bytes, a string of 5 bytes five lanes of 1). Elements of
less than a byte are one unit each in memory, and packed in storage, the first one in the lowest
bits, each chunk padded to a whole byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["StoredDtype", "parse", "stored"]

# What the safetensors format names and every reader of it knows; everything else travels as U8.
_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_NUMPY = [*_SAFETENSORS, "complex64", "complex128"]
_NUMPY = [name for name in _NUMPY if name != "bfloat16" and not name.startswith("float8")]
_ML_DTYPES = [
    "bfloat16",
    "float4_e2m1fn",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int2",
    "int4",
    "uint2",
    "uint4",
]
_SUB_BYTE = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
_TEXT = re.compile(r"([SU])(\d{1,9})")
_TIME = re.compile(r"(?:datetime|timedelta)64(?:\[\d{0,9}(?:[YMWDhms]|[munpfa]s)\])?")

Units = npt.NDArray[Any]


@dataclass(frozen=True)
class StoredDtype:
    """A dtype that can be stored.

    Attributes
    ----------
    name : str
        In the manifest: ``float32``, ``bfloat16``, ``int4``, ``datetime64[ns]``, ``U7`` (a string
        of 7 characters), ``S5`` (one of 5 bytes).
    itemsize : int
        Bytes of one element in memory.
    bits : int
        Of one element in storage.
    safetensors : str
        In the header of a data object.
    """

    name: str
    itemsize: int
    bits: int
    safetensors: str

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The dtype in memory, in this machine's byte order.

        Raises
        ------
        ValueError
            If the installed ml_dtypes does not have it.
        """
        if self.name not in _ML_DTYPES:
            return np.dtype(self.name)
        # Costs more than the rest of the library together: only who needs elements pays for it.
        import ml_dtypes

        scalar = getattr(ml_dtypes, self.name, None)
        if scalar is None:
            raise ValueError(f"dtype {self.name!r} needs a newer ml_dtypes than the one installed")
        found: np.dtype[Any] = np.dtype(scalar)
        return found

    @cached_property
    def unit(self) -> np.dtype[Any]:
        """The unsigned integer that elements are moved as."""
        width = next(w for w in (8, 4, 2, 1) if self.itemsize % w == 0)
        return np.dtype(f"u{width}")

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        """The trailing axis that units have and elements don't: ``()`` or one length."""
        count = self.itemsize // self.unit.itemsize
        return () if count == 1 else (count,)

    def units_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape, in units, of an array of `shape`."""
        return (*shape, *self.lanes)

    def stored_nbytes(self, elements: int) -> int:
        """Return the bytes that so many elements take in storage."""
        return -(-elements * self.bits // 8)

    def header_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape that a safetensors reader is told."""
        if self.bits < 8:
            return [self.stored_nbytes(prod(shape))]
        if self.safetensors == "U8" and self.itemsize > 1:
            return [*shape, self.itemsize]
        return list(shape)

    def as_units(self, array: npt.NDArray[Any]) -> Units:
        """Return an array's elements as units: a view, whatever its strides.

        Byte-swapped arrays are the exception and are copied.
        """
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        if not self.lanes:
            return array.view(self.unit)
        # A structured view adds the lanes as an axis without asking for contiguity.
        return array.view([("lanes", self.unit, self.lanes)])["lanes"]

    def from_units(self, units: Units) -> npt.NDArray[Any]:
        """Return C-contiguous units as an array of this dtype, without a copy."""
        shape = units.shape[: units.ndim - len(self.lanes)]
        return units.reshape(-1).view(self.numpy).reshape(shape)

    def pack(self, units: Units) -> npt.NDArray[np.uint8]:
        """Pack sub-byte elements: one unit each in, ``bits`` bits each out."""
        per_byte = 8 // self.bits
        flat = np.zeros(-(-units.size // per_byte) * per_byte, np.uint8)
        flat[: units.size] = units.reshape(-1)
        flat &= (1 << self.bits) - 1
        out = flat[0::per_byte].copy()
        for i in range(1, per_byte):
            out |= flat[i::per_byte] << (i * self.bits)
        return out

    def unpack(self, packed: npt.NDArray[np.uint8]) -> Units:
        """Return all elements of some packed bytes, one unit each."""
        per_byte = 8 // self.bits
        out: Units = np.empty((packed.size, per_byte), np.uint8)
        for i in range(per_byte):
            out[:, i] = (packed >> (i * self.bits)) & ((1 << self.bits) - 1)
        return out.reshape(-1)  # the upper bits are zero, as JAX and ml_dtypes have them


@cache
def parse(name: str) -> StoredDtype:
    """Return the dtype that a manifest names.

    Raises
    ------
    ValueError
        If it names none that this version, with the installed ml_dtypes, knows.
    """
    if name in _ML_DTYPES:
        itemsize = 2 if name == "bfloat16" else 1
        bits = _SUB_BYTE.get(name, itemsize * 8)
        return StoredDtype(name, itemsize, bits, _SAFETENSORS.get(name, "U8"))
    if name in _NUMPY:
        itemsize = np.dtype(name).itemsize
        return StoredDtype(name, itemsize, itemsize * 8, _SAFETENSORS.get(name, "U8"))
    if (match := _TEXT.fullmatch(name)) and int(match[2]) > 0:
        itemsize = np.dtype(name).itemsize
        return StoredDtype(name, itemsize, itemsize * 8, "U8")
    if _TIME.fullmatch(name):
        return StoredDtype(name, np.dtype(name).itemsize, 64, "I64")
    raise ValueError(f"unknown dtype {name!r}")


@lru_cache(maxsize=1024)
def stored(dtype: np.dtype[Any]) -> StoredDtype:
    """Return how a NumPy dtype is stored; its byte order does not matter.

    Raises
    ------
    TypeError
        If it cannot be stored: objects, structured and void dtypes, long doubles.

    Examples
    --------
    >>> stored(np.dtype(">f4")).name, stored(np.dtype("U3")).name
    ('float32', 'U3')
    """
    if dtype.kind in "SU":
        return parse(f"{dtype.kind}{dtype.itemsize // (4 if dtype.kind == 'U' else 1)}")
    try:
        found = parse(dtype.name)
    except ValueError:
        found = None
    if found is None or found.numpy != dtype.newbyteorder("="):
        raise TypeError(f"dtype {dtype} cannot be stored")
    return found
