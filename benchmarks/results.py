"""What a run found: figures by section, kept as JSON, shown as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.machine import Machine
from benchmarks.meter import Spread
from benchmarks.tables import Table

OURS = "ckptio"
LIMIT = "limit"
"""What no peer can beat: the device, the server, one copy of memory; sections say which."""
DEVICE_PUT = "device_put alone"
"""What a restore comes down to when the arrays are in memory already."""

SMALL = 50_000_000
"""Bytes below which a rate says nothing."""


@dataclass(frozen=True)
class Figure:
    """What one peer did in one round.

    Attributes
    ----------
    section, peer, verb : str
    round : int
    seconds, cpu_seconds : float
    peak, extra : int
        Bytes of memory at the most during it, and how much of that was not there before and is
        not the result.
    """

    section: str
    peer: str
    verb: str
    round: int
    seconds: float
    cpu_seconds: float
    peak: int = 0
    extra: int = 0

    @classmethod
    def of(
        cls, section: str, peer: str, verb: str, round_: int, found: Mapping[str, Any]
    ) -> Figure:
        """Make one of what a measurement returned."""
        costs = {name: found[name] for name in ("seconds", "cpu_seconds", "peak", "extra")}
        return cls(section, peer, verb, round_, **costs)


@dataclass(frozen=True)
class Section:
    """What one table and one plot show.

    Attributes
    ----------
    key, title : str
        For programs and for people.
    nbytes : dict
        Verbs, in order, and the bytes that each moves; 0 where a rate would say nothing.
    rounds : int
    limits : dict
        What the limit of a verb is.
    bounds : dict
        Seconds that a row is promised to take at the most, where there is such a promise.
    allowed : int
        Extra memory that was promised for ckptio at the most, in bytes; 0 where there is none.
    nearest : dict
        The peer that a verb's limit applies to, where that is not ckptio.
    note : str
        What else is worth knowing, a sentence or two.
    """

    key: str
    title: str
    nbytes: dict[str, int]
    rounds: int
    limits: dict[str, str] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    allowed: int = 0
    nearest: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def heading(self) -> str:
        return f"({self.key}) {self.title}" if len(self.key) == 1 else self.title

    def named(self, peer: str, verb: str) -> str:
        """Return a peer's name for people."""
        return f"limit: {self.limits.get(verb, '')}" if peer == LIMIT else peer


