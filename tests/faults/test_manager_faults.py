"""A run whose store fails, stalls or is huge: no error is lost, nothing delays the training."""

from __future__ import annotations

import os
import threading
import time
from math import ceil

import numpy as np
import pytest

import ckptio
from ckptio import every, keep, memory
from ckptio.backend import ObjectInfo
from ckptio.manager import CheckpointManager
from ckptio.testing import FaultyBackend


class Inject:
    """Wraps backends in a `FaultyBackend` with a script; a call's key is its whole URI here."""

    def __init__(self, script=None):
        self.script, self.opened = script, []

    @ckptio.hookimpl
    def ckptio_wrap_backend(self, backend):
        def before(call):
            if self.script:
                self.script(call.method, f"{backend.uri}/{call.key}")

        self.opened.append(FaultyBackend(backend, before))
        return self.opened[-1]

    def calls(self, *methods):
        return [
            (call.method, f"{backend.uri}/{call.key}")
            for backend in self.opened
            for call in backend.calls
            if not methods or call.method in methods
        ]

    def __enter__(self):
        ckptio.plugin_manager().register(self)
        return self

    def __exit__(self, *_):
        ckptio.plugin_manager().unregister(self)


class BoomError(Exception):
    """An error that no retry is for."""


def state(step):
    return {"w": np.full(3, float(step)), "step": step}


def refuse(*steps):
    """A script under which these steps cannot be committed."""
    left = {f"step-{step:08d}/manifest.json" for step in steps}

    def script(method, uri):
        if method == "put" and (name := "/".join(uri.split("/")[-2:])) in left:
            left.remove(name)
            raise BoomError(name)

    return script


def surface(manager, by):
    """Do what should raise the error of the save before."""
    if by == "skipped save":
        manager._pending[1].exception()  # so that it is known to have failed
        assert not manager.should_save(4)
        manager.save(4, state(4))
    elif by == "save":
        manager.save(3, state(3))
    else:
        getattr(manager, by)()


@pytest.mark.parametrize("by", ["save", "skipped save", "wait", "close"])
def test_a_failed_background_save_surfaces_once_and_can_be_repeated(tmp_path, by):
    schedule = every.steps([1, 2, 3])
    with Inject(refuse(2)):
        manager = CheckpointManager(tmp_path / "run", every=schedule)
        manager.save(1, state(1))
        manager.save(2, state(2))
        with pytest.raises(BoomError, match="step-00000002") as caught:
            surface(manager, by)
        assert any("step 2 of" in note for note in caught.value.__notes__)
        if by == "close":
            manager.close()
            manager = CheckpointManager(tmp_path / "run", every=schedule)
        manager.wait()
        assert (manager.latest_step(), manager.steps()) == (1, [1])
        assert manager.restore_latest()[1] == 1
        manager.save(2, state(2))
        manager.close()
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore_latest()[0]["step"] == 2


def test_a_restore_tells_nothing_of_a_failed_save_and_loses_it_not(tmp_path):
    with Inject(refuse(2)):
        manager = CheckpointManager(tmp_path / "run")
        manager.save(1, state(1))
        manager.save(2, state(2))
        assert manager.restore_latest()[1] == 1
        with pytest.raises(BoomError):
            manager.close()


def train_and_fail(run):
    with CheckpointManager(run) as manager:
        manager.save(1, state(1))
        raise ZeroDivisionError


def test_the_end_of_a_training_takes_a_failed_save_along(tmp_path, caplog):
    with Inject(refuse(1)), pytest.raises(ZeroDivisionError) as caught:
        train_and_fail(tmp_path / "run")
    assert "BoomError: step-00000001/manifest.json" in caught.value.__notes__[0]
    assert any(record.exc_info and record.exc_info[0] is BoomError for record in caplog.records)


def test_a_failed_save_deletes_nothing(tmp_path):
    with Inject(refuse(2)), CheckpointManager(tmp_path / "run", keep=keep.latest(1)) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        with pytest.raises(BoomError):
            manager.wait()
        assert manager.restore_latest()[1] == 1


@pytest.mark.parametrize("first", ["manifest.json", "data/"])
def test_a_failed_deletion_is_logged_and_tried_again_and_never_fails_the_training(
    tmp_path, caplog, first
):
    run, failed = tmp_path / "run", []

    def script(method, uri):
        if method == "delete" and f"step-00000001/{first}" in uri and not failed:
            failed.append(uri)
            raise BoomError(uri)

    with Inject(script), CheckpointManager(run, keep=keep.latest(1)) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        manager.wait()
        manager._housekeeping.wait()
        assert failed
        assert "step-00000001 could not be deleted" in caplog.text
        assert (run / "step-00000001").exists()
        assert manager.steps() == ([1, 2] if first == "manifest.json" else [2])
        manager.save(3, state(3))
    assert sorted(path.name for path in run.iterdir()) == ["step-00000003"]


