"""A save in the background holds the state at the call, and none is lost."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckptio
from ckptio.testing import FaultyBackend


class Gate:
    """Holds every write of data until it is opened."""

    def __init__(self):
        self.open, self.reached = threading.Event(), threading.Event()
        self.failure = None

    def before(self, call):
        if call.method in ("put", "write_part") and call.key.endswith(".safetensors"):
            self.reached.set()
            assert self.open.wait(60)
            if self.failure is not None:
                raise self.failure

    @ckptio.hookimpl
    def ckptio_wrap_backend(self, backend):
        return FaultyBackend(backend, self.before)


@pytest.fixture
def gate():
    gate = Gate()
    ckptio.plugin_manager().register(gate)
    yield gate
    gate.open.set()
    ckptio.plugin_manager().unregister(gate)


def test_numpy_leaves_may_be_mutated_and_arrays_donated_at_once(tmp_path, gate):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    host = np.arange(1_200_000.0)
    device = jax.device_put(
        jnp.arange(1 << 20, dtype=jnp.float32).reshape(1024, 1024), NamedSharding(mesh, P("x", "y"))
    )
    small = jax.device_put(jnp.arange(64.0), NamedSharding(mesh, P("x")))
    expected = np.asarray(device).copy()
    tree = {"host": host, "device": device, "small": small, "strided": host[::-2]}
    pending = ckptio.save_async(tmp_path / "c", tree)
    assert gate.reached.wait(60)
    assert not pending.done()
    host[:] = -1
    step = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    for name in ["device", "small"]:
        jax.block_until_ready(step(tree[name]))
    del device, small
    gc.collect()
    gate.open.set()
    report = pending.result(timeout=60)
    assert report.leaves == 4
    back = ckptio.restore(tmp_path / "c")
    assert np.array_equal(back["host"], np.arange(1_200_000.0))
    assert np.array_equal(back["strided"], np.arange(1_200_000.0)[::-2])
    assert np.array_equal(back["device"], expected)
    assert np.array_equal(back["small"], np.arange(64.0))


def test_nothing_is_visible_before_it_is_whole(tmp_path, gate):
    pending = ckptio.save_async(tmp_path / "c", {"w": np.ones(10)})
    assert gate.reached.wait(60)
    assert not ckptio.exists(tmp_path / "c")
    with pytest.raises(TimeoutError, match="goes on"):
        pending.result(timeout=0.01)
    assert "running" in repr(pending)
    assert pending.progress[0] == 0
    gate.open.set()
    assert pending.exception(timeout=60) is None
    assert ckptio.exists(tmp_path / "c")
    assert pending.progress[0] == pending.progress[1] > 0


def test_an_error_comes_out_of_the_result_and_the_same_uri_can_be_saved_again(tmp_path, gate):
    gate.failure = ckptio.StorageFullError("no space left, says the test")
    gate.open.set()
    pending = ckptio.save_async(tmp_path / "c", {"w": np.ones(10)})
    for _ in range(2):
        with pytest.raises(ckptio.StorageFullError, match="no space left"):
            pending.result(timeout=60)
    assert isinstance(pending.exception(), ckptio.StorageFullError)
    assert not ckptio.exists(tmp_path / "c")
    gate.failure = None
    ckptio.save_async(tmp_path / "c", {"w": np.ones(10)}).result(timeout=60)
    assert ckptio.exists(tmp_path / "c")


def test_what_can_be_known_at_once_is_raised_at_once(tmp_path):
    ckptio.save(tmp_path / "c", {"w": 1})
    with pytest.raises(ckptio.AlreadyExistsError):
        ckptio.save_async(tmp_path / "c", {"w": 2})
    with pytest.raises(ckptio.UnsupportedLeafError):
        ckptio.save_async(tmp_path / "d", {"w": object()})
    assert not (tmp_path / "d").exists()


def test_a_second_save_waits_for_the_first(tmp_path, gate):
    first = ckptio.save_async(tmp_path / "1", {"w": np.ones(10)})
    assert gate.reached.wait(60)
    second = []
    thread = threading.Thread(
        target=lambda: second.append(ckptio.save_async(tmp_path / "2", {"w": np.ones(10)}))
    )
    thread.start()
    assert not second
    gate.open.set()
    thread.join(60)
    second[0].result(timeout=60)
    assert first.done()
    assert ckptio.exists(tmp_path / "1")
    assert ckptio.exists(tmp_path / "2")


def test_a_cancelled_save_leaves_nothing_and_a_finished_one_cannot_be(tmp_path, gate):
    pending = ckptio.save_async(tmp_path / "c", {"w": np.ones(10)})
    assert gate.reached.wait(60)
    threading.Timer(0.01, gate.open.set).start()
    assert pending.cancel()
    with pytest.raises(ckptio.SaveCancelledError, match="cancelled"):
        pending.result(timeout=60)
    assert not ckptio.exists(tmp_path / "c")
    assert [p for p in (tmp_path / "c").rglob("*") if p.is_file()] == []
    done = ckptio.save_async(tmp_path / "c", {"w": np.ones(10)})
    done.result(timeout=60)
    assert not done.cancel()
    assert ckptio.exists(tmp_path / "c")


def test_a_finished_save_lets_go_of_what_it_held(tmp_path):
    array = jnp.arange(1000.0)
    freed = weakref.ref(array)
    pending = ckptio.save_async(tmp_path / "c", {"w": array})
    del array
    pending.result(timeout=60)
    gc.collect()
    assert freed() is None
    assert pending.progress[0] > 0


def test_an_observer_may_save_when_it_hears_of_a_commit(tmp_path):
    class Mirror:
        @ckptio.hookimpl
        def ckptio_save_committed(self, uri):
            if uri.endswith("first"):
                ckptio.save(tmp_path / "second", {"w": 2})

    mirror = Mirror()
    ckptio.plugin_manager().register(mirror)
    try:
        ckptio.save_async(tmp_path / "first", {"w": 1}).result(timeout=60)
    finally:
        ckptio.plugin_manager().unregister(mirror)
    assert ckptio.restore(tmp_path / "second") == {"w": 2}


def usage():
    """Threads, descriptors, and resident bytes of this process."""
    status = Path("/proc/self/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return threading.active_count(), len(os.listdir("/proc/self/fd")), rss * 1024


def test_fifty_saves_leave_threads_descriptors_and_memory_flat(tmp_path):
    tree = {"host": np.ones(1 << 20), "device": jnp.ones(1 << 20)}

    def save(times):
        for _ in range(times):
            ckptio.save_async(tmp_path / "c", tree, overwrite=True)
        ckptio.save(tmp_path / "c", tree, overwrite=True)
        gc.collect()
        return usage()

    before = save(10)
    after = save(50)
    assert after[:2] == before[:2]
    assert after[2] < before[2] + (24 << 20)


EXIT = """
import sys, threading, numpy as np, ckptio
from ckptio.testing import FaultyBackend

