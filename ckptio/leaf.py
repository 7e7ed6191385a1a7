"""`Leaf`: one leaf of an open checkpoint, read when it is looked at and only where it is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptio import arrays, values
from ckptio.arrays import ShardingInfo, empty
from ckptio.boxes import Box
from ckptio.errors import DriverUnavailableError, ManifestError, UnsupportedLeafError
from ckptio.manifest import LeafEntry

if TYPE_CHECKING:
    from types import EllipsisType

__all__ = ["Leaf"]

ReadBox = Callable[[Box], npt.NDArray[Any]]


class Leaf:
    """A lazy array: shape and dtype are known, bytes are read by indexing.

    Indexing takes NumPy's basic indices (integers, slices, ``...``, ``None``) and reads the bytes
    of the box that they span. For typed PRNG keys, shape, dtype and indexing are those of the
    keys' data.

    Examples
    --------
    >>> import ckptio, numpy as np
    >>> _ = ckptio.save("memory://doc/leaf", {"w": np.arange(6).reshape(2, 3)})
    >>> leaf = ckptio.open("memory://doc/leaf")["w"]
    >>> leaf
    <Leaf 'w' int64 (2, 3)>
    >>> leaf[1, ::2]
    array([3, 5])
    """

    def __init__(self, entry: LeafEntry, read: ReadBox) -> None:
        self._entry = entry
        self._read = read

    @property
    def path(self) -> str:
        """Key path, such as ``params/layers/0/kernel``."""
        return self._entry.path

    @property
    def kind(self) -> str:
        """What it was when it was saved: ``jax``, ``numpy``, ``key``, ``int``, ``str`` or such."""
        return self._entry.kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored array."""
        return self._entry.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of its elements in memory."""
        return self._entry.stored.numpy

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in the manifest, such as ``bfloat16`` or ``int4``."""
        return self._entry.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return Box.whole(self.shape).size

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._entry.nbytes

    @property
    def sharding(self) -> ShardingInfo | None:
        """How it was sharded when it was saved, for information; None if it was not."""
        return self._entry.sharding

    def read(self) -> Any:
        """Return the value as `restore` without a target would: an array, an int, a str."""
        return present(self._entry, self[...])

    def tensorstore(self) -> Any:
        """Return it as a lazy, read-only TensorStore; needs the extra ``ckptio[orbax]``.

        Bytes are read, and verified, when it is: only those of the domain that is asked for.

        Raises
        ------
        UnsupportedLeafError
            If TensorStore has no such dtype.

        Examples
        --------
        >>> import ckptio, numpy as np
        >>> _ = ckptio.save("memory://doc/ts", {"w": np.arange(6).reshape(2, 3)})
        >>> store = ckptio.open("memory://doc/ts")["w"].tensorstore()
        >>> store[1, 1:].read().result()
        array([4, 5])
        """
        try:
            import tensorstore
        except ImportError as error:
            raise DriverUnavailableError(
                "Leaf.tensorstore needs TensorStore: pip install 'ckptio[orbax]'"
            ) from error

        def read(domain: Any, chunk: npt.NDArray[Any], _: object) -> None:
            chunk[...] = self[domain.index_exp]

        try:
            dtype = tensorstore.dtype(self.dtype)
        except (TypeError, ValueError) as error:
            raise UnsupportedLeafError(
                f"leaf {self.path!r} is {self.dtype_name}, which TensorStore has not"
            ) from error
        return tensorstore.virtual_chunked(read, dtype=dtype, shape=self.shape)

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        box, rest = _span(index, self.shape)
        found = self._read(box) if box.size else empty(box.shape, self.dtype)
        # The ellipsis keeps a single element an array, of the leaf's own dtype.
        return found[(*rest, ...)]

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError(f"leaf {self.path!r} has to be read: it cannot come without a copy")
        found = self[...]
        return found if dtype is None else found.astype(dtype, copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"leaf {self.path!r} has no dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        sharding = f" {self.sharding}" if self.sharding else ""
        keys = f"{self._entry.implementation} keys, " if self._entry.implementation else ""
        return f"<Leaf {self.path!r} {keys}{self.dtype_name} {self.shape}{sharding}>"


def present(entry: LeafEntry, array: npt.NDArray[Any]) -> Any:
    """Return the value that a leaf's whole stored array stands for.

    Raises
    ------
    ManifestError
        If the array cannot be of the leaf's kind.
    """
    if entry.kind == "key":
        (data,) = arrays.put([(array, None)])
        return arrays.keys(data, entry.implementation or "")
    try:
        return values.decode(entry.kind, array)
    except ValueError as error:
        raise ManifestError(f"leaf {entry.path!r}: {error}") from error


def _span(index: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """Return the smallest box that an index looks into, and the index within that box."""
    wanted: tuple[int | slice | EllipsisType | None, ...]
    wanted = index if isinstance(index, tuple) else (index,)
    used = sum(1 for item in wanted if item is not None and item is not Ellipsis)
    if used > len(shape) or sum(item is Ellipsis for item in wanted) > 1:
        raise IndexError(f"too many indices for shape {shape}: {index!r}")
    if Ellipsis not in [item for item in wanted if item is Ellipsis]:
        wanted = (*wanted, Ellipsis)
    start: list[int] = []
    lengths: list[int] = []
    rest: list[Any] = []
    for item in wanted:
        axis = len(start)
        if item is None:
            rest.append(None)
        elif item is Ellipsis:
            for n in shape[axis : axis + len(shape) - used]:
                start.append(0)
                lengths.append(n)
                rest.append(slice(None))
        elif isinstance(item, slice):
            found = range(shape[axis])[item]
            low, high = (min(found), max(found) + 1) if found else (0, 0)
            start.append(low)
            lengths.append(high - low)
            rest.append(_counted_from(found, low))
        else:
            start.append(_position(item, shape[axis], axis))
            lengths.append(1)
            rest.append(0)
    return Box(tuple(start), tuple(lengths)), tuple(rest)


def _counted_from(found: range, low: int) -> slice:
    if not found:
        return slice(0, 0)
    stop = found[-1] - low + (1 if found.step > 0 else -1)
    # A stop of -1 would count from the end: None is what "down to the first" is called.
    return slice(found[0] - low, None if stop < 0 else stop, found.step)


def _position(item: Any, length: int, axis: int) -> int:
    try:
        if isinstance(item, bool | np.bool_):
            raise TypeError("a mask")
        position = operator.index(item)
    except TypeError as error:
        raise IndexError(
            f"only integers, slices, ... and None index a leaf, not {item!r}: read it first"
        ) from error
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of bounds for axis {axis} of length {length}")
    return position % length
