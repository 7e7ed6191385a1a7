"""Workload (a) on each object store: a whole save and restore against the SDK moving as much.

::

    python -m benchmarks remote --only s3,gcs
    python -m benchmarks remote --uri gs://bucket/scratch

The SDKs are given the same number of bytes as objects of 64 MiB, and nothing else to do: no tree,
no checksums, no commit. It is ckptio that has to come close to them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.clients import clients_of
from benchmarks.fresh import MeasurementError, run_fresh
from benchmarks.machine import Machine
from benchmarks.results import OURS, Figure, Results
from benchmarks.stores import PACKAGES, chosen
from benchmarks.targets import Target, TargetUnavailableError
from benchmarks.transfer import Task
from benchmarks.trial import ENVIRONMENT, Trial
from benchmarks.workloads import Workload, workload

MIB = 1 << 20
SIZE = 64 * MIB


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--only", help=f"comma-separated: {', '.join(targets.SERVED)}")
    parser.add_argument("--uri", help="a scratch prefix on any store, instead of those")
    parser.add_argument("--storage-options", default="{}", help="JSON, in fsspec's spelling")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny workload, once")


def main(options: argparse.Namespace, out: Path) -> None:
    """Measure, print tables, write ``remote.json``, ``remote.md`` and the plots."""
    results = Results(Machine.here(("jax", *PACKAGES)), name="remote")
    print(results.machine, flush=True)
    for opening in chosen(options, targets.SERVED):
        try:
            with opening as target:
                load = workload("a", quick=options.quick)
                load = replace(
                    load, letter=f"a-{target.name}", title=f"{load.title}, on {target.title}"
                )
                results.add(load, {})
                rounds = 1 if options.quick else options.rounds
                results.figures += _measure(target, load, rounds, quick=options.quick)
                print(f"\n{results.title(load)}\n{results.table(load).text()}", flush=True)
                results.write(out)
        except TargetUnavailableError as error:
            print(f"\nnot measured: {error}", flush=True)


def _measure(target: Target, load: Workload, rounds: int, *, quick: bool) -> Iterator[Figure]:
    names = clients_of(target.uri, target.storage_options)
    able = [name for name in names if name == OURS or not name.startswith(OURS)]
    for round_ in range(rounds):
        turn = round_ % max(1, len(able))
        for name in able[turn:] + able[:turn]:
            place = f"{name}-{round_}"
            try:
                for verb in ("save", "restore"):
                    if name == OURS:
                        found = _ckptio(target, verb, place, quick=quick)
                    else:
                        found = _sdk(target, load, name, verb, place)
                    yield Figure(
                        load.letter,
                        name,
                        verb,
                        found["seconds"],
                        found["cpu_seconds"],
                        found["extra"],
                    )
            except MeasurementError as error:
                print(f"\nnot measured: {name} on {target.title}: {error}", flush=True)
                able.remove(name)
            finally:
                target.clear(place)


def _ckptio(target: Target, verb: str, place: str, *, quick: bool) -> dict[str, Any]:
    trial = Trial("a", quick, OURS, verb, target.below(f"{place}/step-1"), target.storage_options)
    return run_fresh("benchmarks.trial:measure", trial.as_json(), environment=ENVIRONMENT)


def _sdk(target: Target, load: Workload, name: str, verb: str, place: str) -> dict[str, Any]:
    count = max(1, round(load.nbytes / SIZE))
    size = load.nbytes // count
    task = Task(
        name,
        OURS,
        "write" if verb == "save" else "read",
        target.below(place),
        target.storage_options,
        count,
        size,
        size,
        0,
    )
    found = run_fresh("benchmarks.transfer:measure", task.as_json())
    result = load.nbytes if verb == "restore" else 0
    return {**found, "extra": found["peak"] - found["resident_before"] - result}
