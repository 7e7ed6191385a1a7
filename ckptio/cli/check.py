"""``verify`` and ``diff``: is it sound, and is it the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy.typing as npt
import typer
from rich.text import Text

from ckptio import tree
from ckptio.checkpoint import Checkpoint
from ckptio.checkpoint import open as open_checkpoint
from ckptio.cli.app import NO, Json, Options, Uri, command, interactive, parse_options
from ckptio.cli.output import console, print_json, print_table
from ckptio.cli.selection import blocks, read_whole
from ckptio.cli.statistics import Difference
from ckptio.errors import CorruptionError
from ckptio.leaf import Leaf
from ckptio.operation import Operation
from ckptio.progress import track
from ckptio.transfer import Transfer
from ckptio.units import format_bytes

THREADS = 4
"""Batches of leaves compared at a time."""
BATCH = 16 << 20
"""Bytes of small leaves that are read together, so that no block is read for each of them."""

Array = npt.NDArray[Any]


@command("ckptio verify s3://bucket/run/step-100")
def verify(
    uri: Uri,
    option: Options = [],  # noqa: B006  # Typer reads it, nobody writes it
    as_json: Json = False,
) -> None:
    """Read every block of a checkpoint and compare it with its checksum."""
    with open_checkpoint(uri, storage_options=parse_options(option)) as checkpoint:
        nbytes = sum(entry.size for entry in checkpoint.manifest.objects)
        facts = {
            "uri": checkpoint.uri,
            "leaves": len(checkpoint),
            "objects": len(checkpoint.manifest.objects),
            "nbytes": nbytes,
        }
        try:
            checkpoint.verify(progress=interactive())
        except CorruptionError as error:
            if as_json:
                print_json({**facts, "ok": False, "error": str(error)})
                raise typer.Exit(NO) from error
            raise
    if as_json:
        print_json({**facts, "ok": True})
    else:
        out = console()
        out.print(
            Text.assemble(
                ("sound", "bold green"),
                f": {len(checkpoint):,} leaves, {format_bytes(nbytes)} in {facts['objects']:,} "
                f"object{'s' * (facts['objects'] != 1)}",
            )
        )


@dataclass(frozen=True)
class _Row:
    """What differs in one leaf; `kind` is ``a``, ``b``, ``shape``, ``dtype`` or ``values``."""

    path: str
    kind: str
    a: str
    b: str
    difference: Difference | None = None


@command("ckptio diff run/step-100 gs://bucket/run/step-100 --atol 1e-6")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="URI of a checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="URI of another one.")],
    globs: Annotated[
        list[str] | None, typer.Argument(metavar="GLOB", help="Only leaves of these paths.")
    ] = None,
    atol: Annotated[
        float, typer.Option(min=0, help="Absolute differences up to this count as none.")
    ] = 0.0,
    rtol: Annotated[
        float, typer.Option(min=0, help="Relative differences up to this count as none.")
    ] = 0.0,
    structure: Annotated[
        bool, typer.Option("--structure", help="Compare paths, shapes and dtypes; read no data.")
    ] = False,
    option_a: Annotated[
        list[str], typer.Option("--a-option", metavar="KEY=VALUE", help="Storage option for A.")
    ] = [],  # noqa: B006  # Typer reads it, nobody writes it
    option_b: Annotated[
        list[str], typer.Option("--b-option", metavar="KEY=VALUE", help="Storage option for B.")
    ] = [],  # noqa: B006  # as above
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: structure, shapes, dtypes and values. Exit code 1 if they differ."""
    with (
        open_checkpoint(a, storage_options=parse_options(option_a)) as one,
        open_checkpoint(b, storage_options=parse_options(option_b)) as other,
    ):
        pattern = tree.Pattern(globs or "**")
        left = {path: leaf for path, leaf in one.leaves.items() if pattern.matches(path)}
        right = {path: leaf for path, leaf in other.leaves.items() if pattern.matches(path)}
        rows = _structure(left, right)
        if not structure:
            same = [
                path
                for path, leaf in left.items()
                if path in right and leaf.shape == right[path].shape
            ]
            rows += _values(one, other, same, atol, rtol)
        order = {path: i for i, path in enumerate([*left, *(p for p in right if p not in left)])}
        rows.sort(key=lambda row: order[row.path])
        shared = sum(path in right for path in left)
        _print(one, other, rows, shared, as_json)
    if rows:
        raise typer.Exit(NO)


def _structure(left: Mapping[str, Leaf], right: Mapping[str, Leaf]) -> list[_Row]:
    rows = [_Row(path, "a", _say(leaf), "") for path, leaf in left.items() if path not in right]
    rows += [_Row(path, "b", "", _say(leaf)) for path, leaf in right.items() if path not in left]
    for path, leaf in left.items():
        if (found := right.get(path)) is None:
            continue
        if leaf.shape != found.shape:
            rows.append(_Row(path, "shape", _say(leaf), _say(found)))
        elif leaf.dtype_name != found.dtype_name:
            rows.append(_Row(path, "dtype", _say(leaf), _say(found)))
    return rows


