"""SIGKILL at each operation of a save, and at random moments: nothing torn is ever visible."""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from places import SERVED, Place

import ckptio

KILLS = {"local": 200}  # elsewhere 50


@contextmanager
def saver(place):
    """Yield a function that tells the program a line, and returns its answer."""
    program = [sys.executable, str(Path(__file__).with_name("keep_saving.py"))]
    with subprocess.Popen(
        [*program, json.dumps(place.to)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def start(line):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        try:
            yield start
        finally:
            process.kill()


def ended(child, seconds):
    """Whether a process ended within the time; its parent need not be this one."""
    # A pidfd is ready when the process ends: this waits, and notices.
    try:
        handle = os.pidfd_open(child)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def restored(place):
    """Return the step of the checkpoint that is there, which is whole; 0 if there is none."""
    if not ckptio.exists(**place.to):
        return 0
    back = ckptio.restore(**place.to)
    assert (back["w"] == back["step"]).all()
    return back["step"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("store", ["local", *SERVED])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(store, request, tmp_path):
    place = (
        Place(str(tmp_path / "c"))
        if store == "local"
        else request.getfixturevalue(f"{store}_store").place(uuid4().hex)
    )
    rng = random.Random(store)
    last, commits = 0, 0
    with saver(place) as start:
        for _ in range(KILLS.get(store, 50)):
            child = start(last + 1)
            assert not ended(child, rng.uniform(0.0, 0.5)), "the child failed by itself"
            os.kill(child, signal.SIGKILL)
            assert ended(child, 30)
            step = restored(place)
            assert step >= last, "the old checkpoint, or the new one"
            commits += step > last
            last = step
    assert commits > 0
    ckptio.save(**place.to, tree={"step": last + 1}, overwrite=True)
    assert ckptio.restore(**place.to) == {"step": last + 1}
    ckptio.collect_garbage(**place.to, grace=0)
    with ckptio.open_backend(place.uri, place.storage_options) as backend:
        assert len([*backend.list()]) == 2, "what the killed ones left is collected"
    with ckptio.open(**place.to) as checkpoint:
        checkpoint.verify()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_at_each_operation_of_a_save_leaves_a_whole_checkpoint(tmp_path, moment, overwrite):
    place = Place(str(tmp_path / "c"))
    with saver(place) as start:
        for operation in itertools.count():
            if not overwrite and ckptio.exists(**place.to):
                ckptio.delete(**place.to)
            old, new = restored(place), operation + 2
            status = start(f"{new} {moment} {operation}")
            found = restored(place)
            if status == 0:
                break  # every operation had its turn
            assert status == -signal.SIGKILL
            assert found in (old, new), "the old checkpoint, or the new one"
            ckptio.collect_garbage(**place.to, grace=0)
            assert restored(place) == found
    assert found == new
    assert operation >= 7
