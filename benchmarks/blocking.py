"""How long a save blocks its caller, and how long it takes until everything is durable.

The same tree, saved by whoever can go on in the background: for `jax.Array` on CPU devices nothing
has to be copied, NumPy arrays have to be: they are compared with NumPy's own copy, in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.meter import metered, settle
from benchmarks.peers import PEERS
from benchmarks.results import LIMIT, OURS
from benchmarks.trees import KINDS, check
from benchmarks.trial import Trial, make_durable, warm_up
from benchmarks.workloads import Workload, nested, workload

Wait = Callable[[], object]


class Saver(NamedTuple):
    """Who saves.

    Attributes
    ----------
    save : callable
        ``(tree, path) -> wait``.
    restorer : str
        The peer that reads it back.
    numpy : bool
        Whether the leaves are NumPy arrays.
    """

    save: Callable[[Any, str], Wait]
    restorer: str
    numpy: bool = False


def _ours(tree: Any, path: str) -> Wait:
    import ckptio

    return ckptio.save_async(path, tree).result


def _ours_blocking(tree: Any, path: str) -> Wait:
    import ckptio

    ckptio.save(path, tree)
    return lambda: None


def _orbax(ocdbt: bool) -> Callable[[Any, str], Wait]:
    def save(tree: Any, path: str) -> Wait:
        import orbax.checkpoint as ocp

        checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt))
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
        return lambda: checkpointer.wait_until_finished()

    return save


BLOCKING, NUMPY = "ckptio.save", "ckptio, NumPy leaves"
SAVERS: Mapping[str, Saver] = {
    OURS: Saver(_ours, "ckptio"),
    NUMPY: Saver(_ours, "ckptio", numpy=True),
    BLOCKING: Saver(_ours_blocking, "ckptio"),
    "Orbax": Saver(_orbax(ocdbt=True), "Orbax"),
    "Orbax, no OCDBT": Saver(_orbax(ocdbt=False), "Orbax, no OCDBT"),
}
COPY = LIMIT
"""One copy of NumPy leaves."""


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one of `SAVERS`, or `COPY`; in a fresh process."""
    name, quick, path = request["name"], request["quick"], request["path"]
    load = workload("g", quick=quick)
    return {"block": _copy(load)} if name == COPY else _measure(SAVERS[name], load, quick, path)


def _copy(load: Workload) -> dict[str, Any]:
    leaves = [leaf.content() for leaf in load.leaves]
    settle()
    with metered() as cost:
        copies = [np.copy(leaf) for leaf in leaves]
    return cost.as_json(sum(copy.nbytes for copy in copies))


def _measure(saver: Saver, load: Workload, quick: bool, path: str) -> dict[str, Any]:
    trees = KINDS["jax"]
    warm_up(Trial("g", quick, saver.restorer, "save", path))
    Path(path).mkdir(parents=True)
    tiny = Path(path, "warm-up")
    saver.save(trees.make(load.leaves[:1]), str(tiny))()
    leaves = {leaf.path: leaf.content() for leaf in load.leaves} if saver.numpy else {}
    tree = nested(dict(leaves)) if saver.numpy else trees.make(load.leaves)
    made = Path(path, "step")
    settle()
    with metered() as whole:
        with metered() as blocked:
            wait = saver.save(tree, str(made))
        for leaf in leaves.values():
            leaf[:1] = 0  # the caller may do so by now; what is saved is the state at the call
        wait()
        make_durable(made)
    found = PEERS[saver.restorer].call("restore", str(made), trees.like(load))
    check(trees, trees.ready(found), load.leaves)
    return {"block": blocked.as_json(), "save": whole.as_json()}
