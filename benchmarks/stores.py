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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.clients import clients_of
from benchmarks.fresh import MeasurementError, run_fresh
from benchmarks.machine import Machine, forget
from benchmarks.meter import Spread
from benchmarks.tables import Table
from benchmarks.targets import Target, TargetUnavailableError
from benchmarks.transfer import Task

MIB = 1 << 20
PACKAGES = ("ckptio", "ckptio-obstore", "s3fs", "gcsfs", "adlfs", "obstore", "fsspec", "numpy")
VERBS = ("write", "read")


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

    def __str__(self) -> str:
        return (
            f"{self.count} × {self.size // MIB} MiB, read in ranges of "
            f"{self.range_size // MIB} MiB, {self.rounds} rounds"
        )


@dataclass(frozen=True)
class Figure:
    """What one client did with one verb in one round."""

    target: str
    client: str
    verb: str
    seconds: float
    cpu_seconds: float


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


def main(options: argparse.Namespace, out: Path) -> None:
    """Measure, print tables, and write ``stores.json`` and ``stores.md`` into `out`."""
    size = options.mib * MIB
    ranges = options.range_mib * MIB if options.range_mib else size
    load = Load(options.count, size, ranges, options.rounds)
    if options.quick:
        load = Load(count=2, size=8 * MIB, range_size=8 * MIB, rounds=1)
    machine = Machine.here(PACKAGES)
    print(f"{machine}\n{load}; median (lowest–highest)", flush=True)
    figures: list[Figure] = []
    titles: dict[str, str] = {}
    for opening in chosen(options, targets.TARGETS):
        try:
            with opening as target:
                titles[target.name] = target.title
                found = [*measure(target, load, _wanted(options, target))]
                print(f"\n{target.title}\n{table(found, load).text()}", flush=True)
                figures += found
        except TargetUnavailableError as error:
            print(f"\nnot measured: {error}", flush=True)
    _write(out, machine, load, titles, figures)


def chosen(
    options: argparse.Namespace, names: Sequence[str]
) -> Iterator[AbstractContextManager[Target]]:
    """Yield the targets that the command names, not opened yet; by default all of `names`."""
    if options.uri:
        yield targets.given(options.uri, json.loads(options.storage_options))
        return
    for name in options.only.split(",") if options.only else names:
        if name not in names:
            raise SystemExit(f"--only: {name!r} is none of {', '.join(names)}")
        yield targets.opened(name)


def _wanted(options: argparse.Namespace, target: Target) -> list[str]:
    found = clients_of(target.uri, target.storage_options)
    return [n for n in found if n in options.clients.split(",")] if options.clients else found


def measure(target: Target, load: Load, clients: Sequence[str]) -> Iterator[Figure]:
    """Yield all figures of one target."""
    able = list(clients)
    shared = target.below("shared")
    try:
        # What everybody reads, written by the SDK: no driver reads its own layout.
        yardstick = clients_of(target.uri, target.storage_options)[1]
        _run(Task(yardstick, yardstick, "write", shared, target.storage_options, *_sizes(load), 0))
        for round_ in range(load.rounds):
            turn = round_ % max(1, len(able))
            for client in able[turn:] + able[:turn]:
                try:
                    yield from _both(target, load, client, shared, seed=round_ + 1)
                except MeasurementError as error:
                    print(f"\nnot measured: {client} on {target.title}: {error}", flush=True)
                    able.remove(client)
    finally:
        target.clear("shared")


def _sizes(load: Load) -> tuple[int, int, int]:
    return load.count, load.size, load.range_size


def _both(target: Target, load: Load, client: str, shared: str, seed: int) -> Iterator[Figure]:
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
                client, checker, verb, uri, target.storage_options, *_sizes(load), seeds[verb]
            )
            found = _run(task)
            yield Figure(target.name, client, verb, found["seconds"], found["cpu_seconds"])
    finally:
        target.clear(own)


def _run(task: Task) -> dict[str, Any]:
    return run_fresh("benchmarks.transfer:measure", task.as_json())


def table(figures: Sequence[Figure], load: Load) -> Table:
    """Make the table of one target's figures."""
    made = Table(["client", *(f"{v} {unit}" for v in VERBS for unit in ("MB/s", "CPU s"))])
    by_client: dict[str, dict[str, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    for figure in figures:
        by_client[figure.client][figure.verb].append(figure)
    for client, by_verb in by_client.items():
        cells = []
        for verb in VERBS:
            rates = [load.nbytes / f.seconds / 1e6 for f in by_verb[verb]]
            cells += [
                f"{Spread.of(rates):.0f}",
                f"{Spread.of([f.cpu_seconds for f in by_verb[verb]]).median:.2f}",
            ]
        made.add(client, *cells)
    return made


def _write(
    out: Path,
    machine: Machine,
    load: Load,
    titles: Mapping[str, str],
    figures: Sequence[Figure],
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": machine.as_json(),
        "load": asdict(load),
        "targets": titles,
        "figures": [asdict(figure) for figure in figures],
    }
    (out / "stores.json").write_text(json.dumps(content, indent=1) + "\n")
    parts = [f"{machine.afterwards()}. {load}; median (lowest–highest)."]
    for name, title in titles.items():
        found = [figure for figure in figures if figure.target == name]
        parts.append(f"**{title}**\n\n{table(found, load).markdown()}")
    (out / "stores.md").write_text("\n\n".join(parts) + "\n")
    print(f"\nwritten: {out / 'stores.json'}, {out / 'stores.md'}")