@dataclass
class Results:
    """All that one run found.

    Attributes
    ----------
    name : str
        Of the files.
    machine : Machine
    quick : bool
        Whether it is of a smoke test.
    notes : list of str
        About the whole run.
    sections, figures : list
    done : list of str
        Keys of the sections that have all their rounds.
    """

    name: str
    machine: Machine
    quick: bool = False
    notes: list[str] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read what `write` wrote."""
        found = json.loads(path.read_text())
        if "sections" not in found:
            raise SystemExit(f"{path} was written by an older harness: move it away")
        return cls(
            name=path.stem,
            machine=Machine.from_json(found["machine"]),
            quick=found["quick"],
            notes=found["notes"],
            sections=[Section(**section) for section in found["sections"]],
            figures=[Figure(**figure) for figure in found["figures"]],
            done=found["done"],
        )

    @classmethod
    def begun(
        cls, name: str, packages: Iterable[str], out: Path, *, quick: bool, resume: bool
    ) -> Results:
        """Return what an interrupted run left, to `resume` it, or else nothing yet."""
        path = out / f"{name}.json"
        if not resume or not path.exists():
            return cls(name, Machine.here(packages), quick)
        found = cls.read(path)
        if found.quick != quick:
            raise SystemExit(
                f"--resume: {path} is of {'a smoke test' if not quick else 'a real run'}"
            )
        return found

    def begin(self, section: Section) -> None:
        """Begin a section, anew if there was one by that key."""
        self.sections = [s for s in self.sections if s.key != section.key] + [section]
        self.figures = [f for f in self.figures if f.section != section.key]
        self.done = [key for key in self.done if key != section.key]

    def section(self, key: str) -> Section | None:
        return next((section for section in self.sections if section.key == key), None)

    def of(self, section: Section, verb: str) -> dict[str, list[Figure]]:
        """Return a section's figures by peer, the fastest first."""
        found: dict[str, list[Figure]] = {}
        for figure in self.figures:
            if figure.section == section.key and figure.verb == verb:
                found.setdefault(figure.peer, []).append(figure)
        if section.bounds:
            return found
        return dict(sorted(found.items(), key=lambda item: seconds(item[1]).median))

    def table(self, section: Section) -> Table:
        """Make a section's table: seconds, rates, ratios, CPU seconds, memory."""
        if section.bounds:
            return self._bounded(section)
        made = Table(["", "seconds", "rate", "× ckptio", "CPU s", "peak MB", "extra MB"])
        for verb, nbytes in section.nbytes.items():
            by_peer = self.of(section, verb)
            for peer, figures in by_peer.items():
                spread = seconds(figures)
                ratio = slower(figures, by_peer[OURS]) if OURS in by_peer else None
                made.add(
                    f"{verb}: {section.named(peer, verb)}",
                    in_seconds(spread),
                    rate(nbytes, spread.median),
                    f"{ratio.median:.2f}" if ratio else "",
                    f"{median(f.cpu_seconds for f in figures):.2f}",
                    f"{median(f.peak for f in figures) / 1e6:.0f}",
                    f"{max(0.0, median(f.extra for f in figures)) / 1e6:.0f}",
                )
        return made

    def _bounded(self, section: Section) -> Table:
        made = Table(["", "seconds", "limit", "CPU s"])
        for verb in section.nbytes:
            for peer, figures in self.of(section, verb).items():
                bound = section.bounds.get(peer)
                made.add(
                    f"{verb}: {peer}",
                    in_seconds(seconds(figures)),
                    f"{bound:g}" if bound else "",
                    f"{median(f.cpu_seconds for f in figures):.2f}",
                )
        return made

    def write(self, out: Path) -> None:
        """Write JSON, Markdown and plots."""
        out.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {
            "machine": self.machine.as_json(),
            "quick": self.quick,
            "notes": self.notes,
            "done": self.done,
            "sections": [asdict(section) for section in self.sections],
            "figures": [asdict(figure) for figure in self.figures],
        }
        (out / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")
        (out / f"{self.name}.md").write_text(self.markdown())
        if find_spec("matplotlib"):
            from benchmarks import plots

            for section in self.sections:
                plots.draw(self, section, out / self.plot(section))

    def plot(self, section: Section) -> str:
        """Name the file of a section's plot."""
        return f"{self.name}-{section.key}.png"

    def markdown(self) -> str:
        """Return all tables, with their plots."""
        packages = ", ".join(f"{name} {v}" for name, v in self.machine.packages.items())
        parts = [f"{self.machine.afterwards()}. {packages}.", *self.notes]
        for section in self.sections:
            rounds = f"{section.rounds} round{'s' * (section.rounds != 1)}"
            parts += [
                f"**{section.heading}** ({rounds})",
                *([section.note] if section.note else []),
                self.table(section).markdown(),
            ]
            if find_spec("matplotlib"):
                parts.append(f"![{section.heading}]({self.plot(section)})")
        return "\n\n".join(parts) + "\n"


def seconds(figures: Sequence[Figure]) -> Spread:
    """Return the spread of the times."""
    return Spread.of([figure.seconds for figure in figures])


def median(values: Iterable[float]) -> float:
    return Spread.of([*values]).median


def slower(theirs: Sequence[Figure], ours: Sequence[Figure]) -> Spread:
    """Return how many times as long they took as we: of the medians, and the rounds' spread."""
    times = {figure.round: figure.seconds for figure in ours}
    pairs = [f.seconds / times[f.round] for f in theirs if f.round in times]
    whole = seconds(theirs).median / seconds(ours).median
    return Spread(whole, min([*pairs, whole]), max([*pairs, whole]))


def in_seconds(spread: Spread) -> str:
    """Return seconds with three digits or so."""
    return f"{spread:.{digits(spread.median)}f}"


def digits(value: float) -> int:
    """Return how many decimals show three digits."""
    return next((n for n, least in enumerate((100, 10, 0.5, 0.1, 0.01)) if value >= least), 5)


def rate(nbytes: int, taken: float) -> str:
    """Return a rate with its unit; nothing where there are no bytes to speak of."""
    if not nbytes or not taken:
        return ""
    found = nbytes / taken
    if found >= 1e9:
        return f"{found / 1e9:.2f} GB/s"
    return f"{found / 1e6:.0f} MB/s" if found >= 1e7 else f"{found / 1e6:.2f} MB/s"
