"""Tables for people and JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["console", "print_json", "table"]

NARROW = 10_000


def console() -> Console:
    """Return the console; what is piped on is never cut or wrapped, and has no colours."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=NARROW, color_system=None)


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


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "") -> Table:
    """Make a table whose first column takes what the terminal leaves, folded, never cut.

    Parameters
    ----------
    right : str
        Names of the columns that are aligned to the right, separated by blanks.
    """
    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for i, name in enumerate(columns):
        found.add_column(
            name,
            justify="right" if name in right.split() else "left",
            overflow="fold",
            no_wrap=False,
            style="cyan" if i == 0 else None,
            ratio=None,
        )
    for row in rows:
        # Text, so that brackets in a path are not taken for markup.
        found.add_row(*(Text(printable(cell)) for cell in row))
    return found


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
