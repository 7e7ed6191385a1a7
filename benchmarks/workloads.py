"""The workloads: trees with the shapes of real models, as plain data that needs no framework.

A workload is a list of leaves. Their bytes follow from their numbers, so that any process can make
them, and check what another process restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

import numpy as np
import numpy.typing as npt

MESH = (4, 2)
AXES = ("data", "model")

_PERIOD = 16_777_259
"""Of the numbers that leaves are cut from: more than any compressor looks back, and a prime, so
that a block in a wrong place is never taken for the right one."""


@cache
def _numbers() -> npt.NDArray[np.float32]:
    return np.random.Generator(np.random.SFC64(0)).standard_normal(_PERIOD, dtype=np.float32)


@dataclass(frozen=True)
class Leaf:
    """One float32 array.

    Attributes
    ----------
    path : str
        Segments joined by ``/``.
    shape : tuple of int
    spec : tuple of (str or None)
        Mesh axes that divide it, as in a `PartitionSpec`.
    number : int
        Its content follows from it.
    """

    path: str
    shape: tuple[int, ...]
    spec: tuple[str | None, ...]
    number: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * 4

    def content(self) -> npt.NDArray[np.float32]:
        """Make the array: normal numbers, as weights are."""
        made = np.empty(prod(self.shape), np.float32)
        at, start = 0, self.number * 1_000_003 % _PERIOD
        while at < made.size:
            piece = _numbers()[start : start + made.size - at]
            made[at : at + piece.size] = piece
            at, start = at + piece.size, 0
        return made.reshape(self.shape)


@dataclass(frozen=True)
class Workload:
    """What is saved, and what is then asked for.

    Attributes
    ----------
    letter, title : str
    leaves : tuple of Leaf
    wanted : str
        Prefix of the paths that are restored; all by default.
    other_mesh : bool
        Restore onto a mesh of another shape, divided along other dimensions.
    rows : int
        If not 0, only the first so many rows of the last leaf are read.
    saving : bool
        Whether the save is a figure too, or only what must come before.
    threads_matter : bool
        Whether a peer's number of writing threads can make a difference.
    rounds : int
        By default.
    """

    letter: str
    title: str
    leaves: tuple[Leaf, ...] = field(repr=False)
    wanted: str = ""
    other_mesh: bool = False
    rows: int = 0
    saving: bool = True
    threads_matter: bool = True
    rounds: int = 3

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def memory(self) -> int:
        """Bytes that a measurement may touch: what is restored, a copy, what the kernel caches."""
        return 3 * self.nbytes + (1 << 30)

    @property
    def target(self) -> tuple[Leaf, ...]:
        """What is restored."""
        return tuple(leaf for leaf in self.leaves if leaf.path.startswith(self.wanted))

    @property
    def wanted_nbytes(self) -> int:
        if self.rows:
            return self.leaves[-1].nbytes * self.rows // self.leaves[-1].shape[0]
        return sum(leaf.nbytes for leaf in self.target)


def _transformer(layers: int, width: int, hidden: int) -> Iterator[tuple[str, Leaf]]:
    shapes: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
        "attn_q": ((width, width), ("data", "model")),
        "attn_kv": ((width, width // 4), ("data", "model")),
        "attn_out": ((width, width), ("model", "data")),
        "mlp_in": ((width, hidden), ("data", "model")),
        "mlp_out": ((hidden, width), ("model", "data")),
    }
    for i in range(layers):
        for name, (shape, spec) in shapes.items():
            yield name, Leaf(f"layer{i}/{name}", shape, spec, 0)


def transformer(
    layers: int = 11, width: int = 2048, hidden: int = 8192, prefix: str = "", first: int = 0
) -> tuple[Leaf, ...]:
    """Return a float32 transformer, 5 leaves a layer; with the defaults 55 leaves, 1.9 GB."""
    return tuple(
        Leaf(prefix + leaf.path, leaf.shape, leaf.spec, first + number)
        for number, (_, leaf) in enumerate(_transformer(layers, width, hidden))
    )


def workload(letter: str, *, quick: bool = False) -> Workload:
    """Return a workload by its letter; `quick` makes it tiny."""
    if letter not in _MAKERS:
        raise ValueError(f"no workload {letter!r}: one of {', '.join(_MAKERS)}")
    made = _MAKERS[letter](quick)
    return replace(made, title=f"{made.title} (a tiny one instead)") if quick else made


def _a(quick: bool) -> Workload:
    sizes = (2, 64, 256) if quick else (11, 2048, 8192)
    return Workload("a", "a transformer, 1.9 GB", transformer(*sizes), rounds=5)


def _b(quick: bool) -> Workload:
    leaves = tuple(
        Leaf(f"leaf{i:04}", (8, 64), ("data", "model"), i) for i in range(50 if quick else 3000)
    )
    return Workload("b", "3,000 leaves of 2 kB", leaves, rounds=5)


def _c(quick: bool) -> Workload:
    leaf = Leaf("w", (256 if quick else 32768, 32768), AXES, 0)
    return Workload("c", "one leaf of 4 GB", (leaf,), threads_matter=False)


def _d(quick: bool) -> Workload:
    sizes = (2, 64, 256) if quick else (4, 2048, 8192)
    parts = [
        transformer(*sizes, f"{name}/", i * 1000) for i, name in enumerate(("mu", "nu", "params"))
    ]
    return Workload(
        "d",
        "params out of 2.1 GB with optimizer state",
        tuple(leaf for part in parts for leaf in part),
        "params/",
        saving=False,
        threads_matter=False,
    )


def _e(quick: bool) -> Workload:
    return replace(
        _a(quick),
        letter="e",
        title="(a) onto another mesh",
        other_mesh=True,
        saving=False,
        rounds=3,
    )


def _f(quick: bool) -> Workload:
    return replace(
        _a(quick),
        letter="f",
        title="128 rows of one leaf of (a)",
        rows=16 if quick else 128,
        saving=False,
        rounds=3,
    )


def _g(quick: bool) -> Workload:
    return replace(_a(quick), letter="g", title="how long saving (a) blocks", rounds=3)


_MAKERS = {"a": _a, "b": _b, "c": _c, "d": _d, "e": _e, "f": _f, "g": _g}


def nested(paths: dict[str, object]) -> dict[str, object]:
    """Turn a mapping of paths into nested dictionaries."""
    tree: dict[str, object] = {}
    for path, value in paths.items():
        *above, name = path.split("/")
        below = tree
        for segment in above:
            below = below.setdefault(segment, {})  # type: ignore[assignment]
        below[name] = value
    return tree
