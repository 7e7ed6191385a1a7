"""What the processes of a multi-process test do; run as a program by `processes.run`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckptio
from ckptio.testing import FaultyBackend

ROWS = 384  # which 2, 4, 6 and 8 devices divide


def mesh(axes="x"):
    devices = np.array(jax.devices())
    shape = (devices.size,) if len(axes) == 1 else (devices.size // 2, 2)
    return jax.sharding.Mesh(devices.reshape(shape), tuple(axes))


def host_values():
    """The global values of every leaf, the same in all processes."""
    return {
        "rows": np.arange(ROWS * 1024, dtype=np.float32).reshape(ROWS, 1024),
        "columns": np.arange(256 * 1536, dtype=np.int32).reshape(256, 1536),
        "replicated": np.arange(300_000, dtype=np.float32),
        "both": np.arange(ROWS * 512, dtype=np.int16).reshape(ROWS, 512),
    }


def global_tree(step=1):
    """A tree over the devices of all processes, with replicated and host leaves."""
    values = host_values()
    specs = {"rows": P("x"), "columns": P(None, "x"), "replicated": P(), "both": P(("x", "y"))}

    def put(name):
        sharding = NamedSharding(mesh("xy" if name == "both" else "x"), specs[name])
        return jax.make_array_from_callback(values[name].shape, sharding, lambda i: values[name][i])

    tree = {name: put(name) for name in values}
    return tree | {"step": step, "host": np.full(7, step), "name": "run"}


def same(back):
    """Whether this process's shards of a restored tree hold what they should."""
    values = host_values()
    for name, value in values.items():
        for shard in back[name].addressable_shards:
            if not np.array_equal(np.asarray(shard.data), value[shard.index]):
                return False
    return True


class Wrap:
    """Wraps every backend with a script."""

    def __init__(self, before=None):
        self.before, self.opened = before, []

    @ckptio.hookimpl
    def ckptio_wrap_backend(self, backend):
        self.opened.append(FaultyBackend(backend, self.before))
        return self.opened[-1]


def save(uri, storage_options=None, step=1, overwrite=False, background=False, deadline=60):
    """Save, and tell the report."""
    verb = ckptio.save_async if background else ckptio.save
    report = verb(
        uri, global_tree(step), overwrite=overwrite, storage_options=storage_options,
        options=ckptio.SaveOptions(deadline=deadline),
    )  # fmt: skip
    if background:
        report = report.result(timeout=deadline)
    return {"bytes": report.nbytes, "objects": report.objects, "leaves": report.leaves}


def restore(uri, storage_options=None, verify=True):
    """Restore onto all devices of these processes; tell what was read."""
    wrap = Wrap()
    ckptio.plugin_manager().register(wrap)
    abstract = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        global_tree(),
    )
    back = ckptio.restore(uri, like=abstract, storage_options=storage_options, verify=verify)
    data = [
        c for c in wrap.opened[0].calls if c.method == "read_into" and c.key.startswith("data/")
    ]
    return {
        "same": same(back),
        "step": back["step"],
        "host": back["host"].tolist(),
        "read": sum(c.nbytes for c in data),
    }


def shared_values():
    """Leaves of which several processes need the same bytes; the odd one no mesh divides."""
    rng = np.random.default_rng(5)
    return {
        "replicated": rng.standard_normal((1536, 2048), np.float32),
        "partly": rng.standard_normal((2048, 1536)).astype(jax.numpy.bfloat16),
        "columns": rng.integers(-9, 9, (3, 1 << 20), np.int16),
        "odd": rng.standard_normal((1_250_003,), np.float32),
        "small": rng.standard_normal((7, 5), np.float32),
    }


def shared_shardings():
    """Over processes and their devices, each leaf is replicated at least in part."""
    pairs = mesh("xy")  # x goes over processes, y over the devices of each
    specs = {"replicated": P(), "partly": P("y"), "columns": P(None, "y"), "odd": P(), "small": P()}
    return {name: NamedSharding(pairs, spec) for name, spec in specs.items()}


