"""One table as text for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Row = Sequence[str]


@dataclass
class Table:
    """Rows of text under headings; every column but the first is aligned to the right."""

    headings: Row
    rows: list[Row] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        self.rows.append(cells)

    def text(self) -> str:
        """Return the table for a terminal."""
        lines = [self.headings, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.headings))]
        rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
        drawn = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
        return "\n".join([drawn[0], rule, *drawn[1:]])

    def markdown(self) -> str:
        """Return the table in Markdown."""
        rule = ["---", *["---:"] * (len(self.headings) - 1)]
        return "\n".join(f"| {' | '.join(line)} |" for line in [self.headings, rule, *self.rows])


def _aligned(line: Row, widths: Sequence[int]) -> list[str]:
    return [
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
