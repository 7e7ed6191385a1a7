"""One table as text for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Row = Sequence[str]


@dataclass
class Table:
    """Rows of text under headings.

    Attributes
    ----------
    headings, rows : sequences of str
    left : int
        How many columns are aligned to the left; the others are to the right.
    """

    headings: Row
    rows: list[Row] = field(default_factory=list)
    left: int = 1

    def add(self, *cells: str) -> None:
        self.rows.append(cells)

    def text(self) -> str:
        """Return the table for a terminal."""
        lines = [self.headings, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.headings))]
        rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
        drawn = ["  ".join(self._aligned(line, widths)).rstrip() for line in lines]
        return "\n".join([drawn[0], rule, *drawn[1:]])

    def markdown(self) -> str:
        """Return the table in Markdown."""
        rule = ["---" if i < self.left else "---:" for i in range(len(self.headings))]
        return "\n".join(f"| {' | '.join(line)} |" for line in [self.headings, rule, *self.rows])

    def _aligned(self, line: Row, widths: Sequence[int]) -> list[str]:
        return [
            cell.ljust(width) if i < self.left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