class Slow:
    @ckptio.hookimpl
    def ckptio_wrap_backend(self, backend):
        wait = threading.Event()
        return FaultyBackend(backend, lambda call: wait.wait(0.3) and None)

ckptio.plugin_manager().register(Slow())
options = ckptio.SaveOptions(at_exit=sys.argv[2])
ckptio.save_async(sys.argv[1], {"w": np.ones(3_000_000)}, options=options)
"""


@pytest.mark.parametrize("at_exit", ["finish", "abandon"])
def test_the_interpreters_exit_finishes_or_abandons_and_never_hangs(tmp_path, at_exit):
    done = subprocess.run(
        [sys.executable, "-c", EXIT, tmp_path / "c", at_exit],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert ckptio.exists(tmp_path / "c") is (at_exit == "finish")
    if at_exit == "abandon":
        assert [p for p in (tmp_path / "c").rglob("*") if p.is_file()] == []


def test_inside_a_running_event_loop_and_from_many_threads(place):
    async def main():
        ckptio.save(**(place / "1").to, tree={"w": 1})
        return ckptio.restore(**(place / "1").to)

    assert asyncio.run(main()) == {"w": 1}
    found = {}

    def work(i):
        ckptio.save(**(place / f"t{i}").to, tree={"w": np.full(1000, i)})
        found[i] = ckptio.restore(**(place / f"t{i}").to)["w"][0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: i for i in range(8)}
