"""Statistics of arrays, and differences between two, gathered block by block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Difference", "Statistics", "is_numeric"]

Array = npt.NDArray[Any]


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of numbers; ml_dtypes' own are of kind ``V``."""
    return dtype.kind in "biufcV"


def _wide(array: Array) -> Array:
    """Return an array in the widest dtype of its kind, in which nothing overflows."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


@dataclass
class Statistics:
    """Of all elements seen so far; minimum, maximum, mean and deviation are of the finite ones."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    zero: int = 0
    minimum: float | None = None
    maximum: float | None = None
    _finite: int = field(default=0, repr=False)
    _mean: float | complex = field(default=0.0, repr=False)
    _squares: float = field(default=0.0, repr=False)

    def add(self, array: Array) -> None:
        """Look at some more elements."""
        if not array.size:
            return
        wide = _wide(array).reshape(-1)
        finite = wide[np.isfinite(wide)]
        self.count += wide.size
        self.nan += int(np.isnan(wide).sum())
        self.inf += int(np.isinf(wide).sum())
        self.zero += int((wide == 0).sum())
        if not finite.size:
            return
        if finite.dtype.kind != "c":
            low, high = float(finite.min()), float(finite.max())
            self.minimum = low if self.minimum is None else min(low, self.minimum)
            self.maximum = high if self.maximum is None else max(high, self.maximum)
        # Chan, Golub and LeVeque's update of mean and sum of squares.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = finite.mean()
            squares = float((np.abs(finite - mean) ** 2).sum())
            delta, total = mean - self._mean, self._finite + finite.size
            self._squares += squares + float(
                np.abs(delta) ** 2 * self._finite * finite.size / total
            )
            self._mean = self._mean + delta * finite.size / total
        self._finite = total

    def as_dict(self) -> dict[str, Any]:
        """Return what there is to say, in order."""
        found: dict[str, Any] = {"count": self.count}
        if self._finite:
            if self.minimum is not None:
                found |= {"min": self.minimum, "max": self.maximum}
            mean = complex(self._mean)
            found["mean"] = mean if mean.imag else mean.real
            found["std"] = (self._squares / self._finite) ** 0.5
        return found | {"zeros": self.zero, "nan": self.nan, "inf": self.inf}


@dataclass
class Difference:
    """Of two arrays of one shape, element by element.

    Attributes
    ----------
    count, differing : int
        Elements, and those that are not the same value (NaN is the same as NaN).
    absolute : float
        Largest ``|a - b|``; infinite where only one of them is NaN.
    relative : float
        Largest ``|a - b| / max(|a|, |b|)``, which is at most 2.
    """

    count: int = 0
    differing: int = 0
    absolute: float = 0.0
    relative: float = 0.0

    def add(self, a: Array, b: Array) -> None:
        """Compare some more elements."""
        self.count += a.size
        if not a.size or (a.tobytes() == b.tobytes() and a.dtype == b.dtype):
            return
        if not (is_numeric(a.dtype) and is_numeric(b.dtype)):
            self.differing += int((a != b).sum())
            return
        x, y = _wide(a), _wide(b)
        # 64-bit integers are compared as such: float64 does not hold all of them.
        exact = a.dtype.kind in "iu" and a.dtype == b.dtype
        same = a == b if exact else (x == y) | (np.isnan(x) & np.isnan(y))
        self.differing += int((~same).sum())
        if same.all():
            return
        x, y = x[~same], y[~same]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            absolute = np.abs(x - y)
            relative = absolute / np.maximum(np.abs(x), np.abs(y))
        lost = np.isnan(x) | np.isnan(y) | np.isinf(absolute)
        absolute[lost], relative[lost] = np.inf, np.inf
        self.absolute = max(self.absolute, float(absolute.max()))
        # Integers that float64 cannot tell apart leave 0 here, although they differ.
        self.relative = max(self.relative, float(relative.max()))


def total(parts: Iterable[Array]) -> Statistics:
    """Return the statistics of several arrays together."""
    found = Statistics()
    for part in parts:
        found.add(part)
    return found
