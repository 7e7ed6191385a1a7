"""ckptio against its peers and the device's limit, workload by workload, on the local disk.

::

    python -m benchmarks workloads                  all of them
    python -m benchmarks workloads --only a,b --rounds 5

In every round each peer saves (durably) and then restores (cold), each in a fresh process; then the
limit is measured; their order changes from round to round. A save counts once its restore came back
bit for bit.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import limits, targets
from benchmarks.environments import PeerUnavailableError, python_of
from benchmarks.fresh import MeasurementError, run_fresh
from benchmarks.limits import Way
from benchmarks.machine import Machine, forget
from benchmarks.peers import PEERS, READS_ROWS
from benchmarks.results import DEVICE_PUT, LIMIT, Figure, Results
from benchmarks.trial import ENVIRONMENT, Trial
from benchmarks.workloads import LETTERS, Workload, workload

MIB = 1 << 20
PACKAGES = ("ckptio", "jax", "numpy", "orbax-checkpoint", "tensorstore", "safetensors")


@dataclass(frozen=True)
class Run:
    """What to do.

    Attributes
    ----------
    letters, peers : sequence of str
        Workloads, and who takes part.
    rounds : int
    quick : bool
        Tiny workloads.
    """

    letters: Sequence[str] = LETTERS
    peers: Sequence[str] = field(default_factory=lambda: [*PEERS])
    rounds: int = 5
    quick: bool = False


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--only", help=f"comma-separated: {', '.join(LETTERS)}")
    parser.add_argument("--peers", help=f"comma-separated: {'; '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=Run.rounds)
    parser.add_argument("--directory", help="on the disk to measure; a temporary one by default")
    parser.add_argument("--quick", action="store_true", help="tiny workloads, once: a smoke test")


def main(options: argparse.Namespace, out: Path) -> None:
    """Measure, print tables, write ``workloads.json``, ``workloads.md`` and the plots."""
    run = Run(
        letters=options.only.split(",") if options.only else LETTERS,
        peers=_peers(options.peers),
        rounds=1 if options.quick else options.rounds,
        quick=options.quick,
    )
    results = Results(Machine.here(PACKAGES))
    print(results.machine, flush=True)
    with targets.local(options.directory) as target:
        place = Path(target.uri)
        results.memory = run_fresh("benchmarks.limits:measure", {"what": "memory"})
        ways = _best_ways(place, quick=run.quick)
        for letter in run.letters:
            load = workload(letter, quick=run.quick)
            results.add(load, ways)
            try:
                for figure in measure(run, load, place, ways):
                    results.figures.append(figure)
            finally:  # what was measured stays, whatever comes
                print(f"\n{results.title(load)}\n{results.table(load).text()}", flush=True)
                results.write(out)


def _peers(wanted: str | None) -> list[str]:
    if not wanted:
        return [*PEERS]
    return [name for name in PEERS if any(name.startswith(w.strip()) for w in wanted.split(";"))]


def _best_ways(place: Path, *, quick: bool) -> dict[str, Way]:
    """Find out how the device is used best, with a gigabyte."""
    file = place / "limit"
    nbytes = 64 * MIB if quick else 1024 * MIB

    def measured(verb: str, way: Way) -> float:
        return float(_device(verb, file, nbytes, way)["seconds"])

    found = {}
    for verb, way, seconds in limits.best_ways(measured):
        print(f"device, {verb}: {nbytes / seconds / 1e9:.2f} GB/s with {way}", flush=True)
        found[verb] = way
    file.unlink()
    return found


def _device(verb: str, file: Path, nbytes: int, way: Way) -> dict[str, Any]:
    if verb == "restore":
        forget([file])
    request = {"what": verb, "path": str(file), "nbytes": nbytes, "way": limits.as_json(way)}
    return run_fresh("benchmarks.limits:measure", request)


def measure(run: Run, load: Workload, place: Path, ways: dict[str, Way]) -> Iterator[Figure]:
    """Yield the figures of one workload."""
    able = [*_able(run.peers, load)]
    for round_ in range(run.rounds):
        turn = round_ % max(1, len(able))
        for name in able[turn:] + able[:turn]:
            path = place / f"{load.letter}-{round_}"
            try:
                yield from _both(run, load, name, path)
            except MeasurementError as error:
                print(f"\nnot measured: {name}, ({load.letter}): {error}", flush=True)
                able.remove(name)
            finally:
                shutil.rmtree(path, ignore_errors=True)
        yield from _limit(load, place / "limit", ways)
        if not load.rows:
            found = run_fresh(
                "benchmarks.trial:device_put",
                {"letter": load.letter, "quick": run.quick},
                environment=ENVIRONMENT,
            )
            yield Figure(
                load.letter, DEVICE_PUT, "restore", found["seconds"], found["cpu_seconds"], 0
            )


def _able(names: Sequence[str], load: Workload) -> Iterator[str]:
    for name in names:
        peer = PEERS[name]
        if (load.other_mesh and not peer.resharding) or (load.rows and name not in READS_ROWS):
            continue
        try:
            python_of(peer.kind, peer.module)
        except PeerUnavailableError as error:
            print(f"\nnot measured: {name}: {error}", flush=True)
        else:
            yield name


def _both(run: Run, load: Workload, name: str, path: Path) -> Iterator[Figure]:
    peer = PEERS[name]
    figures = []
    for verb in ("save", "restore"):
        forget([path] if path.exists() else [])
        found = run_fresh(
            "benchmarks.trial:measure",
            Trial(load.letter, run.quick, name, verb, str(path)).as_json(),
            python=python_of(peer.kind, peer.module),
            environment=ENVIRONMENT,
        )
        figures.append(
            Figure(load.letter, name, verb, found["seconds"], found["cpu_seconds"], found["extra"])
        )
    yield from (f for f in figures if load.saving or f.verb == "restore")


def _limit(load: Workload, file: Path, ways: dict[str, Way]) -> Iterator[Figure]:
    """Measure the device with as many bytes as the workload has, in whole blocks."""
    sizes = {"save": load.nbytes, "restore": load.wanted_nbytes}
    try:
        for verb in ("save", "restore"):
            way = ways[verb]
            # What is read has to be there first.
            blocks = -(-sizes[verb] // way.block)
            if verb == "restore":
                with suppress(FileNotFoundError):
                    file.unlink()
                _device("save", file, blocks * way.block, Way(way.direct, 8, way.block))
            found = _device(verb, file, blocks * way.block, way)
            # A tiny workload does not fill a block: its limit is the time of one.
            share = 1.0 if blocks == 1 else sizes[verb] / (blocks * way.block)
            if load.saving or verb == "restore":
                yield Figure(
                    load.letter, LIMIT, verb, found["seconds"] * share, found["cpu_seconds"], 0
                )
    finally:
        file.unlink(missing_ok=True)
