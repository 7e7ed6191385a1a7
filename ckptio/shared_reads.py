"""Shared reads: what several processes need is read once, and their devices exchange it.

An array that is replicated over processes is read as if mesh axes that do not divide it did: each
process reads a part. A jitted identity to the sharding that was wanted then lets the devices send
each other the parts, over their interconnect, which is faster than any store. It runs in the
caller's thread, after all processes said that they have read theirs: nobody waits for the dead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING, Any

from ckptio import arrays
from ckptio.chunk_table import BLOCK
from ckptio.errors import MismatchError
from ckptio.manifest import LeafEntry
from ckptio.rendezvous import Rendezvous
from ckptio.target import Output

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding, Sharding

__all__ = ["agree", "describe", "exchange", "finer"]


def finer(outputs: Sequence[Output], entries: Sequence[LeafEntry]) -> list[Output]:
    """Return outputs that need fewer bytes in all processes together, where there are such.

    Arrays of less than a block stay as they are: blocks are read whole.
    """
    found = []
    for output in outputs:
        entry = entries[output.leaf]
        if output.kind == "jax" and output.sharding is not None and entry.nbytes >= BLOCK:
            sharding = _finer(output.sharding, entry.shape)
            boxes = arrays.local_boxes(sharding, entry.shape)
            output = replace(output, sharding=sharding, boxes=boxes)
        found.append(output)
    return found


def agree(meeting: Rendezvous, exchanged: Sequence[str]) -> None:
    """Make sure that all processes are about to exchange the same arrays.

    Raises
    ------
    MismatchError, ProcessFailedError
        If they are not: here, or in another process.
    """
    theirs = json.loads(meeting.decide("plan", lambda: json.dumps(exchanged)))
    with meeting.phase("agree"):
        for other, own in zip_longest(theirs, exchanged):
            if other != own:
                raise MismatchError(
                    f"process {meeting.group.index} restores {own or 'no more arrays'}, process 0 "
                    f"{other or 'no more'}: with share_reads all must restore the same"
                )


def describe(
    outputs: Iterable[Output], plan: Iterable[Output], entries: Sequence[LeafEntry]
) -> list[str]:
    """Return what is exchanged, in the words in which all processes must agree."""
    return [
        f"{entries[output.leaf].path} {output.dtype} from {planned.sharding} to {output.sharding}"
        for output, planned in zip(outputs, plan, strict=True)
        if planned.sharding != output.sharding
    ]


def exchange(
    outputs: Iterable[Output], plan: Iterable[Output], restored: Mapping[int, Any]
) -> dict[int, Any]:
    """Return the restored leaves, each on the sharding that was wanted; a collective.

    All processes must call it, for the same leaves: a process that stays away stops the others.
    """
    import jax

    result = dict(restored)
    # One computation for all arrays of one mesh, in the same order everywhere.
    groups: dict[tuple[Any, ...], list[Output]] = {}
    for output, planned in zip(outputs, plan, strict=True):
        if planned.sharding != output.sharding:
            sharding: Any = output.sharding
            groups.setdefault((*sharding.mesh.devices.flat,), []).append(output)
    for group in groups.values():
        wanted = [output.sharding for output in group]
        found = jax.jit(_identity, out_shardings=wanted)([result[o.leaf] for o in group])
        result |= {output.leaf: array for output, array in zip(group, found, strict=True)}
        for array in found:
            array.block_until_ready()
    return result


def _identity(found: list[jax.Array]) -> list[jax.Array]:
    return found


def _finer(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    """Return a sharding with which each process reads less; the same if there is none."""
    import jax

    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    device = sharding.mesh.devices.flat[0]
    if sharding.memory_kind not in (None, device.default_memory().kind):
        return sharding  # the exchange is between devices' own memories
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    if not all(axes is None or isinstance(axes, str | tuple) for axes in spec):
        return sharding
    divided = [() if axes is None else (axes,) if isinstance(axes, str) else axes for axes in spec]
    best, least = sharding, _needed(sharding, shape)
    for axis in sharding.mesh.axis_names:
        if any(axis in axes for axes in divided):
            continue
        for candidate in _with(divided, axis, sharding, shape):
            named = _named(sharding, candidate)
            if (needed := _needed(named, shape)) < least:
                best, least, divided = named, needed, candidate
                break
    return best


def _with(
    divided: Sequence[tuple[str, ...]], axis: str, sharding: NamedSharding, shape: Sequence[int]
) -> Iterator[list[tuple[str, ...]]]:
    """Yield how an axis can divide a dimension more; the first dimension keeps rows whole."""
    for dimension, length in enumerate(shape):
        axes = (*divided[dimension], axis)
        if length % prod(sharding.mesh.shape[name] for name in axes) == 0:
            yield [*divided[:dimension], axes, *divided[dimension + 1 :]]


def _named(sharding: NamedSharding, divided: Sequence[tuple[str, ...]]) -> NamedSharding:
    import jax

    spec = jax.sharding.PartitionSpec(*(axes or None for axes in divided))  # type: ignore[no-untyped-call]  # JAX's
    return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _needed(sharding: Sharding, shape: tuple[int, ...]) -> int:
    """Return the elements that all processes together need."""
    return sum(box.size * len(holders) for box, holders in arrays.layout(sharding, shape))
