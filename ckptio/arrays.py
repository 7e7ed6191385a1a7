"""The only module that looks inside a `jax.Array`: shards out, shards in.

JAX is imported when it is first needed, never by ``import ckptio``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptio import pages
from ckptio.boxes import Box, intersect, merge
from ckptio.errors import UnsupportedLeafError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding

__all__ = [
    "ArrayView", "Layout", "assemble", "empty", "goes_whole", "is_jax_array", "keys", "layout",
    "local_boxes", "put",
]  # fmt: skip

SMALL = 64 << 10
"""Arrays of up to this many bytes go from and to their devices whole, not by shard."""

LARGE = 4 << 20
"""Arrays of this many bytes or more have pages of their own, which NumPy would want to be huge."""

Layout = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes that make up an array, each with the processes that hold it."""

Pieces = list[tuple[Box, npt.NDArray[Any]]]
"""Arrays that together hold a box, and where in the leaf each of them lies."""

Index = tuple[slice, ...]


def is_jax_array(leaf: object) -> bool:
    """Whether a leaf is a `jax.Array`, without importing JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


def is_key(dtype: object) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    jax = sys.modules.get("jax")
    return jax is not None and bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def key_dtype(implementation: str) -> Any:
    """Return the dtype of the typed PRNG keys of a generator, such as ``threefry2x32``."""
    import jax

    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


@dataclass(frozen=True)
class ShardingInfo:
    """A leaf's sharding as it was saved, for information.

    Attributes
    ----------
    mesh : mapping
        Axis names and sizes.
    spec : tuple
        For each dimension, the mesh axes that divide it.
    """

    mesh: Mapping[str, int]
    spec: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        axes = ", ".join("×".join(names) if names else "-" for names in self.spec)
        how = f"({axes})" if any(self.spec) else "replicated"
        return f"{how} on {'×'.join(map(str, self.mesh.values()))}"


class ArrayView:
    """A `jax.Array` to be saved: its layout, and this process's shards as NumPy views.

    Raises
    ------
    UnsupportedLeafError
        If the array is a tracer, or its buffers were donated or deleted.
    """

    def __init__(self, path: str, array: jax.Array) -> None:
        import jax

        if isinstance(array, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"leaf {path!r} is a tracer: save outside of jit, grad and vmap"
            )
        if array.is_deleted():
            raise UnsupportedLeafError(f"leaf {path!r} was donated or deleted")
        self.implementation: str | None = None
        if is_key(array.dtype):
            self.implementation = str(jax.random.key_impl(array))
            array = jax.random.key_data(array)
        self._array = array
        self.shape = array.shape
        self.dtype = np.dtype(array.dtype)
        # JAX looks its shards up lazily, and two threads that do so at once spoil the array for
        # good. So the caller's thread does it, and later ones touch only what is kept here.
        self._fetching = threading.Lock()
        nbytes = prod(self.shape) * self.dtype.itemsize  # JAX's own takes longer to ask for
        if nbytes <= SMALL and array.is_fully_addressable:
            # Cheaper than to look at its shards one by one, later.
            self._held: dict[Box, Any] = {Box.whole(self.shape): _fetched(array)}
        else:
            # Replicas on several devices have the same box: one of them is enough.
            self._held = {
                _box(shard.index, self.shape): shard.data for shard in array.addressable_shards
            }

    def start_copy(self) -> None:
        """Let the shards that are on accelerators set out for the host."""
        for data in self._held.values():
            if not isinstance(data, np.ndarray) and next(iter(data.devices())).platform != "cpu":
                data.copy_to_host_async()

    def hold(self) -> list[Callable[[], None]]:
        """Keep what the array holds now, whatever becomes of it: on CPU devices, without a copy.

        JAX does not reuse a donated buffer that somebody still looks at. Nothing is left to be run.
        """
        self._held = {box: np.asarray(data) for box, data in self._held.items()}
        return []

    def layout(self) -> Layout:
        """Return the boxes to store, and the processes that hold each."""
        return layout(self._array.sharding, self.shape)

    def sharding(self) -> ShardingInfo | None:
        """Return how the array is sharded, if by name over a mesh of several devices."""
        return _info(self._array.sharding)

    def read(self, box: Box) -> Pieces:
        """Return what this process's shards hold of a box; on CPU devices as views."""
        with self._fetching:
            found = [held for held in self._held if held == box or intersect(held, box) is not None]
            for held in found:
                self._held[held] = np.asarray(self._held[held])  # each is fetched once
            return [(held, self._held[held]) for held in found]


@dataclass(frozen=True)
class _Grid:
    """The distinct shards of an array, all of one shape, that tile it in rows and columns.

    Attributes
    ----------
    shards : tuple of int
        Their numbers, in C order of their places.
    tiled : tuple of int
        For each dimension how many there are, then the shape of one.
    axes : tuple of int
        The order in which the axes of `tiled` are those of the array.
    """

    shards: tuple[int, ...]
    tiled: tuple[int, ...]
    axes: tuple[int, ...]


def _fetched(array: jax.Array) -> npt.NDArray[Any]:
    """Return a small array from its devices: what `numpy.asarray` does, in half the time."""
    grid = _grid(array.sharding, array.shape)
    if grid is None:
        return np.asarray(array)
    joined = np.concatenate([array.addressable_data(i) for i in grid.shards])
    return joined.reshape(grid.tiled).transpose(grid.axes).reshape(array.shape)


