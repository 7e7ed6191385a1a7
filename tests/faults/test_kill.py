"""SIGKILL at random moments of a save, on every store: nothing torn is ever visible."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from places import SERVED, Place

import ckptio

KILLS = {"local": 200}  # elsewhere 50


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
    program = [sys.executable, str(Path(__file__).with_name("keep_saving.py"))]
    with subprocess.Popen(
        [*program, json.dumps(place.to)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as saver:
        try:
            for _ in range(KILLS.get(store, 50)):
                saver.stdin.write(f"{last + 1}\n")
                saver.stdin.flush()
                child = int(saver.stdout.readline())
                # A pidfd is ready when the child ends, which it does not: this waits, and notices.
                handle = os.pidfd_open(child)
                ended = select.select([handle], [], [], rng.uniform(0.0, 0.5))[0]
                assert not ended, "the child failed by itself"
                os.kill(child, signal.SIGKILL)
                assert select.select([handle], [], [], 30)[0]
                os.close(handle)
                if last or ckptio.exists(**place.to):
                    back = ckptio.restore(**place.to)
                    assert (back["w"] == back["step"]).all()
                    assert back["step"] >= last, "the old checkpoint, or the new one"
                    commits += back["step"] > last
                    last = back["step"]
        finally:
            saver.kill()
    assert commits > 0
    ckptio.save(**place.to, tree={"step": last + 1}, overwrite=True)
    assert ckptio.restore(**place.to) == {"step": last + 1}
    ckptio.collect_garbage(**place.to, grace=0)
    with ckptio.open_backend(place.uri, place.storage_options) as backend:
        assert len([*backend.list()]) == 2, "what the killed ones left is collected"
    with ckptio.open(**place.to) as checkpoint:
        checkpoint.verify()
