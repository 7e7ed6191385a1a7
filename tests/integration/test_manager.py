"""A run as its training loop sees it: steps, what is kept, where it resumes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from math import inf, isnan, nan
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import ckptio
from ckptio import every, keep
from ckptio.manager import CheckpointManager


def state(step):
    return {"w": np.full(3, float(step)), "step": step}


def manager_of(place, **options):
    return CheckpointManager(place.uri, storage_options=place.storage_options, **options)


def train(place, to, **options):
    """Do updates up to `to`, resuming by itself; return which ones."""
    done = []
    with manager_of(place, **options) as manager:
        found, start = manager.restore_latest(like=state(0), default=(state(0), 0))
        assert found["step"] == start
        for step in range(start + 1, to + 1):
            done.append(step)
            manager.save(step, state(step), metrics={"loss": abs(step - 30) + 1})
    return done


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_run_resumes_after_its_newest_step_and_keeps_what_it_should(place):
    options = {"keep": keep.latest(2) | keep.best(1, "loss"), "every": every.steps(10)}
    assert train(place, 25, **options) == [*range(1, 26)]
    assert train(place, 65, **options) == [*range(21, 66)]
    with manager_of(place, **options) as manager:
        assert manager.steps() == [30, 50, 60]
        assert (manager.latest_step(), manager.best_step()) == (60, 30)
        assert manager.metrics(30) == {"loss": 1.0}
        found, step = manager.restore_best()
        assert (found["w"].tolist(), found["step"], step) == ([30.0] * 3, 30, 30)
        assert manager.restore(50)["step"] == 50
        assert manager.restore(50, only="w") == {"w": pytest.approx(np.full(3, 50.0))}
        manager.delete(60)
        assert manager.latest_step() == 50
        with pytest.raises(ckptio.NotFoundError):
            manager.delete(60)
        with pytest.raises(ckptio.NotFoundError):
            manager.restore(60)
        with pytest.raises(ckptio.NotFoundError, match="step 60"):
            manager.metrics(60)
    with ckptio.open_backend(place.uri, place.storage_options) as backend:
        assert {info.key.split("/")[0] for info in backend.list()} == {
            "step-00000030",
            "step-00000050",
        }


def test_a_run_without_a_step_gives_the_default_or_says_so(place):
    with manager_of(place) as manager:
        assert manager.restore_latest(default=("fresh", 0)) == ("fresh", 0)
        assert manager.restore_latest(default=None) is None
        assert (manager.steps(), manager.latest_step(), manager.best_step("loss")) == (
            [],
            None,
            None,
        )
        with pytest.raises(ckptio.NotFoundError, match="no committed step"):
            manager.restore_latest()
        with pytest.raises(ckptio.NotFoundError, match="no step"):
            manager.restore_best(metric="loss")


def test_save_asks_the_schedule_and_force_does_not(tmp_path):
    class Metric:
        def __float__(self):
            raise AssertionError("looked at, though the step is not saved")

    with CheckpointManager(tmp_path / "run", every=every.steps(10)) as manager:
        assert [step for step in range(25) if manager.should_save(step)] == [0, 10, 20]
        assert not manager.save(3, state(3), metrics={"loss": Metric()})
        assert manager.save(10, state(10), metrics={"loss": jnp.float32(0.5), "n": np.int64(3)})
        assert manager.save(13, state(13), force=True)
        manager.wait()
        assert manager.steps() == [10, 13]
        assert manager.metrics(10) == {"loss": 0.5, "n": 3.0}


def test_minutes_count_from_the_last_save(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("ckptio.manager.monotonic", lambda: now)
    with CheckpointManager(tmp_path / "run", every=every.minutes(1), async_=False) as manager:
        assert not manager.save(1, state(1))
        now += 61
        assert not manager.should_save(1), "the answer for a step does not change"
        assert manager.should_save(2)
        assert manager.save(2, state(2))
        assert not manager.save(3, state(3))
        assert manager.steps() == [2]


def test_a_blocking_manager_has_saved_when_save_returns(tmp_path):
    manager = CheckpointManager(tmp_path / "run", async_=False)
    manager.save(1, state(1))
    assert ckptio.exists(manager.step_uri(1))
    manager.close()


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    w = np.zeros(100_000)
    with CheckpointManager(tmp_path / "run") as manager:
        for step in range(5):
            w[:] = step
            manager.save(step, {"w": w})
        w[:] = -1
        manager.wait()
        for step in range(5):
            assert (manager.restore(step)["w"] == step).all()


def test_empty_and_foreign_directories_are_no_steps_and_are_left_alone(tmp_path):
    run = tmp_path / "run"
    foreign = [
        "step-00000007/",
        "step-00000008/notes.txt",
        "step-00000009",
        "step-99/manifest.json",
    ]
    foreign += ["best/manifest.json", "manifest.json", "step-00000010/data/x/y", "7/", "logs/1.txt"]
    for name in foreign:
        path = run / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    with CheckpointManager(run, keep=keep.latest(1)) as manager:
        assert (manager.steps(), manager.latest_step()) == ([], None)
        for step in (1, 2, 3):
            manager.save(step, state(step))
        manager.wait()
        assert (manager.steps()[-1], manager.latest_step()) == (3, 3)
    assert ckptio.exists(run / "step-00000003")
    assert not (run / "step-00000001").exists()
    assert not (run / "step-00000002").exists()
    assert all((run / name).exists() for name in foreign)


def test_torn_steps_are_skipped_and_the_log_says_so(tmp_path, caplog):
    run = tmp_path / "run"
    train_to(run, 2)
    for step, left in {3: "data/0123456789abcdef/p00000-000.safetensors", 5: "notes"}.items():
        path = run / f"step-{step:08d}" / left
        path.parent.mkdir(parents=True)
        path.write_bytes(b"torn")
    with CheckpointManager(run) as manager:
        with caplog.at_level(logging.WARNING, "ckptio"):
            found, step = manager.restore_latest(default=("fresh", 0))
        assert (found["step"], step) == (2, 2)
        skipped = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
        assert [text.partition(":")[0][-8:] for text in skipped] == ["00000005", "00000003"]
        manager.save(3, state(3))
        manager.wait()
        assert manager.latest_step() == 3, "the same step can be saved"


def train_to(run, last):
    with CheckpointManager(run) as manager:
        for step in range(1, last + 1):
            manager.save(step, state(step))


@pytest.mark.parametrize("damage", ["data", "manifest", "object"])
def test_a_damaged_newest_step_is_an_error_never_an_older_one_or_a_fresh_start(tmp_path, damage):
    run = tmp_path / "run"
    train_to(run, 2)
    newest = run / "step-00000002"
    (data,) = newest.rglob("*.safetensors")
    if damage == "data":
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
    elif damage == "manifest":
        (newest / "manifest.json").write_text("{}")
    else:
        data.unlink()
    with CheckpointManager(run) as manager:
        with pytest.raises((ckptio.CorruptionError, ckptio.NotFoundError)) as caught:
            manager.restore_latest(default=("fresh", 0))
        assert "step-00000002" in str(caught.value)
        assert manager.restore(1)["step"] == 1


def test_a_step_that_somebody_else_deleted_is_no_longer_one(tmp_path):
    run = tmp_path / "run"
    train_to(run, 3)
    with CheckpointManager(run) as manager:
        assert manager.steps() == [1, 2, 3]
        ckptio.delete(manager.step_uri(2))
        assert manager.steps() == [1, 3]
        (run / "step-00000003" / "notes.txt").write_text("so that the directory stays")
        ckptio.delete(manager.step_uri(3))
        assert manager.restore_latest()[1] == 1


def test_a_deleted_step_that_comes_back_torn_is_looked_up_again(tmp_path):
    run = tmp_path / "run"
    train_to(run, 2)
    with CheckpointManager(run) as manager:
        assert (manager.steps(), manager.metrics(2)) == ([1, 2], {})
        ckptio.delete(manager.step_uri(2))
        assert manager.steps() == [1]
        (run / "step-00000002" / "data").mkdir(parents=True)
        assert (manager.steps(), manager.latest_step()) == ([1], 1)
        with pytest.raises(ckptio.NotFoundError):
            manager.metrics(2)


def test_metrics_survive_whatever_they_are_beside_the_users_own_metadata(tmp_path):
    values = {"nan": nan, "inf": inf, "minus": -inf, "zero": -0.0, "third": 1 / 3, "tiny": 5e-324}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state(1), metrics=values, metadata={"author": "me"})
        manager.save(2, state(2))
    with CheckpointManager(tmp_path / "run") as manager:
        back = manager.metrics(1)
        assert isnan(back.pop("nan"))
        assert {name: str(v) for name, v in back.items()} == {
            name: str(v) for name, v in values.items() if name != "nan"
        }
        assert manager.metrics(2) == {}
        with ckptio.open(manager.step_uri(1)) as checkpoint:
            assert checkpoint.metadata["author"] == "me"
        for bad in [{"x": "high"}, {"x": None}, {"x": np.zeros(3)}, {1: 1.0}, {"x": 1j}]:
            with pytest.raises(ckptio.InvalidOptionError, match="no number"):
                manager.save(3, state(3), metrics=bad)
        with pytest.raises(ckptio.InvalidOptionError, match=r"ckptio\.manager"):
            manager.save(3, state(3), metadata={"ckptio.manager": 1})
        assert manager.steps() == [1, 2]


def test_checkpoints_saved_without_the_manager_are_steps_too(tmp_path):
    ckptio.save(tmp_path / "run" / "step-00000004", state(4))
    ckptio.save(tmp_path / "run" / "step-00000005", state(5), metadata={"ckptio.manager": "mine"})
    with CheckpointManager(tmp_path / "run", keep=keep.best(1, "loss")) as manager:
        assert manager.restore_latest()[1] == 5
        assert (manager.metrics(4), manager.metrics(5)) == ({}, {})
        assert manager.best_step() is None


def test_the_best_step_is_by_the_metric_asked_for_or_that_of_keep(tmp_path):
    with CheckpointManager(tmp_path / "run", keep=keep.best(9, "accuracy", mode="max")) as manager:
        for step, (accuracy, loss) in enumerate([(0.5, 3.0), (0.9, nan), (0.7, 1.0)]):
            manager.save(step, state(step), metrics={"accuracy": accuracy, "loss": loss})
        manager.wait()
        assert manager.best_step() == 1
        assert manager.best_step(mode="min") == 0
        assert manager.best_step("loss") == 2
        assert manager.best_step("loss", "max") == 0
        assert manager.restore_best(metric="loss")[1] == 2
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(ckptio.InvalidOptionError, match="which metric"):
            manager.best_step()
        with pytest.raises(ckptio.InvalidOptionError, match="mode"):
            manager.best_step("loss", "least")


def test_a_committed_step_is_saved_again_only_by_force(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state(1), metrics={"loss": 1})
        with pytest.raises(ckptio.AlreadyExistsError, match="step-00000001"):
            manager.save(1, state(1))
        assert manager.metrics(1) == {"loss": 1.0}
        manager.save(1, {"w": np.zeros(1)}, metrics={"loss": 2}, force=True)
        manager.wait()
        assert manager.restore(1)["w"].shape == (1,)
        assert manager.metrics(1) == {"loss": 2.0}


def test_neither_the_newest_step_nor_the_one_saved_last_is_deleted(tmp_path):
    with CheckpointManager(tmp_path / "run", keep=keep.only(lambda _: False)) as manager:
        for step in (10, 20, 30):
            manager.save(step, state(step))
        manager.restore(30)
        manager.save(15, state(15))  # went back to an older state
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == [15, 30]


def test_without_a_policy_nothing_is_deleted(tmp_path):
    train_to(tmp_path / "run", 6)
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == [1, 2, 3, 4, 5, 6]


def test_a_run_is_where_it_was_when_the_manager_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manager = CheckpointManager(Path("run"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    manager.save(1, state(1))
    manager.close()
    assert ckptio.exists(tmp_path / "run" / "step-00000001")
    assert os.listdir() == []
    with CheckpointManager(f"file://{tmp_path}/run/") as same:
        assert same.steps() == [1]


def test_names_of_steps_are_configurable(tmp_path):
    with CheckpointManager(tmp_path / "run", step_format="{step}", keep=keep.latest(1)) as manager:
        for step in (1, 2, 30):
            manager.save(step, state(step))
    assert names(tmp_path / "run") == ["30"]
    with CheckpointManager(tmp_path / "run") as other:
        assert other.steps() == []
    with pytest.raises(ckptio.InvalidOptionError, match="step_format"):
        CheckpointManager(tmp_path / "run", step_format="step")


def test_what_cannot_be_saved_is_said_at_once_and_costs_nothing(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(ckptio.UnsupportedLeafError, match="'f'"):
            manager.save(1, {"f": print})
        for bad in (-1, 1.5, "1"):
            with pytest.raises(ckptio.InvalidOptionError, match="a step is"):
                manager.save(bad, state(1))
        assert manager.save(1, state(1))


def test_a_closed_manager_says_so_and_closes_twice(tmp_path):
    manager = CheckpointManager(tmp_path / "run")
    manager.close()
    manager.close()
    with pytest.raises(ckptio.CkptioError, match="closed"):
        manager.save(1, state(1))
    with pytest.raises(ckptio.CkptioError, match="closed"):
        manager.latest_step()


@pytest.mark.parametrize("wrong", [{"keep": 3}, {"every": 10}, {"keep": keep}, {"every": every}])
def test_what_is_no_policy_and_no_schedule_is_refused_at_once(tmp_path, wrong):
    with pytest.raises(ckptio.InvalidOptionError, match="policy"):
        CheckpointManager(tmp_path / "run", **wrong)


def test_many_saves_leave_threads_and_files_as_they_were(tmp_path):
    def resources():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with CheckpointManager(tmp_path / "warm") as manager:
        manager.save(1, state(1))
    before = resources()
    with CheckpointManager(tmp_path / "run", keep=keep.latest(2)) as manager:
        for step in range(50):
            manager.save(step, state(step))
        manager.wait()
        manager._housekeeping.wait()
        assert threading.active_count() <= before[0] + 2
    assert resources() == before
    assert len(names(tmp_path / "run")) == 2


def test_a_run_of_numpy_alone_needs_no_jax(tmp_path):
    code = """
import sys, numpy as np
from ckptio import keep
from ckptio.manager import CheckpointManager
with CheckpointManager(sys.argv[1], keep=keep.best(1, "loss")) as manager:
    manager.save(1, {"w": np.ones(3)}, metrics={"loss": 1.0})
    print(manager.restore_latest()[0]["w"].sum(), manager.best_step(), "jax" in sys.modules)
"""
    out = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "run"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    assert out == "3.0 1 False\n"
