"""Each store's driver against the store's SDK used directly, the same objects, in one run.

::

    python -m benchmarks stores                     local disk, and each server on loopback
    python -m benchmarks stores --only s3,gcs
    python -m benchmarks stores --uri s3://bucket/scratch --storage-options '{"profile": "me"}'

In every round each client writes objects of its own, and reads objects that were written once for
all; their order changes from round to round, so that what else the machine does hits all alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.clients import clients_of
from benchmarks.device import Device
from benchmarks.fresh import MeasurementError, run_fresh
from benchmarks.machine import forget
from benchmarks.progress import Progress, guess
from benchmarks.results import LIMIT, Figure, Results, Section
from benchmarks.server import QUICK, SIZES, Server
from benchmarks.targets import Target, TargetUnavailableError
from benchmarks.transfer import Task

NAME = "stores"
MIB = 1 << 20
PACKAGES = ("ckptio", "ckptio-obstore", "s3fs", "gcsfs", "adlfs", "obstore", "fsspec", "numpy")
VERBS = ("write", "read")

Opening = Callable[[], AbstractContextManager[Target]]


@dataclass(frozen=True)
class Load:
    """How much is moved, and how often. Sizes in bytes."""

    count: int = 8
    size: int = 64 * MIB
    range_size: int = 64 * MIB
    rounds: int = 5

    @property
    def nbytes(self) -> int:
        return self.count * self.size

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.count, self.size, self.range_size

    def __str__(self) -> str:
        ranges = f"read in ranges of {self.range_size // MIB} MiB"
        return f"{self.count} × {self.size // MIB} MiB, {ranges}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--only", help=f"comma-separated: {', '.join(targets.TARGETS)}")
    parser.add_argument("--uri", help="a scratch prefix on any store, instead of those")
    parser.add_argument("--storage-options", default="{}", help="JSON, in fsspec's spelling")
    parser.add_argument("--clients", help="comma-separated; by default all that are installed")
    parser.add_argument("--rounds", type=int, default=Load.rounds)
    parser.add_argument("--count", type=int, default=Load.count, help="objects")
    parser.add_argument("--mib", type=int, default=Load.size // MIB, help="size of each")
    parser.add_argument("--range-mib", type=int, help="bytes asked for at once; all by default")
    parser.add_argument("--quick", action="store_true", help="little, and once: a smoke test")
    parser.add_argument("--resume", action="store_true", help="keep what a run before finished")


def main(options: argparse.Namespace, out: Path) -> None:
    """Measure, print tables, write ``stores.json``, ``stores.md`` and the plots."""
    size = options.mib * MIB
    ranges = options.range_mib * MIB if options.range_mib else size
    load = Load(options.count, size, ranges, options.rounds)
    if options.quick:
        load = Load(count=2, size=8 * MIB, range_size=8 * MIB, rounds=1)
    results = Results.begun(NAME, PACKAGES, out, quick=options.quick, resume=options.resume)
    print(results.machine, flush=True)
    openings = chosen(options, targets.TARGETS, results.done)
    progress = Progress(len(openings) * (load.rounds * 4 * 2 + 8) * _guess(load))
    for name, opening in openings.items():
        try:
            with opening() as target:
                _measured(results, target, load, options, progress)
        except TargetUnavailableError as error:
            print(f"\nnot measured: {error}", flush=True)
        else:
            finish(results, name, out)


def finish(results: Results, name: str, out: Path) -> None:
    """Keep what a target's measurements found, and print it."""
    results.done.append(name)
    results.write(out)
    section = results.sections[-1]
    print(f"\n{section.heading}\n{results.table(section).text()}", flush=True)


def chosen(
    options: argparse.Namespace, names: Sequence[str], done: Sequence[str]
) -> Mapping[str, Opening]:
    """Return how to open the targets that the command names; by default all of `names`."""
    if options.uri:
        given: Mapping[str, Any] = json.loads(options.storage_options)
        return {"given": lambda: targets.given(options.uri, given)}
    wanted = options.only.split(",") if options.only else names
    for name in wanted:
        if name not in names:
            raise SystemExit(f"--only: {name!r} is none of {', '.join(names)}")

    def opening(name: str) -> Opening:
        return lambda: targets.opened(name)

    return {name: opening(name) for name in wanted if name not in done}


def _guess(load: Load) -> float:
    return guess(2 * load.nbytes)  # stores are slower than disks


def _measured(
    results: Results,
    target: Target,
    load: Load,
    options: argparse.Namespace,
    progress: Progress,
) -> None:
    progress.step(f"{target.name}: the limit", 8 * _guess(load))
    limit = _limit(target, load, quick=options.quick)
    section = Section(
        target.name,
        f"{target.title}: {load}",
        dict.fromkeys(VERBS, load.nbytes),
        load.rounds,
        limits=dict.fromkeys(VERBS, "the server" if target.directory is None else "the device"),
        note=f"The limit: {limit}.",
    )
    results.begin(section)
    able = clients_of(target.uri, target.storage_options)
    if options.clients:
        able = [name for name in able if name in options.clients.split(",")]
    shared = target.below("shared")
    try:
        # What everybody reads, written by the SDK: no driver reads its own layout.
        yardstick = clients_of(target.uri, target.storage_options)[1]
        _run(Task(yardstick, yardstick, "write", shared, target.storage_options, *load.sizes, 0))
        for round_ in range(load.rounds):
            turn = round_ % max(1, len(able))
            for client in able[turn:] + able[:turn]:
                progress.step(f"{target.name}, round {round_ + 1}: {client}", 2 * _guess(load))
                try:
                    for verb, found in _both(target, load, client, shared, round_ + 1):
                        figure = Figure.of(section.key, client, verb, round_, found)
                        results.figures.append(figure)
                except MeasurementError as error:
                    print(f"\nnot measured: {client} on {target.title}: {error}", flush=True)
                    able.remove(client)
            results.figures += [
                Figure.of(section.key, LIMIT, verb, round_, cost)
                for verb, cost in _of_limit(limit, target, load)
            ]
    finally:
        target.clear("shared")


def _limit(target: Target, load: Load, *, quick: bool) -> Device | Server:
    if target.directory is not None:
        return Device(target.directory, quick=quick)
    return Server(target, load.nbytes, QUICK if quick else SIZES)


def _of_limit(
    limit: Device | Server, target: Target, load: Load
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(limit, Device):
        found = limit.measure({"save": load.nbytes, "restore": load.nbytes})
    else:
        found = limit.measure(target, load.nbytes)
    for verb, cost in found:
        yield {"save": "write", "restore": "read"}[verb], cost


def _both(
    target: Target, load: Load, client: str, shared: str, seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    own = f"own-{client.replace(' ', '')}-{seed}"
    checker = next(
        other for other in clients_of(target.uri, target.storage_options) if other != client
    )
    seeds = {"write": seed, "read": 0}
    try:
        for verb, uri in {"write": target.below(own), "read": shared}.items():
            if target.directory is not None and verb == "read":
                forget([target.directory])
            task = Task(
                client, checker, verb, uri, target.storage_options, *load.sizes, seeds[verb]
            )
            yield verb, _run(task)
    finally:
        target.clear(own)


def _run(task: Task) -> dict[str, Any]:
    return run_fresh(
        "benchmarks.transfer:measure", task.as_json(), memory=3 * task.count * task.size
    )