def test_deleting_a_thousand_objects_on_a_stalled_store_delays_no_save():
    """The store answers no deletion at all until three more steps are saved and read."""
    uri = "memory://faults/slow"
    released = threading.Event()

    def script(method, uri):
        if method == "delete":
            assert released.wait(60)

    large = {f"leaf{i}": np.full(8, i) for i in range(1000)}
    options = ckptio.SaveOptions(object_size=1)
    with Inject(script) as inject:
        manager = CheckpointManager(
            uri, keep=keep.latest(1), options=options, collect_garbage=False
        )
        try:
            manager.save(1, large)
            manager.wait()
            with ckptio.open_backend(manager.step_uri(1)) as backend:
                assert sum(1 for _ in backend.list()) == 1001
            for step in (2, 3, 4):
                manager.save(step, state(step))
                manager.wait()
                assert manager.restore_latest()[1] == step
            assert manager.steps() == [1, 2, 3, 4]
            assert len(inject.calls("delete")) == 1, "one deletion waits"
        finally:
            released.set()
            manager.close()
    with CheckpointManager(uri) as manager:
        assert manager.steps() == [4]


def test_facts_that_cannot_be_read_keep_their_step(tmp_path, caplog):
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), metrics={"loss": step})
    (run / "step-00000002" / "manifest.json").write_text("{}")
    with CheckpointManager(run, keep=keep.best(1, "loss")) as manager:
        manager.save(4, state(4), metrics={"loss": 4})
        manager.wait()
        manager._housekeeping.wait()
        assert manager.steps() == [1, 2, 4]
        assert manager.best_step() == 1
    assert "step 2" in caplog.text


def test_a_policy_that_fails_deletes_nothing_and_fails_no_training(tmp_path, caplog):
    policy = keep.only(lambda saved: saved.metrics["loss"] < 1)
    with CheckpointManager(tmp_path / "run", keep=policy) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == [1, 2, 3]
    assert "were left alone" in caplog.text


def test_garbage_of_the_run_is_collected_at_the_start(tmp_path):
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        manager.save(1, state(1))
    old, young = (
        run / f"step-0000000{step}" / "data" / "0123456789abcdef" / "p00000-000.safetensors"
        for step in (2, 3)
    )
    for path in (old, young):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"torn")
    os.utime(old, (0, time.time() - 25 * 3600))
    with CheckpointManager(run, collect_garbage=False):
        pass
    assert old.exists()
    with CheckpointManager(run) as manager:
        pass
    assert not old.exists()
    assert young.exists(), "its attempt may be at work"
    assert ckptio.exists(run / "step-00000001")


def test_garbage_that_cannot_be_collected_is_logged(tmp_path, caplog):
    def script(method, uri):
        if method == "list":
            raise BoomError

    with Inject(script), CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state(1))
    assert "was not collected" in caplog.text


STEPS, OBJECTS = 10_000, 100


@pytest.fixture
def huge():
    """A run of 10,000 committed steps among a million objects."""
    root = "faults/huge"
    manifest = b"{}"
    info = ObjectInfo("", len(manifest), "1", time.time())
    found = {}
    for step in range(STEPS):
        directory = f"{root}/step-{step:08d}"
        for number in range(OBJECTS - 1):
            found[f"{directory}/data/0123456789abcdef/p{number:05d}-000.safetensors"] = (b"", info)
        found[f"{directory}/manifest.json"] = (manifest, info)
    # Three newer ones are torn, and what is foreign is not looked at.
    for name in ["step-00010000", "step-00010001", "step-00010002", "step-7", "other"]:
        found[f"{root}/{name}/data/x"] = (b"", info)
    memory._objects.update(found)
    yield f"memory://{root}"
    for path in found:
        memory._objects.pop(path, None)


def test_looking_at_ten_thousand_steps_costs_one_listing_and_few_look_ups(huge):
    assert sum(path.startswith("faults/huge/") for path in memory._objects) > 1_000_000
    most, now, lock = 0, 0, threading.Lock()

    def script(method, uri):
        nonlocal most, now
        if method == "head":
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.0005)  # the store's latency
            with lock:
                now -= 1

    with Inject(script) as inject:
        with CheckpointManager(huge, collect_garbage=False, keep=keep.latest(20_000)) as manager:
            assert manager.latest_step() == STEPS - 1
            assert inject.calls("list", "read_into") == []
            assert len(inject.calls("list_children")) == 1
            heads = [uri.removeprefix(huge) for _, uri in inject.calls("head")]
            assert heads == [
                f"/step-{step:08d}/manifest.json" for step in range(STEPS + 2, STEPS - 2, -1)
            ]

            assert manager.steps() == [*range(STEPS)]
            assert len(inject.calls("list_children")) == 2
            looked_up = [uri for _, uri in inject.calls("head")]
            assert len(looked_up) == 4 + STEPS - 1 + 3, "each once; those not committed again"
            assert len({*looked_up}) == STEPS + 3
            assert most > 1, "in parallel"

            before = len(looked_up)
            assert manager.steps() == [*range(STEPS)]
            assert manager.latest_step() == STEPS - 1
            assert len(inject.calls("head")) - before == 3 + 3, "never again for one known"

            manager.save(STEPS + 10, state(1))
            manager.wait()
            manager._housekeeping.wait()
            before = len(inject.calls("head"))
            assert manager.latest_step() == STEPS + 10
            assert len(inject.calls("head")) == before
        assert inject.calls("list", "delete") == []
        # FaultyBackend counts a listing as one call: its pages are the store's affair.
        assert ceil((STEPS + 5) / 1000) == 11
