"""A process fails, dies or stalls in a phase of a save: the others hear of it, by name, in time."""

from __future__ import annotations

import processes
import pytest

import ckptio

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PHASES = {
    "prepare": ("head", "manifest.json", 0),  # only process 0 looks what is there
    "prepare, elsewhere": ("head", "leaves.json", 1),
    "write": ("put", ".safetensors", 1),
    "write, in process 0": ("put", ".safetensors", 0),
    "part": ("put", "p00001.json", 1),
    "publish": ("put", "manifest.json", 0),
}


@pytest.fixture
def uri(tmp_path):
    """Where an older checkpoint is."""
    uri = str(tmp_path / "c")
    assert all(o.code == 0 for o in processes.run("save", 2, uri=uri))
    return uri


def assert_old_checkpoint(uri):
    assert ckptio.restore(uri, only="step") == {"step": 1}
    with ckptio.open(uri) as checkpoint:
        checkpoint.verify()


@pytest.mark.parametrize("phase", PHASES)
def test_an_error_reaches_everyone_and_the_next_save_works(uri, phase):
    method, key, who = PHASES[phase]
    outcomes = processes.run(
        "fail_then_save", 3, uri=uri, who=who, how="raise", method=method, key=key
    )
    for index, outcome in enumerate(outcomes):
        assert outcome.code == 0, outcome
        first = outcome.result["first"]
        assert "no space left, says the test" in first
        assert key in first
        if index != who:
            assert f"process {who} failed" in first
        assert outcome.result["then"]["leaves"] == 7
    assert ckptio.restore(uri, only="step") == {"step": 3}


@pytest.mark.parametrize("phase", ["prepare, elsewhere", "write", "part"])
def test_a_killed_process_is_named_within_the_deadline(uri, phase):
    method, key, who = PHASES[phase]
    outcomes = processes.run(
        "fail", 3, uri=uri, who=who, how="kill", method=method, key=key, deadline=12
    )
    assert outcomes[who].code == -9
    for index in {0, 1, 2} - {who}:
        assert outcomes[index].result["error"] in ("DeadlineExceededError", "ProcessFailedError")
        assert f"process {who} " in outcomes[index].result["message"]
    assert_old_checkpoint(uri)
    assert all(o.code == 0 for o in processes.run("save", 2, uri=uri, step=5, overwrite=True))
    assert ckptio.restore(uri, only="step") == {"step": 5}


@pytest.mark.parametrize("phase", ["prepare, elsewhere", "write", "part"])
def test_a_stalled_process_is_named_when_the_deadline_passes(uri, phase):
    method, key, who = PHASES[phase]
    outcomes = processes.run(
        "fail", 3, stalled=who, uri=uri, who=who, how="stall", method=method, key=key, deadline=8
    )
    for index, outcome in enumerate(outcomes):
        if outcome.result is None and index == who:
            continue  # it was killed, still waiting
        assert outcome.result["error"] == "DeadlineExceededError", outcome
        if index != who:
            assert f"process {who}" in outcome.result["message"]
    assert_old_checkpoint(uri)


@pytest.mark.parametrize("phase", ["prepare", "write, in process 0", "publish"])
def test_when_process_0_dies_storage_is_whole(uri, phase):
    method, key, who = PHASES[phase]
    processes.run("fail", 3, uri=uri, who=who, how="kill", method=method, key=key, deadline=12)
    assert_old_checkpoint(uri)
    assert all(o.code == 0 for o in processes.run("save", 2, uri=uri, step=5, overwrite=True))
    assert ckptio.restore(uri, only="step") == {"step": 5}
