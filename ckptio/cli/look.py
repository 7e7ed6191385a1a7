"""``ls`` and ``show``: what there is, and what is in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.text import Text

from ckptio import tree
from ckptio.checkpoint import Checkpoint
from ckptio.checkpoint import open as open_checkpoint
from ckptio.cli.app import Json, Options, Uri, command, parse_options
from ckptio.cli.output import console, print_json, print_table, printable, printable_lines
from ckptio.cli.selection import BLOCK, Index, blocks, parse_selection
from ckptio.cli.statistics import Statistics, is_numeric
from ckptio.errors import LeafNotFoundError, NotFoundError
from ckptio.leaf import Leaf
from ckptio.units import format_bytes

MANY = 1000
"""Elements up to which ``show --json`` prints values."""


class Sort(StrEnum):
    """Orders of leaves."""

    path = "path"
    size = "size"


@command("ckptio ls gs://bucket/run/step-100 'params/**' --depth 2 --sort size")
def ls(
    uri: Annotated[
        str, typer.Argument(metavar="URI", help="Of a checkpoint, or of a run: its steps.")
    ],
    globs: Annotated[
        list[str] | None, typer.Argument(metavar="GLOB", help="Only leaves of these paths.")
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option("--depth", "-d", min=1, metavar="N", help="Fold what is deeper into one row."),
    ] = None,
    sort: Annotated[Sort, typer.Option(help="Order of leaves.")] = Sort.path,
    option: Options = [],  # noqa: B006  # Typer reads it, nobody writes it
    as_json: Json = False,
) -> None:
    """List the leaves of a checkpoint, or the checkpoints of a run."""
    options = parse_options(option)
    try:
        checkpoint = open_checkpoint(uri, storage_options=options)
    except NotFoundError:
        from ckptio.cli.steps import find_steps, print_steps

        steps = find_steps(uri, options)
        if not steps:
            raise
        print_steps(uri, steps, as_json)
        return
    with checkpoint:
        pattern = tree.Pattern(globs or "**")
        leaves = [leaf for path, leaf in checkpoint.leaves.items() if pattern.matches(path)]
        if globs and not leaves:
            raise LeafNotFoundError(
                f"no leaf of {checkpoint.uri} matches {' or '.join(map(repr, globs))}"
            )
        if sort is Sort.size:
            leaves.sort(key=lambda leaf: -leaf.nbytes)
        if as_json:
            print_json({**_facts(checkpoint), "leaves": [_leaf_facts(leaf) for leaf in leaves]})
        else:
            _print_leaves(checkpoint, leaves, depth, sort)


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "uri": checkpoint.uri,
        "format": checkpoint.format,
        "created": checkpoint.created.isoformat(),
        "nbytes": checkpoint.nbytes,
        "metadata": dict(checkpoint.metadata),
    }


def _leaf_facts(leaf: Leaf) -> dict[str, Any]:
    sharding = leaf.sharding
    return {
        "path": leaf.path,
        "kind": leaf.kind,
        "dtype": leaf.dtype_name,
        "shape": list(leaf.shape),
        "nbytes": leaf.nbytes,
        "sharding": None
        if sharding is None
        else {"mesh": dict(sharding.mesh), "spec": [list(axes) for axes in sharding.spec]},
    }


def _print_leaves(
    checkpoint: Checkpoint, leaves: Sequence[Leaf], depth: int | None, sort: Sort
) -> None:
    out = console()
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        parts = leaf.path.split("/")
        deeper = depth is not None and len(parts) > depth
        groups.setdefault("/".join(parts[:depth]) + "/" * deeper, []).append(leaf)
    if sort is Sort.size:
        sizes = {path: sum(leaf.nbytes for leaf in found) for path, found in groups.items()}
        groups = {path: groups[path] for path in sorted(groups, key=lambda p: -sizes[p])}
    meshes = {tuple(leaf.sharding.mesh.items()) for leaf in leaves if leaf.sharding}
    rows = [_row(path, found, len(meshes) > 1) for path, found in groups.items()]
    print_table(["path", "dtype", "shape", "size", "sharding"], rows, right=["size"])
    shown = sum(leaf.nbytes for leaf in leaves)
    of_all = f" of {len(checkpoint):,}" if len(leaves) != len(checkpoint) else ""
    created = f"{checkpoint.created:%Y-%m-%d %H:%M} UTC"
    noun = "leaf" if len(leaves) == 1 and not of_all else "leaves"
    count = f"{len(leaves):,}{of_all} {noun}"
    summary = f"{count}, {format_bytes(shown)}; {checkpoint.format}, {created}"
    if len(meshes) == 1:
        # Said once: nearly always it is the same for all.
        (mesh,) = meshes
        summary += f"; mesh {', '.join(f'{axis}={n}' for axis, n in mesh)}"
    out.print(Text(printable(summary), style="dim"))
    if checkpoint.metadata:
        import json

        found = json.dumps(dict(checkpoint.metadata), ensure_ascii=False)
        short = found if len(found) <= 400 else f"{found[:399]}…"
        out.print(Text(f"metadata: {printable(short)}", style="dim"))


def _row(path: str, leaves: Sequence[Leaf], with_mesh: bool) -> tuple[str, ...]:
    if path.endswith("/") and leaves[0].path != path:
        nbytes = sum(leaf.nbytes for leaf in leaves)
        dtypes = sorted({leaf.dtype_name for leaf in leaves})
        kinds = dtypes[0] if len(dtypes) == 1 else f"{len(dtypes)} dtypes"
        count = f"{len(leaves):,} lea{'f' if len(leaves) == 1 else 'ves'}"
        return path, kinds, count, format_bytes(nbytes), ""
    (leaf,) = leaves
    # A Python value has no shape of its own to speak of.
    is_array = leaf.kind in ("jax", "numpy", "numpy_scalar", "key")
    dtype = leaf.dtype_name if is_array else leaf.kind
    dtype = f"{leaf.dtype_name} keys" if leaf.kind == "key" else dtype
    shape = "×".join(map(str, leaf.shape)) if is_array else ""
    sharding = str(leaf.sharding) if leaf.sharding else ""
    sharding = sharding if with_mesh else sharding.rpartition(" on ")[0]
    return leaf.path or "(the root)", dtype, shape, format_bytes(leaf.nbytes), sharding


@command("ckptio show s3://bucket/run/step-100 'params/w[0:4,:8]'")
def show(
    uri: Uri,
    path: Annotated[
        str, typer.Argument(metavar="PATH[SLICE]", help="A leaf, and if wanted a slice of it.")
    ],
    option: Options = [],  # noqa: B006  # Typer reads it, nobody writes it
    as_json: Json = False,
) -> None:
    """Show values and statistics of a leaf or of a slice of it; only its bytes are read."""
    with open_checkpoint(uri, storage_options=parse_options(option)) as checkpoint:
        leaf, index = parse_selection(checkpoint, path)
        facts = {**_leaf_facts(leaf), "slice": _say(index)}
        if leaf.kind in ("str", "bytes") or (leaf.kind == "int" and leaf.shape):
            value = leaf.read()
            _print_value(leaf, facts, value, as_json)
            return
        try:
            shape, values, statistics = _look(leaf, index)
        except IndexError as error:
            raise typer.BadParameter(f"{path}: {error}") from error
    facts["statistics"] = statistics
    if as_json:
        if values is not None and values.size <= MANY:
            facts["values"] = (
                values.astype(object).tolist()
                if values.dtype.kind in "mM"
                else (
                    values.astype(complex if values.dtype.kind == "c" else float).tolist()
                    if values.dtype.kind == "V"
                    else values.tolist()
                )
            )
        print_json({**facts, "shape": list(shape)})
        return
    out = console()
    head = f"{leaf.path}{'' if index is None else '[' + _say(index) + ']'}"
    _, dtype, *_ = _row(leaf.path, [leaf], with_mesh=False)
    form = "×".join(map(str, shape))
    out.print(Text(f"{printable(head)}  {dtype}  {form}".rstrip(), style="bold"), soft_wrap=True)
    out.print(Text(_text_of(values, shape, out.width)))
    # Of one value alone they say nothing.
    if statistics and shape:
        for line in _lines(_worth_saying(statistics, leaf), out.width):
            out.print(Text(line, "dim"))


def _print_value(leaf: Leaf, facts: dict[str, Any], value: Any, as_json: bool) -> None:
    if as_json:
        print_json({**facts, "value": value if isinstance(value, str | int) else value.hex()})
        return
    out = console()
    out.print(Text(f"{printable(leaf.path)}  {leaf.kind}", style="bold"))
    out.print(Text(printable(value) if isinstance(value, str) else repr(value)))


def _look(leaf: Leaf, index: Index | None) -> tuple[tuple[int, ...], Any, dict[str, Any]]:
    """Return shape, values (None if they are many) and statistics of a slice."""
    import numpy as np

    statistics = Statistics()
    if index is not None or leaf.nbytes <= BLOCK:
        values = leaf[... if index is None else index]
        if is_numeric(values.dtype):
            statistics.add(values)
            return values.shape, values, statistics.as_dict()
        return values.shape, values, {}
    numeric = is_numeric(leaf.dtype)
    corner: Any = None
    for block in blocks(leaf.shape, leaf.dtype.itemsize):
        if corner is not None and not numeric:
            break
        found = leaf[block]
        corner = (
            np.array(found[tuple(slice(0, 3) for _ in found.shape)]) if corner is None else corner
        )
        if numeric:
            statistics.add(found)
    return leaf.shape, None, statistics.as_dict() if numeric else {}


def _text_of(values: Any, shape: tuple[int, ...], width: int) -> str:
    import numpy as np

    if values is None:
        return f"{np.prod(shape, dtype=object):,} elements: name a slice to see values"
    with np.printoptions(threshold=200, edgeitems=3, linewidth=min(width, 200)):
        return printable_lines(str(values))


def _say(index: Index | None) -> str:
    def say(item: Any) -> str:
        if item is Ellipsis:
            return "..."
        if not isinstance(item, slice):
            return str(item)
        text = (
            f"{'' if item.start is None else item.start}:{'' if item.stop is None else item.stop}"
        )
        return text if item.step is None else f"{text}:{item.step}"

    return "" if index is None else ",".join(map(say, index))


def _worth_saying(statistics: Mapping[str, Any], leaf: Leaf) -> list[str]:
    exact = leaf.dtype.kind in "biu" or leaf.dtype_name.lstrip("u").startswith("int")
    return [
        f"{key} {_number(value)}"
        for key, value in statistics.items()
        if not (exact and key in ("nan", "inf"))
    ]


def _lines(words: Sequence[str], width: int) -> Iterator[str]:
    """Join words, none of them divided, to lines."""
    line = ""
    for word in words:
        if line and len(line) + 2 + len(word) > width:
            yield line
            line = ""
        line = f"{line}  {word}" if line else word
    yield line


def _number(value: Any) -> str:
    # Adding 0 makes 0 of -0.
    return f"{value:,}" if isinstance(value, int) else f"{value + 0.0:.6g}"
