"""What was promised, row by row: the ratio that a run measured, and whether that is enough.

::

    python -m benchmarks goals                      from results/*.json, into results/goals.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.blocking import BLOCKING, NUMPY
from benchmarks.clients import SDKS
from benchmarks.meter import Spread
from benchmarks.results import DEVICE_PUT, LIMIT, OURS, Results, Section, seconds, slower
from benchmarks.tables import Table

NAME = "goals"
Chooser = Callable[[str], bool]


@dataclass(frozen=True)
class Goal:
    """A promise about one verb of one section.

    Attributes
    ----------
    what, against : str
    section, verb : str
    others : callable
        Tells the peers that it is against; the fastest of them counts.
    least : float
        How many times as fast as they ckptio must be.
    most : float
        Or: how many times as long as they it may take.
    ours : str
    """

    what: str
    against: str
    section: str
    verb: str
    others: Chooser
    least: float = 0.0
    most: float = 0.0
    ours: str = OURS

    def measured(self, results: Results) -> tuple[str, Spread] | None:
        """Return who was the fastest of the others, and the ratio; None where one is missing."""
        section = results.section(self.section)
        if section is None:
            return None
        by_peer = results.of(section, self.verb)
        found = {peer: figures for peer, figures in by_peer.items() if self.others(peer)}
        if not found or self.ours not in by_peer:
            return None
        best = min(found, key=lambda peer: seconds(found[peer]).median)
        pair = found[best], by_peer[self.ours]
        return best, slower(*(reversed(pair) if self.most else pair))

    def met(self, ratio: Spread) -> bool:
        return ratio.median <= self.most if self.most else ratio.median >= self.least

    @property
    def bound(self) -> str:
        if self.most:
            return f"at most {self.most:g} × its time"
        return f"at least {self.least:g} ×"


def _is(*names: str) -> Chooser:
    return lambda peer: peer in names


def _dcp(peer: str) -> bool:
    return peer.startswith("DCP")


ORBAX, FASTEST = _is("Orbax"), _is("Orbax, no OCDBT")
ANY_ORBAX = _is("Orbax", "Orbax, no OCDBT")
SAVE_A, RESTORE_A = "(a) durable save", "(a) cold restore"
SAVE_B, RESTORE_B = "(b) save", "(b) restore to 8 devices"

GOALS = (
    Goal(SAVE_A, "the device's limit", "a", "save", _is(LIMIT), 0.85),
    Goal(SAVE_A, "DCP's best", "a", "save", _dcp, 1.3),
    Goal(SAVE_A, "Orbax, default", "a", "save", ORBAX, 8),
    Goal(SAVE_A, "Orbax, no OCDBT", "a", "save", FASTEST, 1.5),
    Goal(RESTORE_A, "a raw cold read into fresh memory", "a", "restore", _is(LIMIT), 0.85),
    Goal(RESTORE_A, "DCP's best", "a", "restore", _dcp, 1.3),
    Goal(RESTORE_A, "Orbax's fastest", "a", "restore", ANY_ORBAX, 1.5),
    Goal(SAVE_B, "Orbax, default", "b", "save", ORBAX, 25),
    Goal(SAVE_B, "DCP's best", "b", "save", _dcp, 2),
    Goal(RESTORE_B, "Orbax, default", "b", "restore", ORBAX, 15),
    Goal(RESTORE_B, "device_put alone", "b", "restore", _is(DEVICE_PUT), most=2),
    Goal("(g) save_async, JAX arrays", "a blocking save", "g", "block", _is(BLOCKING), most=0.05),
    Goal(
        "(g) save_async, NumPy leaves", "one copy", "g", "block", _is(LIMIT), most=1.1, ours=NUMPY
    ),
)
SERVERS = ("s3", "gcs", "gs", "azure", "az")
REMOTE_GOALS = tuple(
    Goal(
        f"(a) on {server}, {verb}",
        f"the plain SDK's best {moving}",
        f"a-{server}",
        verb,
        _is(*SDKS),
        0.9,
    )
    for server in SERVERS
    for verb, moving in {"save": "upload", "restore": "download"}.items()
)


def write(out: Path) -> None:
    """Write ``goals.md`` and print it, of what results there are."""
    table = Table(["promise", "against", "promised", "measured (rounds)", "met"], left=2)
    for name, goals in {"workloads": GOALS, "remote": REMOTE_GOALS}.items():
        path = out / f"{name}.json"
        if path.exists():
            results = Results.read(path)
            for row in [*rows(results, goals), *_memory(results)]:
                table.add(*row)
    if not table.rows:
        print(f"there are no results in {out} yet")
        return
    (out / f"{NAME}.md").write_text(
        f"{table.markdown()}\n\nMeasured: the ratio of the medians, and the lowest and the highest "
        "ratio of a round.\n"
    )
    print(f"\n{table.text()}", flush=True)


def rows(results: Results, goals: Sequence[Goal]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each goal of which there are figures."""
    for goal in goals:
        found = goal.measured(results)
        if found is not None:
            best, ratio = found
            alone = best == LIMIT or best == goal.against
            against = goal.against if alone else f"{goal.against} ({best})"
            met = "yes" if goal.met(ratio) else "NO"
            yield goal.what, against, goal.bound, f"{ratio:.{_digits(ratio.median)}f} ×", met


def _digits(value: float) -> int:
    return 3 if value < 0.1 else 2 if value < 10 else 1


def _memory(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a row for each verb and each promise of memory, with the section that took most."""
    most: dict[tuple[str, int], tuple[int, Section]] = {}
    for section in results.sections:
        for verb in section.nbytes if section.allowed else ():
            for figure in results.of(section, verb).get(OURS, ()):
                key = verb, section.allowed
                if key not in most or figure.extra > most[key][0]:
                    most[key] = figure.extra, section
    for (verb, allowed), (extra, section) in most.items():
        yield (
            f"extra memory, {verb}",
            "256 MiB and a part for each thread",
            f"at most {allowed / 1e6:.0f} MB",
            f"{extra / 1e6:.0f} MB in ({section.key})",
            "yes" if extra <= allowed else "NO",
        )
