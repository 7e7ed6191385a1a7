"""Nothing half-written is ever seen; whoever loses a race or fails leaves no harm."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ckptio
from ckptio import commit
from ckptio.testing import FaultyBackend

OLD = {"w": np.zeros(700_000), "step": 1}  # an upload of two parts
NEW = {"w": np.ones(700_000), "step": 2}
OPTIONS = ckptio.SaveOptions(object_size=400_000)


class Inject:
    """Wraps backends in a `FaultyBackend` with a script."""

    def __init__(self, before=None, after=None):
        self.before, self.after, self.opened = before, after, []

    @ckptio.hookimpl
    def ckptio_wrap_backend(self, backend):
        self.opened.append(FaultyBackend(backend, self.before, self.after))
        return self.opened[-1]

    def __enter__(self):
        ckptio.plugin_manager().register(self)
        return self

    def __exit__(self, *_):
        ckptio.plugin_manager().unregister(self)


class BoomError(Exception):
    """An error that no retry is for."""


def names(uri):
    return sorted(p.relative_to(uri).as_posix() for p in Path(uri).rglob("*") if p.is_file())


def test_a_second_save_is_refused_unless_it_may_overwrite(tmp_path):
    uri = tmp_path / "c"
    ckptio.save(uri, OLD)
    with pytest.raises(ckptio.AlreadyExistsError, match="overwrite=True"):
        ckptio.save(uri, NEW)
    assert ckptio.restore(uri)["step"] == 1
    before = names(uri)
    ckptio.save(uri, NEW, overwrite=True)
    assert ckptio.restore(uri)["step"] == 2
    assert len(names(uri)) == len(before), "the old data is gone"
    assert not {*names(uri)} & {*before} - {"manifest.json"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_another_programs_manifest_is_never_overwritten(tmp_path, overwrite):
    ckptio.save(tmp_path / "a", OLD)
    theirs = tmp_path / "app" / "manifest.json"
    theirs.parent.mkdir()
    theirs.write_text('{"name": "an app", "icons": []}')
    with pytest.raises(ckptio.AlreadyExistsError, match=r"app/manifest.json is another program's"):
        ckptio.save(tmp_path / "app", OLD, overwrite=overwrite)
    with pytest.raises(ckptio.AlreadyExistsError, match="another program's"):
        ckptio.copy(tmp_path / "a", tmp_path / "app", overwrite=overwrite)
    with pytest.raises(ckptio.AlreadyExistsError, match="another program's"):
        ckptio.convert(tmp_path / "a", tmp_path / "app", overwrite=overwrite)
    with pytest.raises(ckptio.NotFoundError):
        ckptio.delete(tmp_path / "app")
    assert theirs.read_text() == '{"name": "an app", "icons": []}'
    assert names(tmp_path / "app") == ["manifest.json"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_at_any_operation_leaves_the_old_state(tmp_path, overwrite):
    """Each operation of a save fails in turn, before it is carried out."""
    uri = tmp_path / "c"
    points = 0
    while True:
        if overwrite:
            ckptio.save(uri, OLD, overwrite=True)
        elif ckptio.exists(uri):
            ckptio.delete(uri)

        def fail(call, at=points):
            if call.index == at:
                raise BoomError(call.method)

        with Inject(fail) as inject:
            try:
                ckptio.save(uri, NEW, overwrite=overwrite, options=OPTIONS)
            except (BoomError, ckptio.CkptioError):
                committed = False
            else:
                committed = True
        if committed:
            assert ckptio.restore(uri)["step"] == 2
            if points >= len(inject.opened[-1].calls):
                break  # every operation had its turn
        elif overwrite:
            assert ckptio.restore(uri)["step"] == 1
            assert ckptio.restore(uri)["w"].sum() == 0
        else:
            assert not ckptio.exists(uri)
            with pytest.raises(ckptio.NotFoundError, match="no checkpoint"):
                ckptio.open(uri)
        ckptio.save(uri, NEW, overwrite=True)
        assert ckptio.restore(uri)["step"] == 2
        points += 1
    assert points >= 7


def test_a_lost_answer_to_the_commit_is_success_not_conflict(tmp_path):
    lost = []

    def lose(call):
        if call.key == "manifest.json" and call.method == "put" and not lost:
            lost.append(call)
            raise ckptio.StoreUnavailableError("the answer was lost")

    with Inject(after=lose):
        ckptio.save(tmp_path / "c", OLD)
        lost.clear()
        ckptio.save(tmp_path / "c", NEW, overwrite=True)
    assert lost
    assert ckptio.restore(tmp_path / "c")["step"] == 2


def test_an_interrupt_after_the_commit_keeps_the_checkpoint(tmp_path):
    """The manifest was created, but the caller is interrupted before it hears so."""

    def interrupt(call):
        if call.key == "manifest.json" and call.method == "put":
            raise KeyboardInterrupt

    with Inject(after=interrupt), pytest.raises(KeyboardInterrupt):
        ckptio.save(tmp_path / "c", NEW)
    assert ckptio.restore(tmp_path / "c")["step"] == 2
    ckptio.open(tmp_path / "c").verify()


def test_a_store_that_is_busy_for_a_while_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptio.retry.FIRST_PAUSE", 0.001)
    random_calls = random.Random(1)

    def busy(call):
        if random_calls.random() < 0.3 and call.method not in ("list", "delete", "abort"):
            raise ckptio.StoreUnavailableError("503 slow down")

    with Inject(busy):
        ckptio.save(tmp_path / "c", NEW, options=OPTIONS)
        assert ckptio.restore(tmp_path / "c")["w"].sum() == 700_000


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_writers_exactly_one_wins_and_the_loser_is_told(tmp_path, overwrite):
    uri = tmp_path / "c"
    if overwrite:
        ckptio.save(uri, OLD)
    arrived = threading.Barrier(2)

    def meet(call):
        if call.key == "manifest.json" and call.method == "put":
            arrived.wait(60)

    def write(step):
        try:
            ckptio.save(uri, {**NEW, "step": step}, overwrite=overwrite)
        except ckptio.AlreadyExistsError:
            return None
        return step

    with Inject(meet), ThreadPoolExecutor(2) as pool:
        winners = [step for step in pool.map(write, [10, 20]) if step is not None]
    assert len(winners) == 1
    assert ckptio.restore(uri)["step"] == winners[0]
    ckptio.open(uri).verify()
    ckptio.collect_garbage(uri, grace=0)
    assert len(names(uri)) == 2, "the loser's data is collected, the winner's stays"
    ckptio.open(uri).verify()


def test_garbage_is_collected_after_its_grace_and_never_what_is_committed(tmp_path):
    run = tmp_path / "run"
    ckptio.save(run / "step-1", OLD)
    dead = run / "step-2" / "data" / "0123456789abcdef" / "p00000-000.safetensors"
    dead.parent.mkdir(parents=True)
    dead.write_bytes(b"torn")
    also = run / "step-1" / "data" / "fedcba9876543210" / "p00000-000.safetensors"
    also.parent.mkdir()
    also.write_bytes(b"torn")
    foreign = [run / "step-1" / "notes.txt", run / "data" / "mine" / "p00000-000.safetensors"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("keep me")
    assert not ckptio.exists(run / "step-2")
    assert ckptio.collect_garbage(run) == 0, "an attempt may still be at work"
    assert ckptio.collect_garbage(run, grace=0) == 2
    assert not dead.exists()
    assert not also.exists()
    assert all(path.exists() for path in foreign)
    ckptio.open(run / "step-1").verify()
    assert commit.GRACE == 24 * 3600


def test_delete_removes_the_checkpoint_and_nothing_else(tmp_path):
    ckptio.save(tmp_path / "run" / "1", OLD)
    (tmp_path / "run" / "1" / "notes.txt").write_text("mine")
    ckptio.save(tmp_path / "run" / "2", OLD)
    ckptio.delete(tmp_path / "run" / "1")
    assert not ckptio.exists(tmp_path / "run" / "1")
    assert names(tmp_path / "run" / "1") == ["notes.txt"]
    with pytest.raises(ckptio.NotFoundError, match="no checkpoint"):
        ckptio.delete(tmp_path / "run" / "1")
    ckptio.delete(tmp_path / "run" / "2")
    assert not (tmp_path / "run" / "2").exists()


def test_an_interrupted_deletion_leaves_no_half_checkpoint(tmp_path):
    ckptio.save(tmp_path / "c", OLD)

    def fail(call):
        if call.method == "delete" and call.key != "manifest.json":
            raise BoomError

    with Inject(fail), pytest.raises(BoomError):
        ckptio.delete(tmp_path / "c")
    assert not ckptio.exists(tmp_path / "c")
    assert ckptio.collect_garbage(tmp_path / "c", grace=0) == 1


SAVE_FOREVER = """
import sys, numpy as np, ckptio
uri = sys.argv[1]
print("ready", flush=True)
for step in range(2, 10**6):
    tree = {"w": np.full(2_000_000, float(step)), "step": step}
    ckptio.save(uri, tree, overwrite=True, options=ckptio.SaveOptions(object_size=4 << 20))
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, seed):
    """SIGKILL after random delays; whatever `exists` then names restores whole."""
    uri, rng = tmp_path / "c", random.Random(seed)
    ckptio.save(uri, {"w": np.full(2_000_000, 1.0), "step": 1})
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, uri],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            assert child.stdout.readline() == b"ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(rng.uniform(0.0, 0.25))
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.communicate()
        back = ckptio.restore(uri)
        assert (back["w"] == back["step"]).all()
    ckptio.save(uri, NEW, overwrite=True)
    ckptio.collect_garbage(uri, grace=0)
    assert len(names(uri)) == 2
    ckptio.open(uri).verify()
