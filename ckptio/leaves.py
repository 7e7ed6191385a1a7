"""Leaves to be saved: what each one is, how it is laid out, and where its bytes come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptio import dtypes, pages, values
from ckptio.arrays import LARGE, ArrayView, Pieces, is_jax_array
from ckptio.boxes import Box
from ckptio.errors import UnsupportedLeafError
from ckptio.manifest import LeafEntry
from ckptio.save_plan import LeafPlan

__all__ = ["HostArray", "SavedLeaf", "describe"]


class HostArray:
    """A NumPy array to be saved."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    def start_copy(self) -> None:
        """It is where it has to be."""

    def hold(self) -> list[Callable[[], None]]:
        """Keep what the array holds now, for its owner may write to it; return what is to be run.

        A small array is copied at once. The copy of a large one is in pieces, for several threads,
        and in ordinary pages: where a hypervisor had taken back NumPy's huge ones, a copy of 1.9 GB
        took 5.8 s into those, 1.4 s into ordinary ones, and takes 0.7 s in two threads or more.
        """
        array = self._array
        if array.nbytes < LARGE or not array.ndim:
            self._array = array.copy(order="K")
            return []
        strides = np.empty_like(array).strides  # nothing is touched: it costs no memory
        memory = pages.ordinary(array.nbytes)
        self._array = copy = np.ndarray(array.shape, array.dtype, memory, strides=strides)
        return [partial(np.copyto, to, of) for to, of in _pieces(copy, array)]

    def read(self, box: Box) -> Pieces:
        """Return the whole array, of which the box is a part."""
        return [(Box.whole(self._array.shape), self._array)]


def _pieces(
    copy: npt.NDArray[Any], array: npt.NDArray[Any]
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Yield both arrays in corresponding pieces of some 4 MiB, each in one stretch of the copy."""
    axis = max(range(array.ndim), key=lambda i: (array.shape[i] > 1, copy.strides[i]))
    length = array.shape[axis]
    step = max(1, LARGE * length // array.nbytes)
    before = (slice(None),) * axis
    for i in range(0, length, step):
        where = (*before, slice(i, i + step))
        yield copy[where], array[where]


@dataclass(frozen=True)
class SavedLeaf:
    """One leaf.

    Attributes
    ----------
    entry : LeafEntry
        Its row of the leaf table.
    plan : LeafPlan
        Its layout; empty for a leaf whose bytes another one brings.
    source : ArrayView or HostArray
        Where its bytes come from.
    same_as : int, optional
        The number of an earlier leaf that is the very same array (tied weights).
    """

    entry: LeafEntry
    plan: LeafPlan
    source: ArrayView | HostArray
    same_as: int | None = None


def describe(named: Sequence[tuple[str, Any]], owner: int = 0) -> list[SavedLeaf]:
    """Look at all leaves, before a byte is written.

    Parameters
    ----------
    named : sequence of (path, leaf)
    owner : int
        The process that writes what only the host holds.

    Raises
    ------
    UnsupportedLeafError
        If one cannot be saved; the message has its path.
    """
    first: dict[int, int] = {}
    return [
        _describe(path, leaf, owner, first.setdefault(id(leaf), number), number)
        for number, (path, leaf) in enumerate(named)
    ]


def _describe(path: str, leaf: object, owner: int, first: int, number: int) -> SavedLeaf:
    sharding = implementation = None
    if is_jax_array(leaf):
        source: ArrayView | HostArray
        source = view = ArrayView(path, leaf)  # type: ignore[arg-type]  # is_jax_array says so
        implementation = view.implementation
        kind = "key" if implementation else "jax"
        dtype, shape = _stored(path, view.dtype), view.shape
        layout, sharding = view.layout(), view.sharding()
    else:
        try:
            kind, array = values.encode(leaf)
        except TypeError as error:
            raise UnsupportedLeafError(f"leaf {path!r}: {error}{_advice(leaf)}") from None
        dtype, shape = _stored(path, array.dtype), array.shape
        layout, source = ((Box.whole(shape), (owner,)),), HostArray(array)
    same = first if first != number and isinstance(leaf, np.ndarray) | is_jax_array(leaf) else None
    entry = LeafEntry(path, kind, dtype.name, shape, sharding, implementation)
    plan = LeafPlan(path, dtype, shape, () if same is not None else layout)
    return SavedLeaf(entry, plan, source, same)


def _stored(path: str, dtype: np.dtype[Any]) -> dtypes.StoredDtype:
    try:
        return dtypes.stored(dtype)
    except TypeError as error:
        raise UnsupportedLeafError(f"leaf {path!r}: {error}") from None


def _advice(leaf: object) -> str:
    name = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    if name.startswith("torch."):
        return ": pass tensor.numpy()"
    if callable(leaf):
        return ": keep functions out of the tree (equinox.filter, nnx.state)"
    if name.endswith("ShapeDtypeStruct"):
        return ": it is abstract, pass the array"
    return ": make it an array or a plain Python value, or register its type as a pytree node"