def _say(leaf: Leaf) -> str:
    shape = "×".join(map(str, leaf.shape))
    return f"{leaf.dtype_name} {shape}".rstrip()


def _values(
    one: Checkpoint, other: Checkpoint, paths: Sequence[str], atol: float, rtol: float
) -> list[_Row]:
    def row(path: str, difference: Difference) -> _Row | None:
        close = difference.absolute <= atol or difference.relative <= rtol
        # Without numbers there is no distance: 0 and 0, and what differs differs.
        measured = difference.absolute > 0
        if not difference.differing or (measured and close):
            return None
        return _Row(path, "values", _say(one[path]), _say(other[path]), difference)

    def compare(batch: Sequence[str]) -> tuple[int, list[_Row]]:
        found = []
        for path, pairs in _read_pairs(one, other, batch):
            difference = Difference()
            for a, b in pairs:
                difference.add(a, b)
            found.append(row(path, difference))
        return sum(one[path].nbytes for path in batch), [r for r in found if r is not None]

    transfer = Transfer(Operation("comparing"), concurrency=THREADS, memory=1)
    rows: list[_Row] = []

    def results() -> Iterator[int]:
        for nbytes, found in transfer.map(compare, _batches(one, other, paths)):
            rows.extend(found)
            yield nbytes

    total = sum(one[path].nbytes for path in paths)
    for _ in track(results(), total, "comparing", show=interactive()):
        pass
    return rows


def _batches(one: Checkpoint, other: Checkpoint, paths: Sequence[str]) -> list[list[str]]:
    """Divide leaves into what is read together: large ones alone, small ones in company."""
    batches: list[list[str]] = []
    room = 0
    for path in paths:
        nbytes = max(one[path].nbytes, other[path].nbytes)
        if nbytes > room:
            batches.append([])
            room = BATCH
        batches[-1].append(path)
        room -= nbytes
    return batches


def _read_pairs(
    one: Checkpoint, other: Checkpoint, batch: Sequence[str]
) -> Iterator[tuple[str, Iterable[tuple[Array, Array]]]]:
    """Yield for each leaf what there is to compare, a block of both at a time."""
    if len(batch) == 1:
        (path,) = batch
        left, right = one[path], other[path]
        parts = blocks(left.shape, max(left.dtype.itemsize, right.dtype.itemsize))
        yield path, ((left[part], right[part]) for part in parts)
        return
    for path, a, b in zip(batch, read_whole(one, batch), read_whole(other, batch), strict=True):
        yield path, [(a, b)]


def _print(
    one: Checkpoint, other: Checkpoint, rows: list[_Row], shared: int, as_json: bool
) -> None:
    if as_json:
        print_json(
            {
                "a": one.uri,
                "b": other.uri,
                "same": not rows,
                "differences": [
                    {
                        "path": row.path,
                        "kind": {"a": "only in a", "b": "only in b"}.get(row.kind, row.kind),
                        "a": row.a or None,
                        "b": row.b or None,
                        **(
                            {
                                "elements": row.difference.count,
                                "differing": row.difference.differing,
                                "max_absolute": row.difference.absolute,
                                "max_relative": row.difference.relative,
                            }
                            if row.difference
                            else {}
                        ),
                    }
                    for row in rows
                ],
            }
        )
        return
    out = console()
    if not rows:
        out.print(Text.assemble(("the same", "bold green"), f": {shared:,} leaves"))
        return
    columns = ["path", "what differs", "max abs", "max rel", "elements"]
    print_table(columns, [_cells(row) for row in rows], right=columns[2:])
    differ = len({row.path for row in rows})
    out.print(Text(f"{differ:,} of {differ + _same(rows, shared):,} leaves differ", style="dim"))


def _same(rows: list[_Row], shared: int) -> int:
    return shared - len({row.path for row in rows if row.kind not in "ab"})


def _cells(row: _Row) -> tuple[str, ...]:
    if row.kind in ("a", "b"):
        return row.path, f"only in {row.kind.upper()}: {row.a or row.b}", "", "", ""
    if row.difference is None:
        return row.path, f"{row.kind}: {row.a} → {row.b}", "", "", ""
    found = row.difference
    count = f"{found.differing:,} of {found.count:,}"
    if found.differing == found.count > 1:
        count = f"all {found.count:,}"
    if not found.absolute:
        return row.path, "values", "", "", count
    return row.path, "values", f"{found.absolute:.3g}", f"{found.relative:.3g}", count
