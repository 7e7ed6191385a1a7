"""What a restore should give: the target and the checkpoint, compared leaf by leaf.

`resolve` decides for every leaf that is wanted how it comes back, and finds every difference
before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptio import arrays, dtypes, tree
from ckptio.boxes import Box
from ckptio.errors import MismatchError
from ckptio.leaf import Leaf
from ckptio.manifest import LeafEntry, Manifest
from ckptio.values import ARRAY_KINDS, HOST_KINDS

if TYPE_CHECKING:
    from jax.sharding import Sharding

    Placement = Sharding | Callable[[Leaf], Sharding | None] | None

__all__ = ["Output", "Target", "resolve"]

_NUMBERS = ("bool", "int", "float", "complex")


@dataclass(frozen=True)
class Output:
    """How one leaf comes back.

    Attributes
    ----------
    leaf : int
        Its number in the checkpoint.
    kind : str
        As in `LeafEntry.kind`: what it becomes.
    dtype : numpy.dtype
        What it becomes; differs from the stored one only where a cast was asked for.
    sharding : Sharding, optional
        For ``jax`` and ``key``; None is the default device.
    boxes : tuple of Box
        What this process needs of it.
    """

    leaf: int
    kind: str
    dtype: np.dtype[Any]
    sharding: Sharding | None
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Target:
    """Everything that is wanted, and how to make the tree of it."""

    outputs: tuple[Output, ...]
    build: Callable[[dict[int, Any]], Any]


def resolve(
    manifest: Manifest,
    leaves: Sequence[Leaf],
    like: object,
    *,
    only: str | Iterable[str] | None,
    sharding: Placement,
    strict: bool,
    cast: bool,
    where: str,
) -> Target:
    """Compare target and checkpoint.

    Raises
    ------
    MismatchError
        With every difference.
    """
    pattern = tree.Pattern("**" if only is None else only)
    paths = [entry.path for entry in manifest.leaves]
    if only is not None and (idle := pattern.unmatched(paths)):
        raise MismatchError(_no_match(idle, paths, where), idle)
    keep = [pattern.matches(path) for path in paths]
    differences: list[str] = []
    if like is not None:
        wanted, build = _from_like(manifest, like, keep, pattern, strict, differences)
    else:
        wanted = {number: None for number, kept in enumerate(keep) if kept}
        structure = manifest.structure if all(keep) else None
        if structure is None and only is not None:
            structure = tree.prune(manifest.structure, keep, pattern)
        build = lambda found: tree.unflatten(structure, found)  # noqa: E731
    outputs = []
    for number, example in wanted.items():
        try:
            output = _output(manifest.leaves[number], number, example, cast)
            outputs.append(_placed(output, manifest.leaves[number], leaves[number], sharding, cast))
        except _DifferenceError as difference:
            differences.append(f"{paths[number]}: {difference}")
    if differences:
        lines = "".join(f"\n  {line}" for line in differences)
        raise MismatchError(
            f"{where} does not fit the target, {len(differences)} "
            f"difference{'s' * (len(differences) != 1)}:{lines}",
            differences,
        )
    return Target(tuple(outputs), build)


class _DifferenceError(Exception):
    """One leaf is not what the target asks for."""


def _no_match(globs: Sequence[str], paths: Sequence[str], where: str) -> str:
    hints = [
        f"{glob!r} matches no leaf of {where}"
        + (f"; for everything below it, write '{glob}/**'" if _is_container(glob, paths) else "")
        for glob in globs
    ]
    return "\n".join(hints)


def _is_container(glob: str, paths: Sequence[str]) -> bool:
    return any(path.startswith(f"{glob}/") for path in paths)


def _from_like(
    manifest: Manifest,
    like: object,
    keep: Sequence[bool],
    pattern: tree.Pattern,
    strict: bool,
    differences: list[str],
) -> tuple[dict[int, Any], Callable[[dict[int, Any]], Any]]:
    """Pair the target's leaves with the checkpoint's; what `only` leaves out stays as it is."""
    import jax

    _, named = tree.flatten(like)
    numbers = {entry.path: number for number, entry in enumerate(manifest.leaves)}
    wanted: dict[int, Any] = {}
    places: list[tuple[int | None, Any]] = []
    for path, example in named:
        number = numbers.get(path)
        if not pattern.matches(path) or (number is None and not strict):
            number = None
        elif number is None:
            differences.append(f"{path}: missing in the checkpoint, wanted {_say(example)}")
        else:
            wanted[number] = example
        places.append((number, example))
    if strict:
        differences += [
            f"{entry.path}: in the checkpoint ({entry.dtype} {list(entry.shape)}), "
            "not in the target"
            for number, entry in enumerate(manifest.leaves)
            if keep[number] and number not in wanted
        ]
    treedef = jax.tree_util.tree_structure(like)

    def build(found: dict[int, Any]) -> Any:
        values = [example if n is None else found[n] for n, example in places]
        return jax.tree_util.tree_unflatten(treedef, values)

    return wanted, build


def _say(example: Any) -> str:
    if hasattr(example, "shape") and hasattr(example, "dtype"):
        return f"{example.dtype} {list(example.shape)}"
    return type(example).__name__


def _output(entry: LeafEntry, number: int, example: Any, cast: bool) -> Output:
    """Decide kind and dtype of a leaf from the target's leaf."""
    stored = entry.stored.numpy
    whole = (Box.whole(entry.shape),)
    if example is None or isinstance(example, Leaf):
        # As saved, and without devices: what was on them comes back in NumPy.
        kind = "numpy" if entry.kind == "jax" else entry.kind
        return Output(number, kind, stored, None, whole)
    kind = _kind(example)
    if kind == "key":
        return _key_output(entry, number, example, whole)
    if kind in HOST_KINDS:
        scalar = entry.kind in (*_NUMBERS, *ARRAY_KINDS) and entry.shape == ()
        # A counter is an int in a fresh state and an array in a trained one (Flax's TrainState).
        counter = kind == "int" and entry.kind in ARRAY_KINDS and scalar and stored.kind in "iu"
        if kind != entry.kind and not counter and not (cast and scalar and kind in _NUMBERS):
            raise _DifferenceError(
                f"is {_saved(entry)}, wanted {kind}{_may_cast(scalar and kind in _NUMBERS)}"
            )
        return Output(number, kind, stored, None, whole)
    if entry.kind not in ARRAY_KINDS and not (cast and entry.kind in _NUMBERS):
        raise _DifferenceError(
            f"is {_saved(entry)}, wanted {_say(example)}{_may_cast(entry.kind in _NUMBERS)}"
        )
    if tuple(example.shape) != entry.shape:
        raise _DifferenceError(f"has shape {list(entry.shape)}, wanted {list(example.shape)}")
    dtype = np.dtype(example.dtype).newbyteorder("=")
    if dtype != stored and not cast:
        raise _DifferenceError(f"is {entry.dtype}, wanted {dtype}{_may_cast(True)}")
    if dtype != stored and not _castable(stored, dtype):
        raise _DifferenceError(f"is {entry.dtype}, which cannot be cast to {dtype}")
    return Output(number, kind, dtype, _own_sharding(example), whole)


