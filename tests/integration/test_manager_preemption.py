"""SIGTERM: save at once, and leave; what was there before is put back, and heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

import ckptio
from ckptio import every
from ckptio.manager import CheckpointManager


@pytest.fixture(autouse=True)
def handler():
    """A handler that notes what it hears; it is there again afterwards."""
    heard = []

    def note(number, frame):
        heard.append(number)

    before = signal.signal(signal.SIGTERM, note)
    yield heard
    assert signal.getsignal(signal.SIGTERM) is note
    signal.signal(signal.SIGTERM, before)


def preempt():
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_next_step_is_saved_whatever_the_schedule_says_and_save_leaves(tmp_path, handler):
    done = []
    with pytest.raises(SystemExit) as caught:  # noqa: PT012, SIM117  # the loop is the point
        with CheckpointManager(
            tmp_path / "run", every=every.steps(100), preemption=True
        ) as manager:
            for step in range(1, 50):
                done.append(step)
                if step == 7:
                    preempt()
                assert manager.should_save(step) == (step >= 7)
                manager.save(step, {"step": step})
    assert caught.value.code == 128 + signal.SIGTERM
    assert done == [*range(1, 8)]
    assert handler == [signal.SIGTERM]
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore_latest() == ({"step": 7}, 7)


def test_a_step_that_exists_already_is_left_at(tmp_path):
    manager = CheckpointManager(tmp_path / "run", preemption=True)
    manager.save(1, {"step": 1})
    preempt()
    with pytest.raises(SystemExit):
        manager.save(1, {"step": 1})
    manager.close()
    assert ckptio.restore(manager.step_uri(1)) == {"step": 1}


def test_an_earlier_failure_keeps_no_step_from_being_saved(tmp_path, caplog):
    (tmp_path / "run" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "step-00000001" / "data").write_text("where a directory is wanted")
    manager = CheckpointManager(tmp_path / "run", preemption=True)
    manager.save(1, {"step": 1})
    preempt()
    with pytest.raises(SystemExit):
        manager.save(2, {"step": 2})
    manager.close()
    assert ckptio.restore(tmp_path / "run" / "step-00000002") == {"step": 2}
    assert "step-00000001" in caplog.text


def test_without_being_asked_no_handler_is_touched(tmp_path, handler):
    installed = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path / "run", every=every.steps(10)) as manager:
        assert signal.getsignal(signal.SIGTERM) is installed
        preempt()
        assert not manager.save(1, {"step": 1})
    assert handler == [signal.SIGTERM]


def test_a_handler_needs_the_main_thread(tmp_path):
    errors = []

    def make():
        try:
            CheckpointManager(tmp_path / "run", preemption=True)
        except ckptio.InvalidOptionError as error:
            errors.append(str(error))
        CheckpointManager(tmp_path / "run").close()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(60)
    assert len(errors) == 1
    assert "main thread" in errors[0]


UNHEARD = """
import os, signal, sys, ckptio
from ckptio.manager import CheckpointManager
with CheckpointManager(sys.argv[1], preemption=True) as manager:
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
    if len(sys.argv) > 2:
        raise KeyError("this is what ended the training")
print("never reached")
"""


def test_a_notice_that_no_save_acted_on_ends_the_process_after_all(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", UNHEARD, tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "still here\n")


def test_an_error_on_its_way_is_not_silenced_by_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", UNHEARD, tmp_path / "run", "fail"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "still here\n")
    assert "KeyError: 'this is what ended the training'" in done.stderr
