"""The training example: killed and resumed, it ends where an unbroken run does, bit for bit."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import jax
import numpy as np
import pytest
from places import Place

import ckptio
from ckptio.manager import CheckpointManager

ROOT = Path(__file__).parents[2]
STEPS, EVERY, KILLS = 300, 5, 10
STEP = re.compile(r"step +(\d+) +loss ([\d.]+)")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    shutil.copy(ROOT / "README.md", folder)
    return folder


@contextmanager
def training(place, text, steps=STEPS):
    """Run the example with a small model."""
    arguments = {"steps": steps, "every": EVERY, "width": 16, "layers": 1, "text": text}
    arguments["storage-options"] = json.dumps(place.storage_options)
    options = [f"--{name}={value}" for name, value in arguments.items()]
    with subprocess.Popen(
        [sys.executable, ROOT / "examples" / "train.py", place.uri, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(place, text, steps=STEPS):
    """Train to the end; return what it printed."""
    with training(place, text, steps) as process:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
    return out


def losses(text):
    return {int(step): loss for step, loss in STEP.findall(text)}


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    """What an unbroken run prints, and its last checkpoint."""
    place = Place(str(tmp_path_factory.mktemp("unbroken") / "run"))
    out = finish(place, text)
    assert [*losses(out)] == [*range(1, STEPS + 1)]
    return out, ckptio.restore(f"{place.uri}/step-{STEPS:08d}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("store", ["local", "s3"])
def test_ten_kills_change_no_bit_of_the_loss_curve_and_the_parameters(
    store, request, tmp_path, text, unbroken
):
    place = (
        Place(str(tmp_path / "run"))
        if store == "local"
        else request.getfixturevalue(f"{store}_store").place(uuid4().hex)
    )
    wanted, rng, resumed = losses(unbroken[0]), random.Random(store), []
    for kill in range(KILLS):
        with training(place, text) as process:
            # A few steps, and a moment; the first one or two may die before anything is saved.
            for _ in range(rng.randint(0, 4) + 3 * EVERY * (kill > 1)):
                line = process.stdout.readline()
                assert line, process.stderr.read()
                if found := STEP.match(line):
                    assert found[2] == wanted[int(found[1])]
                elif "resumed" in line:
                    resumed.append(int(line.split()[-1]))
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            process.wait(30)
    out = finish(place, text)
    curve = losses(out)
    assert 1 < len(curve) < STEPS, "it resumed"
    assert all(wanted[step] == loss for step, loss in curve.items())
    assert resumed == sorted(resumed)
    assert len({*resumed}) > 3, resumed
    assert out.splitlines()[-1] == unbroken[0].splitlines()[-1], "the fingerprint"

    with CheckpointManager(place.uri, storage_options=place.storage_options) as manager:
        back, step = manager.restore_latest()
        assert step == STEPS
        assert 3 <= len(manager.steps()) <= 4
        for number in manager.steps():
            with ckptio.open(
                manager.step_uri(number), storage_options=place.storage_options
            ) as checkpoint:
                checkpoint.verify()
    assert identical(back, unbroken[1])


def test_sigterm_saves_at_once_and_the_next_run_goes_on_from_there(tmp_path, text, unbroken):
    place = Place(str(tmp_path / "run"))
    with training(place, text) as process:
        while (found := STEP.match(process.stdout.readline())) is None or int(found[1]) < 7:
            pass
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM, err
    last = max(losses(out) or {int(found[1]): ""})
    assert last < STEPS
    with CheckpointManager(place.uri) as manager:
        assert manager.latest_step() == last, "not at the next multiple"
    out = finish(place, text)
    assert f"resumed after step {last}\n" in out
    assert out.splitlines()[-1] == unbroken[0].splitlines()[-1]


def identical(one, other):
    """Whether two trees have the same structure, and the same bits at each leaf."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False

    def bits(leaf):
        key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        leaf = np.asarray(jax.random.key_data(leaf) if key else leaf)
        return leaf.dtype, leaf.shape, leaf.tobytes()

    return all(
        a == b if isinstance(a, int | str) else bits(a) == bits(b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )
