"""ckptio against its peers and the device's limit, workload by workload, on the local disk.

::

    python -m benchmarks workloads                  all of them
    python -m benchmarks workloads --only a,b --rounds 5
    python -m benchmarks workloads --resume         those that an interrupted run did not finish

In every round each peer saves (durably) and then restores (cold), each in a fresh process; then the
limit is measured; their order changes from round to round. A save counts once its restore came back
bit for bit. Where only the restore is a figure, a peer saves once and restores that in all rounds.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import blocking, simulation, targets
from benchmarks.device import Device
from benchmarks.environments import TORCH, PeerUnavailableError, python_of
from benchmarks.fresh import MeasurementError, run_fresh
from benchmarks.machine import forget
from benchmarks.peers import PEERS, READS_ROWS, peers_of
from benchmarks.peers.ckptio import allowed_memory
from benchmarks.progress import Progress, guess
from benchmarks.results import DEVICE_PUT, LIMIT, Figure, Results, Section
from benchmarks.trial import ENVIRONMENT, Trial
from benchmarks.workloads import Workload, workload

NAME = "workloads"
MIB = 1 << 20
PACKAGES = ("ckptio", "jax", "numpy", "orbax-checkpoint", "tensorstore", "safetensors")
TREES = ("a", "b", "c", "d", "e", "f")
BLOCKING, SIMULATION = "g", "h"
LETTERS = (*TREES, BLOCKING, SIMULATION)


@dataclass(frozen=True)
class Run:
    """What to do.

    Attributes
    ----------
    letters, peers : sequence of str
        Workloads, and who takes part.
    rounds : int
        0 for each workload's own number.
    quick : bool
        Tiny workloads.
    """

    letters: Sequence[str]
    peers: Sequence[str]
    rounds: int
    quick: bool

    def rounds_of(self, load: Workload) -> int:
        return self.rounds or (1 if self.quick else load.rounds)

    def able(self, load: Workload) -> list[str]:
        """Name the peers that have this workload."""
        return [name for name in self.peers if _concerned(name, load)]

    def expected(self, letter: str) -> float:
        """Guess the seconds of a workload."""
        if letter == SIMULATION:
            return simulation.EXPECTED * (0.02 if self.quick else 1)
        load = workload(letter, quick=self.quick)
        if letter == BLOCKING:
            return self.rounds_of(load) * 2 * len(blocking.SAVERS) * _guess(load)
        rounds, able = self.rounds_of(load), len(self.able(load))
        saves = able * (rounds if load.saving else 1)
        return (saves + rounds * (able + 2)) * _guess(load)


def _guess(load: Workload) -> float:
    return guess(load.nbytes, len(load.leaves))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--only", help=f"comma-separated: {','.join(LETTERS)}")
    parser.add_argument("--peers", help=f"separated by semicolons: {'; '.join(peers_of('file'))}")
    parser.add_argument("--rounds", type=int, default=0, help="5 for (a) and (b), else 3")
    parser.add_argument("--directory", help="on the disk to measure; a temporary one by default")
    parser.add_argument("--quick", action="store_true", help="tiny workloads, once: a smoke test")
    parser.add_argument("--resume", action="store_true", help="keep what a run before finished")


def main(options: argparse.Namespace, out: Path) -> None:
    """Measure, print tables, write ``workloads.json``, ``workloads.md`` and the plots."""
    results = Results.begun(NAME, PACKAGES, out, quick=options.quick, resume=options.resume)
    letters = options.only.split(",") if options.only else LETTERS
    for letter in letters:
        if letter not in LETTERS:
            raise SystemExit(f"--only: {letter!r} is none of {', '.join(LETTERS)}")
    run = Run(
        [letter for letter in letters if letter not in results.done],
        _peers(options.peers),
        options.rounds,
        options.quick,
    )
    if any(PEERS[name].kind == "torch" for name in run.peers):
        results.machine.packages["torch"] = TORCH.partition("==")[2]
    if not run.letters:
        print("nothing is left to be measured")
        return
    print(results.machine, flush=True)
    progress = Progress(sum(map(run.expected, run.letters)) + 60)
    with targets.local(options.directory) as target:
        place = Path(target.uri)
        progress.step("memory, and how the device is used best", 60)
        nbytes = (16 if run.quick else 512) * MIB
        memory = run_fresh("benchmarks.limits:measure", {"what": "memory", "nbytes": nbytes})
        device = Device(place, quick=run.quick)
        results.notes = [
            f"Memory copy {memory['memory copy'] / 1e9:.1f} GB/s, first touch "
            f"{memory['first touch'] / 1e9:.1f} GB/s ({memory['page faults'] / 1e6:.2f} million "
            f"page faults a second). The device: {device}."
        ]
        for letter in run.letters:
            if letter == SIMULATION:
                progress.step("(h) planning 405 billion parameters", run.expected(letter))
                simulation.add_to(results, quick=run.quick)
            elif letter == BLOCKING:
                _blocking(run, results, place, device, progress)
            else:
                _tree(run, results, letter, place, device, progress)
            results.done.append(letter)
            results.write(out)
            for section in results.sections:
                if section.key.startswith(letter):
                    print(f"\n{section.heading}\n{results.table(section).text()}", flush=True)


def _peers(wanted: str | None) -> list[str]:
    names = peers_of("file")
    if not wanted:
        return names
    return [name for name in names if any(name.startswith(w.strip()) for w in wanted.split(";"))]


def _concerned(name: str, load: Workload) -> bool:
    peer = PEERS[name]
    return not (
        (load.other_mesh and not peer.resharding)
        or (load.rows and name not in READS_ROWS)
        # One of those that differ in nothing else is enough.
        or (not load.threads_matter and peer.settings.get("threads", 1) > 1)
    )


def _tree(
    run: Run, results: Results, letter: str, place: Path, device: Device, progress: Progress
) -> None:
    load = workload(letter, quick=run.quick)
    verbs = {"save": load.nbytes, "restore": load.wanted_nbytes}
    section = Section(
        letter,
        load.title,
        {verb: size for verb, size in verbs.items() if load.saving or verb == "restore"},
        run.rounds_of(load),
        limits=dict.fromkeys(verbs, "the device"),
        allowed=allowed_memory(str(place)),
    )
    results.begin(section)
    able = [*_installed(run.able(load))]
    for round_ in range(section.rounds):
        turn = round_ % max(1, len(able))
        for name in able[turn:] + able[:turn]:
            path = place / f"{letter}-{name.replace(' ', '')}"
            saves = load.saving or not path.exists()
            progress.step(f"({letter}) round {round_ + 1}: {name}", (1 + saves) * _guess(load))
            kept = False
            try:
                results.figures += _measured(run, load, name, path, round_)
                kept = not load.saving and round_ + 1 < section.rounds
            except MeasurementError as error:
                print(f"\nnot measured: {name}, ({letter}): {error}", flush=True)
                able.remove(name)
            finally:
                if not kept:
                    shutil.rmtree(path, ignore_errors=True)
        progress.step(f"({letter}) round {round_ + 1}: the limits", 2 * _guess(load))
        for verb, found in device.measure(section.nbytes):
            results.figures.append(Figure.of(letter, LIMIT, verb, round_, found))
        if not load.rows:
            request = {"letter": letter, "quick": run.quick}
            found = run_fresh(
                "benchmarks.trial:device_put",
                request,
                environment=ENVIRONMENT,
                memory=load.memory,
            )
            results.figures.append(Figure.of(letter, DEVICE_PUT, "restore", round_, found))


def _installed(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        try:
            python_of(PEERS[name].kind, PEERS[name].module)
        except PeerUnavailableError as error:
            print(f"\nnot measured: {name}: {error}", flush=True)
        else:
            yield name


def _measured(run: Run, load: Workload, name: str, path: Path, round_: int) -> list[Figure]:
    """Measure a save, where there is none yet, and a restore; both count, or neither."""
    peer = PEERS[name]
    figures = []
    for verb in ("restore",) if path.exists() else ("save", "restore"):
        forget([path] if path.exists() else [])
        found = run_fresh(
            "benchmarks.trial:measure",
            Trial(load.letter, run.quick, name, verb, str(path)).as_json(),
            python=python_of(peer.kind, peer.module),
            environment=ENVIRONMENT,
            memory=load.memory,
        )
        if load.saving or verb == "restore":
            figures.append(Figure.of(load.letter, name, verb, round_, found))
    return figures


def _blocking(run: Run, results: Results, place: Path, device: Device, progress: Progress) -> None:
    load = workload(BLOCKING, quick=run.quick)
    section = Section(
        BLOCKING,
        load.title,
        {"block": 0, "save": load.nbytes},
        run.rounds_of(load),
        limits={"block": "one copy in memory", "save": "the device"},
        nearest={"block": blocking.NUMPY},
        note="`block` is the time until the caller may go on, `save` until everything is durable. "
        f"The leaves are JAX arrays on CPU devices, but for `{blocking.NUMPY}`; "
        f"`{blocking.BLOCKING}` is the save that blocks to its end.",
    )
    results.begin(section)
    names = [*(n for n, s in blocking.SAVERS.items() if s.restorer in run.peers), blocking.COPY]
    for round_ in range(section.rounds):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            path = place / f"{BLOCKING}-{round_}"
            progress.step(f"({BLOCKING}) round {round_ + 1}: {name}", 2 * _guess(load))
            request = {"name": name, "quick": run.quick, "path": str(path)}
            try:
                found: Mapping[str, Mapping[str, float]] = run_fresh(
                    "benchmarks.blocking:measure",
                    request,
                    environment=ENVIRONMENT,
                    memory=load.memory,
                )
                results.figures += [
                    Figure.of(BLOCKING, name, verb, round_, cost) for verb, cost in found.items()
                ]
            except MeasurementError as error:
                print(f"\nnot measured: {name}, ({BLOCKING}): {error}", flush=True)
                names.remove(name)
            finally:
                shutil.rmtree(path, ignore_errors=True)
        for verb, cost in device.measure({"save": load.nbytes}):
            results.figures.append(Figure.of(BLOCKING, LIMIT, verb, round_, cost))
