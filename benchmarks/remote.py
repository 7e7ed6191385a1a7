"""Workload (a) on each object store: a whole save and restore against the SDK moving as much.

::

    python -m benchmarks remote --only s3,gcs
    python -m benchmarks remote --uri gs://bucket/scratch

The SDKs are given the same number of bytes as objects of 64 MiB, and nothing else to do: no tree,
no checksums, no commit. It is ckptio that has to come close to them. Other checkpoint libraries
take part where they can reach the store. Each round starts a server with nothing in it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.clients import SDKS, clients_of
from benchmarks.environments import TORCH, PeerUnavailableError, python_of
from benchmarks.fresh import MeasurementError, run_fresh
from benchmarks.peers import PEERS, peers_of
from benchmarks.peers.ckptio import allowed_memory
from benchmarks.progress import Progress, guess
from benchmarks.results import LIMIT, Figure, Results, Section
from benchmarks.server import QUICK, SIZES, Server
from benchmarks.stores import PACKAGES as CLIENT_PACKAGES
from benchmarks.stores import Opening, chosen, finish
from benchmarks.targets import Target, TargetUnavailableError
from benchmarks.transfer import Task
from benchmarks.trial import ENVIRONMENT, Trial
from benchmarks.workloads import Workload, workload

NAME = "remote"
PACKAGES = ("jax", "orbax-checkpoint", *CLIENT_PACKAGES)
MIB = 1 << 20
SIZE = 64 * MIB
SEARCH = 512 * MIB
"""Bytes of each way to use a server that is tried."""
SLOWER = 4
"""How many times as long as a disk a server takes, roughly."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--only", help=f"comma-separated: {', '.join(targets.SERVED)}")
    parser.add_argument("--uri", help="a scratch prefix on any store, instead of those")
    parser.add_argument("--storage-options", default="{}", help="JSON, in fsspec's spelling")
    parser.add_argument("--rounds", type=int, default=0, help="3 by default")
    parser.add_argument("--quick", action="store_true", help="a tiny workload, once")
    parser.add_argument("--resume", action="store_true", help="keep what a run before finished")


def main(options: argparse.Namespace, out: Path) -> None:
    """Measure, print tables, write ``remote.json``, ``remote.md`` and the plots."""
    results = Results.begun(NAME, PACKAGES, out, quick=options.quick, resume=options.resume)
    print(results.machine, flush=True)
    openings = chosen(options, targets.SERVED, results.done)
    rounds = options.rounds or (1 if options.quick else 3)
    load = workload("a", quick=options.quick)
    progress = Progress(len(openings) * (rounds * 5 * _guess(load) + 2 * _guess(load)))
    for name, opening in openings.items():
        try:
            _Comparison(results, opening, load, rounds, options.quick, progress).run()
        except TargetUnavailableError as error:
            print(f"\nnot measured: {error}", flush=True)
        else:
            finish(results, name, out)


def _guess(load: Workload) -> float:
    """Guess the seconds of a save and a restore."""
    return 2 * guess(SLOWER * load.nbytes)


class _Comparison:
    """One store."""

    def __init__(
        self,
        results: Results,
        opening: Opening,
        load: Workload,
        rounds: int,
        quick: bool,
        progress: Progress,
    ) -> None:
        self._results = results
        self._opening = opening
        self._load = load
        self._rounds = rounds
        self._quick = quick
        self._progress = progress

    def run(self) -> None:
        with self._opening() as target:
            self._progress.step(f"{target.name}: the server's limit", 2 * _guess(self._load))
            nbytes, sizes = (4 * MIB, QUICK) if self._quick else (SEARCH, SIZES)
            server = Server(target, nbytes, sizes)
            section = self._section(target, server)
            able = [*self._able(target)]
        self._results.begin(section)
        for round_ in range(self._rounds):
            with self._opening() as target:
                self._round(target, section, server, able, round_)

    def _section(self, target: Target, server: Server) -> Section:
        return Section(
            f"a-{target.name}",
            f"(a) {self._load.title}, on {target.title}",
            dict.fromkeys(("save", "restore"), self._load.nbytes),
            self._rounds,
            limits=dict.fromkeys(("save", "restore"), "the server"),
            allowed=allowed_memory(target.uri, target.storage_options),
            note=f"The server's limit: {server}." if server.ways else "",
        )

    def _able(self, target: Target) -> Iterator[str]:
        """Name those that take part: checkpoint libraries, and the store's own SDKs."""
        yield from (n for n in clients_of(target.uri, target.storage_options) if n in SDKS)
        for name in peers_of(target.scheme):
            try:
                python_of(PEERS[name].kind, PEERS[name].module)
            except PeerUnavailableError as error:
                print(f"\nnot measured: {name}: {error}", flush=True)
                continue
            if PEERS[name].kind == "torch":
                self._results.machine.packages["torch"] = TORCH.partition("==")[2]
            yield name

    def _round(
        self, target: Target, section: Section, server: Server, able: list[str], round_: int
    ) -> None:
        figures = self._results.figures
        turn = round_ % max(1, len(able))
        for name in able[turn:] + able[:turn]:
            what = f"{target.name}, round {round_ + 1}: {name}"
            self._progress.step(what, _guess(self._load))
            # Servers write back later: what the one before left to the disk is not this one's.
            os.sync()
            measured = self._peer if name in PEERS else self._sdk
            place = f"{name.replace(' ', '-').replace(',', '')}-{round_}"
            try:
                found = {verb: measured(target, name, verb, place) for verb in section.nbytes}
                figures += [Figure.of(section.key, name, v, round_, f) for v, f in found.items()]
            except MeasurementError as error:
                print(f"\nnot measured: {name} on {target.title}: {error}", flush=True)
                able.remove(name)
            finally:
                target.clear(place)
        for verb, cost in server.measure(target, self._load.nbytes):
            figures.append(Figure.of(section.key, LIMIT, verb, round_, cost))

    def _peer(self, target: Target, name: str, verb: str, place: str) -> Mapping[str, Any]:
        uri = target.below(f"{place}/step-1")
        trial = Trial("a", self._quick, name, verb, uri, target.storage_options)
        python = python_of(PEERS[name].kind, PEERS[name].module)
        return run_fresh(
            "benchmarks.trial:measure",
            trial.as_json(),
            python=python,
            environment=ENVIRONMENT,
            memory=self._load.memory,
        )

    def _sdk(self, target: Target, name: str, verb: str, place: str) -> Mapping[str, Any]:
        count = max(1, round(self._load.nbytes / SIZE))
        size = self._load.nbytes // count
        others = clients_of(target.uri, target.storage_options)
        checker = next(other for other in others if other != name)
        doing = "write" if verb == "save" else "read"
        task = Task(
            name,
            checker,
            doing,
            target.below(place),
            target.storage_options,
            count,
            size,
            size,
            0,
        )
        return run_fresh("benchmarks.transfer:measure", task.as_json(), memory=self._load.memory)
