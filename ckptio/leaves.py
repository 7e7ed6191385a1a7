"""Leaves to be saved: what each one is, how it is laid out, and where its bytes come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptio import dtypes, values
from ckptio.arrays import ArrayView, Pieces, is_jax_array
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

    def hold(self) -> None:
        """Keep what the array holds now: its owner may write to it."""
        self._array = self._array.copy(order="K")

    def read(self, box: Box) -> Pieces:
        """Return the whole array, of which the box is a part."""
        return [(Box.whole(self._array.shape), self._array)]


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