@lru_cache(maxsize=4096)
def _grid(sharding: Sharding, shape: tuple[int, ...]) -> _Grid | None:
    """Return how a sharding tiles an array, None if it does not, or with one shard."""
    # JAX's own arrays count on it that shards come in the order of this mapping.
    indices = sharding.addressable_devices_indices_map(shape)
    numbers: dict[Box, int] = {}
    for i, index in enumerate(indices.values()):
        numbers.setdefault(_box(index or (), shape), i)  # replicas: one is enough
    boxes = sorted(numbers)
    if len(boxes) < 2 or not prod(shape):
        return None
    tile = boxes[0].shape
    counts = tuple(n // m for n, m in zip(shape, tile, strict=True))
    regular = product(*(range(0, n, m) for n, m in zip(shape, tile, strict=True)))
    if boxes != [Box(start, tile) for start in regular]:
        return None
    axes = chain.from_iterable((i, len(shape) + i) for i in range(len(shape)))
    return _Grid(tuple(numbers[box] for box in boxes), counts + tile, tuple(axes))


def _box(index: Index, shape: Sequence[int]) -> Box:
    bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


@lru_cache(maxsize=4096)
def _info(sharding: Sharding) -> ShardingInfo | None:
    import jax

    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.size == 1:
        return None
    spec = tuple(
        () if not isinstance(axes, str | tuple) else (axes,) if isinstance(axes, str) else axes
        for axes in sharding.spec
    )
    return ShardingInfo({str(k): int(v) for k, v in sharding.mesh.shape.items()}, spec)


@lru_cache(maxsize=4096)
def layout(sharding: Sharding, shape: tuple[int, ...]) -> Layout:
    """Return the boxes that a sharded array is stored as, in order of their start.

    Shards that the same processes hold are joined where they lie side by side: what one process
    holds of an array is one box, whatever its devices hold, so that rows are contiguous and other
    programs find whole tensors.

    Raises
    ------
    ValueError
        If the sharding does not fit the shape (JAX's own message).
    """
    # jaxlib's device has no annotations.
    indices: Mapping[Any, Index] = sharding.devices_indices_map(shape)
    return held((_box(index, shape), device.process_index) for device, index in indices.items())


def held(shards: Iterable[tuple[Box, int]]) -> Layout:
    """Return the layout of an array whose shards these processes hold."""
    holders: dict[Box, set[int]] = {}
    for box, process in shards:
        holders.setdefault(box, set()).add(process)
    groups: dict[tuple[int, ...], list[Box]] = {}
    for box, found in holders.items():
        groups.setdefault(tuple(sorted(found)), []).append(box)
    return tuple(sorted((box, found) for found, boxes in groups.items() for box in merge(boxes)))


def goes_whole(sharding: Sharding, nbytes: int) -> bool:
    """Whether an array is put on its devices whole: a small one JAX divides faster than we do."""
    return nbytes <= SMALL and sharding.is_fully_addressable


@lru_cache(maxsize=4096)
def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return the distinct boxes that this process's devices hold."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return tuple(sorted({_box(index or (), shape) for index in indices}))


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return memory of any content that JAX's CPU devices can take over without a copy."""
    size = prod(shape) * dtype.itemsize
    if size >= LARGE:
        return pages.ordinary(size).view(dtype).reshape(shape)
    raw = np.empty(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size].view(dtype).reshape(shape)


def assemble(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sharding: Sharding,
    pieces: Mapping[Box, npt.NDArray[Any]],
) -> jax.Array:
    """Make an array of host pieces, which are given away and never written to again.

    Parameters
    ----------
    pieces : mapping
        One array for each of `local_boxes`.
    """
    import jax

    def pick(index: Index | None) -> npt.NDArray[Any]:
        return pieces[_box(index or (), shape)]

    return jax.make_array_from_callback(shape, sharding, pick, dtype=dtype)


def put(whole: Sequence[tuple[npt.NDArray[Any], Sharding | None]]) -> list[jax.Array]:
    """Put whole arrays on their devices, or the default one, in one go; they are given away."""
    import jax

    free = jax.device_put([array for array, sharding in whole if sharding is None])
    bound = [(array, sharding) for array, sharding in whole if sharding is not None]
    placed = jax.device_put([array for array, _ in bound], [sharding for _, sharding in bound])
    sources = {True: iter(free), False: iter(placed)}
    return [next(sources[sharding is None]) for _, sharding in whole]


def keys(data: jax.Array, implementation: str) -> jax.Array:
    """Return the typed PRNG keys of a generator whose data this is."""
    import jax

    wrapped: jax.Array = jax.random.wrap_key_data(data, impl=implementation)
    return wrapped


def canonical(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype that JAX makes of one, None if it has none (strings, times).

    Where JAX's 64-bit types are off, that is float32 for float64.
    """
    import jax

    if dtype.kind in "SUmM" or dtype.name.startswith("float6_"):
        return None
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def concrete(sharding: Sharding) -> Sharding:
    """Return a sharding over real devices: an abstract mesh becomes the one in force.

    Raises
    ------
    ValueError
        If the mesh is abstract and ``jax.set_mesh`` has none of its shape in force.
    """
    import jax

    if not isinstance(sharding, jax.sharding.NamedSharding) or isinstance(
        sharding.mesh, jax.sharding.Mesh
    ):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.empty or dict(mesh.shape) != dict(sharding.mesh.shape):
        raise ValueError(
            f"the sharding's mesh {dict(sharding.mesh.shape)} is abstract, and no such mesh is in "
            "force: restore under jax.set_mesh, or pass a sharding over real devices"
        )
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
