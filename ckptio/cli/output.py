"""Tables and errors for people, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

__all__ = ["console", "print_error", "print_json", "print_table", "printable", "printable_lines"]

UNBOUNDED = 10_000
"""Columns of what is not a terminal: nothing is cut or wrapped there."""
GAP = 2
"""Blanks between columns."""

Cell = str | Text


def console(*, stderr: bool = False) -> Console:
    """Return the console; what is piped on is never cut or wrapped, and has no colours."""
    if (sys.stderr if stderr else sys.stdout).isatty():
        return Console(highlight=False, stderr=stderr)
    return Console(highlight=False, stderr=stderr, width=UNBOUNDED, color_system=None)


def print_error(message: str) -> None:
    """Say on the standard error stream what went wrong."""
    out = console(stderr=True)
    text = Text.assemble(("ckptio:", "bold red"), f" {printable_lines(message)}")
    out.print(text, soft_wrap=not out.is_terminal)


def print_json(document: Any) -> None:
    """Print one JSON document; numbers that JSON lacks become strings."""
    sys.stdout.write(json.dumps(_plain(document), indent=2, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int):
        # A lone surrogate could not be written out.
        return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
    return str(value)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    right: Collection[str] = (),
    last: Literal["whole", "wrap", "cut"] = "whole",
) -> None:
    """Print a table that is no wider than the terminal, and whose names are never cut.

    A name in the first column that leaves no room for the rest has a line of its own, with the rest
    below it. Columns without a single entry are left out.

    Parameters
    ----------
    right : collection of str
        Names of the columns that are aligned to the right.
    last : {"whole", "wrap", "cut"}
        What becomes of the last column where there is no room for it.
    """
    out = console()
    cells = [[_text(cell) for cell in row] for row in rows]
    kept = [i for i in range(len(columns)) if not i or any(row[i].plain for row in cells)]
    header = [Text(columns[i], "bold") for i in kept]
    body = [[row[i] for i in kept] for row in cells]
    for row in body:
        row[0].stylize("cyan")
    widths = [max(cell.cell_len for cell in column) for column in zip(header, *body, strict=True)]
    if len(widths) > 1:
        missing = sum(widths) + GAP * (len(widths) - 1) - out.width
        if missing > 0 and last != "whole" and kept[-1] == len(columns) - 1:
            given = max(0, min(missing, widths[-1] - max(out.width // 3, header[-1].cell_len)))
            widths[-1] -= given
            missing -= given
        widths[0] -= max(missing, 0)
    at_right = [columns[i] in right for i in kept]
    for row in [header, *body]:
        if widths[0] < header[0].cell_len:
            lines = _stacked(row, out.width)
        else:
            if last == "cut":
                row[-1].truncate(widths[-1], overflow="ellipsis")
            lines = _aligned(out, row, widths, at_right)
        for line in lines:
            line.rstrip()
            out.print(line, soft_wrap=True)


def _aligned(
    out: Console, row: Sequence[Text], widths: Sequence[int], at_right: Sequence[bool]
) -> Iterator[Text]:
    """Yield the lines of a row whose columns have these widths."""
    name, *rest = row
    if name.cell_len > widths[0]:
        yield from _folded(name, out.width)
        if not any(cell.plain for cell in rest):
            return
        name = Text()
    tall = [cell.wrap(out, max(width, 1)) for cell, width in zip(rest, widths[1:], strict=True)]
    for i in range(max(map(len, tall), default=1)):
        line = Text()
        cells = [name if not i else Text(), *(t[i] if i < len(t) else Text() for t in tall)]
        for cell, width, to_right in zip(cells, widths, at_right, strict=True):
            blanks = " " * (width - cell.cell_len)
            line.append(blanks * to_right)
            line.append_text(cell)
            line.append(blanks * (not to_right) + " " * GAP)
        yield line


def _stacked(row: Sequence[Text], width: int) -> Iterator[Text]:
    """Yield the lines of a row on a terminal too narrow for columns."""
    yield from _folded(row[0], width)
    rest = Text("  ").join(cell for cell in row[1:] if cell.plain)
    for line in _folded(rest, width - GAP):
        yield Text(" " * GAP).append_text(line)


def _folded(text: Text, width: int) -> Iterator[Text]:
    """Cut a text into lines, after a slash or a blank where there is one not too far back."""
    while text.cell_len > width:
        end, used = 0, 0
        for c in text.plain:
            if (used := used + cell_len(c)) > width:
                break
            end += 1
        near = max(text.plain.rfind("/", 0, end), text.plain.rfind(" ", 0, end)) + 1
        end = max(1, near if near > end // 2 else end)
        line, text = text.divide([end])
        yield line
    if text.plain:
        yield text


def _text(cell: Cell) -> Text:
    # Text, so that brackets in a path are not taken for markup.
    return cell.copy() if isinstance(cell, Text) else Text(printable(cell))


def printable(text: str) -> str:
    r"""Return text without control characters: a path in a checkpoint must not steer a terminal.

    Examples
    --------
    >>> print(printable("a\tb"))
    a\tb
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def printable_lines(text: str) -> str:
    """Return text without control characters, but with its lines."""
    return "\n".join(printable(line) for line in text.split("\n"))
