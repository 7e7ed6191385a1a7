"""Several processes of one program save at the same steps, resume from one, and leave together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from servers.process import free_ports

import ckptio
from ckptio.manager import CheckpointManager

pytestmark = pytest.mark.timeout(180)

PROGRAM = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ckptio import CkptioError, every, hookimpl, keep, plugin_manager
from ckptio.manager import CheckpointManager
from ckptio.testing import FaultyBackend

port, count, index, uri, wanted = sys.argv[1:]
index, wanted = int(index), json.loads(wanted)
jax.distributed.initialize(f"127.0.0.1:{port}", int(count), index)
mesh = Mesh(np.array(jax.devices()), ("x",))
sharding = NamedSharding(mesh, PartitionSpec("x"))

def array(value):
    host = np.full(8, value, np.float32)
    return jax.make_array_from_callback((8,), sharding, lambda box: host[box])

def together(name):
    from jax._src import distributed
    distributed.global_state.client.wait_at_barrier(name, 60_000)

class Refuse:
    @hookimpl
    def ckptio_wrap_backend(self, backend):
        def before(call):
            if call.method in ("put", "write_part") and "step-00000003" in backend.uri:
                raise ValueError("refused")
        return FaultyBackend(backend, before)

if wanted.get("refuse") == index:
    plugin_manager().register(Refuse())

done, failed = [], None
schedule = every.minutes(1e-9) if wanted.get("timed") else every.steps(1)
if wanted.get("never"):
    schedule = every.steps([0])
manager = CheckpointManager(
    uri, keep=keep.latest(2), every=schedule, preemption=wanted.get("preemption", False)
)
state = {"w": array(0), "step": 0}
with manager:
    state, start = manager.restore_latest(like=state, default=(state, 0))
    print("RUNNING", flush=True)
    for step in range(start + 1, wanted["steps"] + 1):
        together(f"step {step}")
        state = {"w": state["w"] + 1, "step": step}
        try:
            if manager.save(step, state, metrics={"loss": 1 / step}):
                done.append(step)
        except CkptioError as error:
            failed = [step, type(error).__name__, str(error)]
            break
        except ValueError as error:
            failed = [step, type(error).__name__, str(error)]
            break
        except SystemExit as leaving:
            print(json.dumps({"left": step, "code": leaving.code}), flush=True)
            raise
    together("end")
    latest = manager.latest_step()
values = [float(shard.data[0]) for shard in state["w"].addressable_shards]
print(json.dumps({"start": start, "done": done, "failed": failed, "latest": latest, "w": values}))
"""


@contextmanager
def programs(uri, count=2, **wanted):
    (port,) = free_ports(1)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    arguments = [str(port), str(count)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments, str(i), str(uri), json.dumps(wanted)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def results(started, code=0):
    found = []
    for process in reversed(started):  # the others cannot live without process 0
        out, err = process.communicate(timeout=100)
        assert process.returncode == code, err[-3000:]
        found.insert(0, json.loads(out.splitlines()[-1]))
    return found


@pytest.mark.parametrize("timed", [False, True])
def test_all_save_and_resume_at_the_same_steps(tmp_path, timed):
    for first, last in [(0, 5), (5, 9)]:
        with programs(tmp_path / "run", steps=last, timed=timed) as started:
            one, two = results(started)
        assert one["done"] == two["done"] == [*range(first + 1, last + 1)]
        assert one["start"] == two["start"] == first
        assert one["w"] == two["w"] == [last] * 2
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == [8, 9]
        assert manager.metrics(9) == {"loss": 1 / 9}
        assert manager.restore(9)["w"].tolist() == [9] * 8


def test_a_failure_of_one_process_ends_all_at_the_same_step(tmp_path):
    with programs(tmp_path / "run", steps=9, refuse=1) as started:
        one, two = results(started)
    assert one["failed"][0] == two["failed"][0] == 4, "the save after the one that failed"
    assert "process 1" in one["failed"][2]
    assert one["latest"] == two["latest"] == 2
    assert not ckptio.exists(tmp_path / "run" / "step-00000003")


def test_sigterm_of_one_process_makes_all_save_one_step_and_leave(tmp_path):
    with programs(tmp_path / "run", steps=10**6, never=True, preemption=True) as started:
        for process in started:
            assert process.stdout.readline() == "RUNNING\n"
        started[1].send_signal(signal.SIGTERM)
        one, two = results(started, code=128 + signal.SIGTERM)
    assert one == two
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == [one["left"]]
        back, step = manager.restore_latest()
        assert back["w"].tolist() == [step] * 8
