"""One measurement of a workload: in a fresh process, one peer saves or restores it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.meter import metered, settle
from benchmarks.peers import PEERS
from benchmarks.trees import KINDS, check, same
from benchmarks.workloads import Workload, nested, transformer, workload

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Trial:
    """What to measure.

    Attributes
    ----------
    letter : str
        Of the workload.
    quick : bool
        A tiny one.
    peer, verb : str
        Who, and ``"save"`` or ``"restore"``.
    path : str
        Where; a save makes it. A URI for those who take one.
    storage_options : mapping
        For a URI.
    """

    letter: str
    quick: bool
    peer: str
    verb: str
    path: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def options(self) -> dict[str, Any]:
        """What is passed to the peer beside its settings; those of a path have no such argument."""
        return {"storage_options": self.storage_options} if self.storage_options else {}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Carry a trial out; what was restored is checked bit for bit before anything is returned."""
    trial = Trial(**request)
    load = workload(trial.letter, quick=trial.quick)
    warm_up(trial)
    return (_save if trial.verb == "save" else _restore)(trial, load)


def warm_up(trial: Trial) -> None:
    """Import, compile and start threads on something tiny."""
    peer, trees = PEERS[trial.peer], KINDS[PEERS[trial.peer].kind]
    tiny = Workload("", "", transformer(1, 16, 16))
    with tempfile.TemporaryDirectory() as directory:
        # On a store beside what is measured, so that its client is warm too.
        remote = "://" in trial.path
        place = f"{trial.path}-warm-up-{trial.verb}" if remote else f"{directory}/tiny"
        peer.call("save", trees.make(tiny.leaves), place, **trial.options)
        restored = trees.ready(peer.call("restore", place, trees.like(tiny), **trial.options))
    check(trees, restored, tiny.leaves)


def _save(trial: Trial, load: Workload) -> dict[str, Any]:
    peer = PEERS[trial.peer]
    tree = KINDS[peer.kind].make(load.leaves)
    settle()
    with metered() as cost:
        peer.call("save", tree, trial.path, **trial.options)
        if "://" not in trial.path:
            make_durable(Path(trial.path))
    return cost.as_json()


def _restore(trial: Trial, load: Workload) -> dict[str, Any]:
    peer = PEERS[trial.peer]
    if load.rows:
        leaf = load.leaves[-1]
        with metered() as cost:
            rows = peer.call("read_rows", trial.path, leaf.path, load.rows)
        same(rows, leaf.content()[: load.rows], leaf.path)
    else:
        trees = KINDS[peer.kind]
        like = trees.like(load)
        settle()
        with metered() as cost:
            tree = trees.ready(peer.call("restore", trial.path, like, **trial.options))
        check(trees, tree, load.target)
    return cost.as_json(load.wanted_nbytes)


def device_put(request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure what JAX alone needs to place arrays that are in memory: a restore's floor."""
    import jax

    load = workload(request["letter"], quick=request["quick"])
    like = KINDS["jax"].like(load)
    host = nested({leaf.path: leaf.content() for leaf in load.target})
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    tiny = transformer(1, 16, 16)
    KINDS["jax"].make(tiny)
    settle()
    with metered() as cost:
        KINDS["jax"].ready(jax.device_put(host, shardings))
    return cost.as_json(load.wanted_nbytes)


def make_durable(path: Path) -> None:
    """Sync all files and directories below a path; what a peer synced itself costs nothing here."""
    found = [path, *path.rglob("*")]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(_sync, [*found, path.parent]):
            pass


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