def restore_sharing(uri, storage_options=None, verify=True, who=None, how=None, deadline=30):
    """Restore what is replicated; in one process something may go wrong."""
    values, shardings = shared_values(), shared_shardings()
    like = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=shardings[name])
        for name, value in values.items()
    }

    def strike(call):
        if jax.process_index() != who or not call.key.startswith("data/"):
            return
        if how == "raise" and call.method == "read_into":
            raise ckptio.CorruptionError(f"{call.key} is damaged, says the test")
        if how == "kill" and call.method == "read_into":
            os.kill(os.getpid(), signal.SIGKILL)

    if jax.process_index() == who and how == "other":
        like["replicated"] = jax.ShapeDtypeStruct(
            (1536, 2048), np.float32, sharding=NamedSharding(mesh("xy"), P("y"))
        )
    wrap = Wrap(strike)
    ckptio.plugin_manager().register(wrap)
    back = ckptio.restore(
        uri, like=like, storage_options=storage_options, verify=verify,
        options=ckptio.RestoreOptions(share_reads=True, deadline=deadline),
    )  # fmt: skip
    reads = [c.nbytes for c in wrap.opened[0].calls if c.method == "read_into"]
    for name, array in back.items():
        if array.sharding != shardings[name]:
            return {"error": "sharding", "message": f"{name} {array.sharding}"}
        for shard in array.addressable_shards:
            if np.asarray(shard.data).tobytes() != values[name][shard.index].tobytes():
                return {"error": "content", "message": name}
    return {"read": sum(reads)}


def save_and_restore(uri, **arguments):
    """Both, in one program, several times."""
    for step in range(1, 4):
        save(f"{uri}/{step}", step=step, background=step % 2 == 0, **arguments)
    return restore(f"{uri}/3", **arguments)


def fail(uri, who, how, method, key="", deadline=15, storage_options=None):
    """Save, while one process raises, is killed, or stalls at a chosen call."""

    def strike(call):
        if call.method != method or key not in call.key:
            return
        if how == "raise":
            raise ckptio.StorageFullError(f"{call.key}: no space left, says the test")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(600)  # stalls for longer than any deadline

    if jax.process_index() == who:
        ckptio.plugin_manager().register(Wrap(strike))
    return save(uri, step=2, overwrite=True, deadline=deadline, storage_options=storage_options)


def fail_then_save(uri, who, how, method, key="", deadline=15):
    """A failure, and then the next save works."""
    try:
        fail(uri, who, how, method, key, deadline)
    except ckptio.CkptioError as error:
        first = f"{type(error).__name__}: {error}"
    else:
        first = "no error"
    for plugin in [p for p in ckptio.plugin_manager().get_plugins() if isinstance(p, Wrap)]:
        ckptio.plugin_manager().unregister(plugin)
    return {"first": first, "then": save(uri, step=3, overwrite=True)}


def different_trees(uri):
    """Process 1 brings another dtype."""
    tree = global_tree()
    if jax.process_index() == 1:
        tree["extra"] = np.ones(2)
    ckptio.save(uri, tree, options=ckptio.SaveOptions(deadline=20))


def unsupported(uri):
    """Process 1 brings a leaf that cannot be saved."""
    tree = global_tree()
    if jax.process_index() == 1:
        tree["host"] = object()
    ckptio.save(uri, tree, options=ckptio.SaveOptions(deadline=20))


def unshared(uri):
    """Each process has a directory of its own under the same name."""
    if jax.process_index() == 1:
        own = ckptio.open_backend("memory://own/directory")

        class Own:
            @ckptio.hookimpl
            def ckptio_wrap_backend(self, backend):
                own.uri = backend.uri
                return own

        ckptio.plugin_manager().register(Own())
    ckptio.save(uri, global_tree(), options=ckptio.SaveOptions(deadline=20))


def main():
    port, count, index = map(int, sys.argv[1:4])
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    try:
        result = globals()[sys.argv[4]](**json.loads(sys.argv[5]))
    except Exception as error:
        result = {"error": type(error).__name__, "message": str(error)}
    print("RESULT", json.dumps(result), flush=True)
    # JAX's own shutdown waits for all processes, some of which are dead in these tests; but the end
    # of process 0 is the end of all: it waits until its input ends, when the others are gone.
    if index == 0:
        sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
