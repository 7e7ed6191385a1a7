"""``PATH[SLICE]`` as it is typed, and leaves read block by block."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt
import typer

from ckptio.arrays import empty
from ckptio.boxes import Box
from ckptio.checkpoint import Checkpoint
from ckptio.leaf import Leaf
from ckptio.options import RestoreOptions
from ckptio.restore_plan import Want

__all__ = ["Index", "blocks", "parse_selection", "read_whole"]

BLOCK = 32 << 20
"""Bytes that are looked at at once."""

Index = tuple[Any, ...]

_ITEM = re.compile(r"\s*(-?\d+)?\s*(?:(:)\s*(-?\d+)?\s*(?:(:)\s*(-?\d+)?)?)?\s*")


def parse_selection(checkpoint: Checkpoint, text: str) -> tuple[Leaf, Index | None]:
    """Return the leaf that is meant, and the index into it if one was written.

    A path may itself end in brackets: a leaf of exactly that name goes first.
    """
    if text in checkpoint or not text.endswith("]"):
        return checkpoint[text], None
    path, _, inside = text[:-1].rpartition("[")
    leaf = checkpoint[path]
    return leaf, tuple(_item(item) for item in inside.split(","))


def _item(text: str) -> Any:
    if text.strip() == "...":
        return Ellipsis
    match = _ITEM.fullmatch(text)
    if match is None or not (match[1] or match[2]):
        raise typer.BadParameter(
            f"not an index: {text!r} (write integers, slices and ..., as in w[0:3,::2])"
        )
    first, is_slice, stop, _, step = match.groups()
    if not is_slice:
        return int(first)
    numbers = [None if number is None else int(number) for number in (first, stop, step)]
    if numbers[2] == 0:
        raise typer.BadParameter("the step of a slice cannot be 0")
    return slice(*numbers)


def blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Cut an array into boxes of at most `BLOCK` bytes, in C order.

    Examples
    --------
    >>> [*blocks((), 8)], [*blocks((2, 3), 8)]
    ([()], [(slice(0, 2, None), slice(0, 3, None))])
    """
    if not shape:
        yield ()
        return
    row = itemsize
    for n in shape[1:]:
        row *= n
    rows = BLOCK // row if row else shape[0]
    if rows:
        rest = tuple(slice(0, n) for n in shape[1:])
        for start in range(0, shape[0], rows):
            yield slice(start, min(start + rows, shape[0])), *rest
    else:
        for i in range(shape[0]):
            for inner in blocks(shape[1:], itemsize):
                yield slice(i, i + 1), *inner


def read_whole(checkpoint: Checkpoint, paths: Sequence[str]) -> list[npt.NDArray[Any]]:
    """Read several leaves at once: a block that they share is read and verified once."""
    entries = checkpoint.manifest.leaves
    numbers = {entry.path: number for number, entry in enumerate(entries)}
    chosen = [numbers[path] for path in paths]
    outs = [
        empty(entry.stored.units_shape(entry.shape), entry.stored.unit)
        for entry in (entries[number] for number in chosen)
    ]
    full = [i for i, out in enumerate(outs) if out.size]
    reader = checkpoint.reader(RestoreOptions(memory=BLOCK))
    wants = [Want(chosen[i], Box.whole(entries[chosen[i]].shape)) for i in full]
    for _ in reader.run(reader.plan(wants), [outs[i] for i in full]):
        pass
    return [entries[n].stored.from_units(out) for n, out in zip(chosen, outs, strict=True)]
