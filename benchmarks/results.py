"""Figures of the workloads, as tables, JSON and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.limits import Way
from benchmarks.machine import Machine
from benchmarks.meter import Spread
from benchmarks.tables import Table
from benchmarks.workloads import Workload

OURS = "ckptio"
LIMIT, DEVICE_PUT = "device", "device_put alone"
"""What no peer can beat: the disk, and, for a restore, JAX with the arrays in memory already."""
VERBS = ("save", "restore")


@dataclass(frozen=True)
class Figure:
    """What one peer did in one round.

    Attributes
    ----------
    letter, peer, verb : str
    seconds, cpu_seconds : float
    extra : int
        Bytes of memory at the most during it, beyond what was there before and the result.
    """

    letter: str
    peer: str
    verb: str
    seconds: float
    cpu_seconds: float
    extra: int


@dataclass
class Results:
    """All that one run found."""

    machine: Machine
    name: str = "workloads"
    memory: dict[str, float] = field(default_factory=dict)
    workloads: list[Workload] = field(default_factory=list)
    ways: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)

    def add(self, load: Workload, ways: Mapping[str, Way]) -> None:
        """Begin a workload."""
        self.workloads.append(load)
        self.ways = {verb: str(way) for verb, way in ways.items()}

    def title(self, load: Workload) -> str:
        return f"({load.letter}) {load.title}"

    def of(self, load: Workload, verb: str) -> dict[str, list[Figure]]:
        """Return a workload's figures by peer."""
        found: dict[str, list[Figure]] = {}
        for figure in self.figures:
            if figure.letter == load.letter and figure.verb == verb:
                found.setdefault(figure.peer, []).append(figure)
        return found

    def table(self, load: Workload) -> Table:
        """Make a workload's table: seconds, ratios, CPU seconds, memory."""
        made = Table(["", "seconds", "GB/s", "× ckptio", "CPU s", "extra MB"])
        for verb in VERBS if load.saving else VERBS[1:]:
            by_peer = self.of(load, verb)
            ours = _seconds(by_peer[OURS]).median if OURS in by_peer else None
            nbytes = load.nbytes if verb == "save" else load.wanted_nbytes
            for peer, figures in sorted(by_peer.items(), key=lambda item: _seconds(item[1]).median):
                spread = _seconds(figures)
                extra = Spread.of([f.extra / 1e6 for f in figures]).median
                made.add(
                    f"{verb}: {peer}",
                    f"{spread:.2f}" if spread.median >= 0.1 else f"{spread:.4f}",
                    f"{nbytes / spread.median / 1e9:.2f}",
                    f"{spread.median / ours:.2f}" if ours else "",
                    f"{Spread.of([f.cpu_seconds for f in figures]).median:.2f}",
                    f"{max(0.0, extra):.0f}" if peer not in (LIMIT, DEVICE_PUT) else "",
                )
        return made

    def write(self, out: Path) -> None:
        """Write JSON, Markdown and plots."""
        out.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {
            "machine": self.machine.as_json(),
            "memory": self.memory,
            "device": self.ways,
            "workloads": {
                w.letter: {
                    "title": w.title,
                    "leaves": len(w.leaves),
                    "nbytes": w.nbytes,
                    "wanted_nbytes": w.wanted_nbytes,
                }
                for w in self.workloads
            },
            "figures": [asdict(figure) for figure in self.figures],
        }
        (out / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")
        (out / f"{self.name}.md").write_text(self.markdown())
        if find_spec("matplotlib"):
            from benchmarks import plots

            for load in self.workloads:
                plots.draw(self, load, out / f"workload-{load.letter}.png")

    def markdown(self) -> str:
        """Return all tables."""
        packages = ", ".join(f"{name} {v}" for name, v in self.machine.packages.items())
        parts = [f"{self.machine.afterwards()}. {packages}."]
        if self.memory:
            copy, touch = self.memory["memory copy"], self.memory["first touch"]
            device = "; ".join(f"{verb}: {way}" for verb, way in self.ways.items())
            parts.append(
                f"Memory copy {copy / 1e9:.1f} GB/s, first touch {touch / 1e9:.1f} GB/s "
                f"({self.memory['page faults'] / 1e6:.2f} million page faults a second). The "
                f"device's limit is measured as its best use here ({device})."
            )
        parts += [f"**{self.title(w)}**\n\n{self.table(w).markdown()}" for w in self.workloads]
        return "\n\n".join(parts) + "\n"


def _seconds(figures: Sequence[Figure]) -> Spread:
    return Spread.of([figure.seconds for figure in figures])