def _key_output(entry: LeafEntry, number: int, example: Any, whole: tuple[Box, ...]) -> Output:
    if entry.kind != "key" or entry.implementation is None:
        raise _DifferenceError(f"is {_saved(entry)}, wanted typed PRNG keys")
    if arrays.key_dtype(entry.implementation) != example.dtype:
        raise _DifferenceError(f"holds {entry.implementation} keys, wanted {example.dtype}")
    if tuple(example.shape) != entry.shape[:-1]:
        raise _DifferenceError(f"has shape {list(entry.shape[:-1])}, wanted {list(example.shape)}")
    # The data of keys has a dimension more, which no sharding of keys divides.
    return Output(number, "key", entry.stored.numpy, _own_sharding(example), whole)


def _own_sharding(example: Any) -> Sharding | None:
    """Return where the target's leaf lives; None if it is free to be moved, or not JAX's."""
    if arrays.is_jax_array(example) and not example.committed:
        return None
    return getattr(example, "sharding", None)


def _kind(example: Any) -> str:
    if type(example).__name__ in HOST_KINDS and type(example).__module__ == "builtins":
        return type(example).__name__
    if isinstance(example, np.ndarray):
        return "numpy"
    if isinstance(example, np.generic):
        return "numpy_scalar"
    if hasattr(example, "shape") and hasattr(example, "dtype"):
        return "key" if arrays.is_key(example.dtype) else "jax"
    raise _DifferenceError(f"the target has a {type(example).__name__} here, no leaf to restore")


def _saved(entry: LeafEntry) -> str:
    if entry.kind in ARRAY_KINDS:
        return f"an array of {entry.dtype} {list(entry.shape)}"
    return "typed PRNG keys" if entry.kind == "key" else f"a Python {entry.kind}"


def _may_cast(useful: bool) -> str:
    return " (cast=True converts)" if useful else ""


def _castable(source: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    try:
        dtypes.stored(wanted)
    except TypeError:
        return False
    if source.kind in "SUmM" or wanted.kind in "SUmM":
        return source.kind == wanted.kind
    return source.kind != "c" or wanted.kind == "c"


def _placed(
    output: Output, entry: LeafEntry, leaf: Leaf, sharding: Placement, cast: bool
) -> Output:
    """Decide where a leaf goes, and so which boxes of it are needed here."""
    output = replace(output, sharding=_chosen(output, leaf, sharding) or output.sharding)
    if output.sharding is not None and output.kind == "numpy":
        output = replace(output, kind="jax")
    if output.kind == "jax":
        canonical = arrays.canonical(output.dtype)
        if canonical is None:
            raise _DifferenceError(f"is {entry.dtype}, which JAX does not have")
        if canonical != output.dtype:
            if not cast:
                raise _DifferenceError(
                    f"is {output.dtype}, which JAX would make {canonical}: set jax_enable_x64, "
                    "restore it as NumPy, or pass cast=True"
                )
            output = replace(output, dtype=canonical)
    if output.kind not in ("jax", "key") or output.sharding is None:
        return output
    try:
        concrete = arrays.concrete(output.sharding)
        boxes = arrays.local_boxes(concrete, entry.shape)
        if arrays.goes_whole(concrete, entry.nbytes):
            boxes = (Box.whole(entry.shape),)
    except ValueError as error:
        text = " ".join(str(error).split())
        raise _DifferenceError(f"{list(entry.shape)} cannot be sharded so: {text}") from error
    return replace(output, sharding=concrete, boxes=boxes)


def _chosen(output: Output, leaf: Leaf, sharding: Placement) -> Sharding | None:
    """Return what the `sharding` argument says of a leaf; strings and scalars stay on the host."""
    if sharding is None or output.kind not in ("jax", "key", "numpy"):
        return None
    import jax

    if not isinstance(sharding, jax.sharding.Sharding):
        return sharding(leaf)
    if output.kind == "numpy" and arrays.canonical(output.dtype) is None:
        return None
    rank = len(leaf.shape) - (output.kind == "key")
    if rank == 0 and isinstance(sharding, jax.sharding.NamedSharding):
        nothing = jax.sharding.PartitionSpec()  # type: ignore[no-untyped-call]  # JAX's
        return jax.sharding.NamedSharding(sharding.mesh, nothing, memory_kind=sharding.memory_kind)
    return sharding
