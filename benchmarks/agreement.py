"""Whether two runs agree: each median within what the other run's rounds spread over.

::

    python -m benchmarks agree first/workloads.json second/workloads.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.meter import Spread
from benchmarks.results import OURS, Figure, Results, Section, in_seconds, seconds, slower
from benchmarks.tables import Table


@dataclass(frozen=True)
class Pair:
    """The same figure of two runs."""

    section: str
    name: str
    first: Spread
    second: Spread

    @property
    def agrees(self) -> bool:
        """Whether either median lies within the other run's spread."""
        return _within(self.second.median, self.first) or _within(self.first.median, self.second)

    @property
    def overlaps(self) -> bool:
        return self.first.low <= self.second.high and self.second.low <= self.first.high


def _within(value: float, spread: Spread) -> bool:
    return spread.low <= value <= spread.high


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("first", type=Path, help="a run's JSON")
    parser.add_argument("second", type=Path, help="another's")


def main(options: argparse.Namespace) -> None:
    """Print a table of all figures, and what it comes to."""
    first, second = Results.read(options.first), Results.read(options.second)
    for title, pairs in {
        "seconds": [*times(first, second)],
        "ratios to ckptio": [*ratios(first, second)],
    }.items():
        table = Table([title, "first run", "second run", "second / first", "agree"])
        for pair in pairs:
            table.add(
                f"({pair.section}) {pair.name}",
                in_seconds(pair.first),
                in_seconds(pair.second),
                f"{pair.second.median / pair.first.median:.2f}",
                "yes" if pair.agrees else "their spreads do" if pair.overlaps else "NO",
            )
        print(f"\n{table.text()}\n\n{title}: {summary(pairs)}", flush=True)


def summary(pairs: Sequence[Pair]) -> str:
    """Say in a line how many agree, and how far apart they are."""
    if not pairs:
        return "the runs have nothing in common"
    agree, overlap = sum(p.agrees for p in pairs), sum(p.overlaps for p in pairs)
    apart = sorted(max(p.first.median, p.second.median) / min(p.first.median, p.second.median)
                   for p in pairs)  # fmt: skip
    return (
        f"{agree} of {len(pairs)} medians lie within the other run's spread, {overlap} of "
        f"{len(pairs)} spreads overlap; medians differ by {apart[len(apart) // 2] - 1:.0%} in the "
        f"middle, {apart[-1] - 1:.0%} at the most"
    )


def times(first: Results, second: Results) -> Iterator[Pair]:
    """Yield the times that both runs measured."""
    for section, name, one, other in _common(first, second):
        yield Pair(section.key, name, seconds(one), seconds(other))


def ratios(first: Results, second: Results) -> Iterator[Pair]:
    """Yield how many times as long as ckptio each peer took, in both runs."""
    for section, name, one, other in _common(first, second):
        verb, _, peer = name.partition(": ")
        ours = [results.of(section, verb).get(OURS) for results in (first, second)]
        if peer != OURS and ours[0] and ours[1]:
            yield Pair(section.key, name, slower(one, ours[0]), slower(other, ours[1]))


def _common(
    first: Results, second: Results
) -> Iterator[tuple[Section, str, list[Figure], list[Figure]]]:
    for section in first.sections:
        if second.section(section.key) is None:
            continue
        for verb in section.nbytes:
            others = second.of(section, verb)
            for peer, figures in first.of(section, verb).items():
                if peer in others:
                    yield section, f"{verb}: {peer}", figures, others[peer]
