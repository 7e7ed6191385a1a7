"""Whether two runs agree: whether what the rounds of one spread over meets the other's.

If they differed by chance alone, how often all rounds of one would lie on one side of all rounds of
the other is known, whatever the distribution: twice in the ways to deal the rounds out to two runs.
Of two runs of three rounds it is expected of a tenth of the rows, of five rounds of 0.8 %. That a
median lies within the other run's spread is more, and of three rounds fails in two fifths.

::

    python -m benchmarks agree first/workloads.json second/workloads.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
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
    rounds: tuple[int, int]

    @property
    def agrees(self) -> bool:
        """Whether the spreads meet."""
        return self.first.low <= self.second.high and self.second.low <= self.first.high

    @property
    def chance(self) -> float:
        """How probable it is that they do not, though nothing but chance makes them differ."""
        return 2 / comb(sum(self.rounds), self.rounds[0])


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
                "yes" if pair.agrees else "NO",
            )
        print(f"\n{table.text()}\n\n{title}: {summary(pairs)}", flush=True)


def summary(pairs: Sequence[Pair]) -> str:
    """Say in a line how many agree, and how far apart they are."""
    if not pairs:
        return "the runs have nothing in common"
    apart = sorted(max(p.first.median, p.second.median) / min(p.first.median, p.second.median)
                   for p in pairs)  # fmt: skip
    return (
        f"{sum(not p.agrees for p in pairs)} of {len(pairs)} do not agree, where chance alone "
        f"makes {sum(p.chance for p in pairs):.1f}; medians differ by "
        f"{apart[len(apart) // 2] - 1:.0%} in the middle, {apart[-1] - 1:.0%} at the most"
    )


def times(first: Results, second: Results) -> Iterator[Pair]:
    """Yield the times that both runs measured."""
    for section, name, one, other in _common(first, second):
        yield Pair(section.key, name, seconds(one), seconds(other), (len(one), len(other)))


def ratios(first: Results, second: Results) -> Iterator[Pair]:
    """Yield how many times as long as ckptio each peer took, in both runs."""
    for section, name, one, other in _common(first, second):
        verb, _, peer = name.partition(": ")
        ours = [results.of(section, verb).get(OURS) for results in (first, second)]
        if peer != OURS and ours[0] and ours[1]:
            rounds = len(one), len(other)
            yield Pair(section.key, name, slower(one, ours[0]), slower(other, ours[1]), rounds)


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
