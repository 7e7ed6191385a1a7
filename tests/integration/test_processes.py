"""Several real processes save together and restore apart."""

from __future__ import annotations

from uuid import uuid4

import numpy as np
import processes
import pytest
import scenarios
from places import Place

import ckptio

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=["local", "s3"])
def shared(request, tmp_path):
    """A place that all processes see."""
    if request.param == "local":
        return Place(str(tmp_path / "run"))
    return request.getfixturevalue("s3_store").place(uuid4().hex)


def results(outcomes):
    assert [o.code for o in outcomes] == [0] * len(outcomes), outcomes
    for outcome in outcomes:
        assert "error" not in outcome.result, outcome.result
    return [outcome.result for outcome in outcomes]


@pytest.mark.parametrize("count", [2, 4])
def test_saved_by_some_processes_restored_by_any_number(shared, count):
    values = sum(v.nbytes for v in scenarios.host_values().values())
    reports = results(processes.run("save", count, **shared.to))
    assert all(report == reports[0] for report in reports), "all learn the same outcome"
    assert reports[0]["objects"] == count
    assert values < reports[0]["bytes"] < 1.01 * values + 50_000, "replicas are written once"
    with ckptio.open(**shared.to) as checkpoint:
        checkpoint.verify()
    with ckptio.open_backend(shared.uri, shared.storage_options) as backend:
        assert [info.key for info in backend.list("parts")] == []
    # In this process, without devices of theirs.
    back = ckptio.restore(**shared.to)
    assert np.array_equal(back["rows"], np.arange(384 * 1024, dtype=np.float32).reshape(384, 1024))
    assert (back["step"], back["name"], back["host"].tolist()) == (1, "run", [1] * 7)
    for readers in {1, 2, 4} - {count}:
        for found in results(processes.run("restore", readers, **shared.to)):
            assert found["same"]
            assert found["host"] == [1] * 7


def test_each_process_reads_only_its_own_boxes(tmp_path):
    results(processes.run("save", 4, uri=str(tmp_path / "c")))
    found = results(processes.run("restore", 4, uri=str(tmp_path / "c"), verify=False))
    values = scenarios.host_values()
    own = sum(v.nbytes for name, v in values.items() if name != "replicated") // 4
    wanted = own + values["replicated"].nbytes
    for each in found:
        # And what lies between two wanted ranges, where reading it is cheaper than skipping.
        assert wanted <= each["read"] < wanted + 3 * (64 << 10)


def test_background_saves_and_many_of_them(shared):
    for found in results(processes.run("save_and_restore", 2, **shared.to)):
        assert found["same"]
        assert found["step"] == 3


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("different_trees", "process 1 brought another tree"),
        ("unsupported", "object"),
        ("unshared", "does not see what process 0 wrote"),
    ],
)
def test_processes_that_disagree_are_told_at_once(tmp_path, scenario, message):
    outcomes = processes.run(scenario, 2, uri=str(tmp_path / "c"))
    for outcome in outcomes:
        assert outcome.result["error"] in ("ProcessFailedError", "UnsupportedLeafError"), outcome
        assert message in outcome.result["message"]
    assert "process 1" in outcomes[0].result["message"]
    assert not ckptio.exists(tmp_path / "c")


def test_an_existing_checkpoint_is_refused_in_every_process(tmp_path):
    results(processes.run("save", 2, uri=str(tmp_path / "c")))
    for outcome in processes.run("save", 2, uri=str(tmp_path / "c"), step=2):
        assert outcome.result["error"] == "AlreadyExistsError"
    results(processes.run("save", 2, uri=str(tmp_path / "c"), step=2, overwrite=True))
    assert ckptio.restore(tmp_path / "c", only="step") == {"step": 2}
