"""Several real processes save together and restore apart."""

from __future__ import annotations

import re
import signal
from uuid import uuid4

import numpy as np
import processes
import pytest
import scenarios
from places import Place

import ckptio
from ckptio.manifest import BLOCK

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


@pytest.mark.parametrize(("count", "verify"), [(2, True), (2, False), (4, False)])
def test_what_several_processes_need_is_read_once_and_exchanged(tmp_path, count, verify):
    check_shared_reads(Place(str(tmp_path / "c")), count, verify)


def test_reads_are_shared_on_an_object_store_too(s3_store):
    check_shared_reads(s3_store.place(uuid4().hex), 2, verify=False)


def check_shared_reads(place, count, verify):
    values = scenarios.shared_values()
    ckptio.save(**place.to, tree=values)
    found = results(processes.run("restore_sharing", count, verify=verify, **place.to))
    # The odd one cannot be divided, and the small one is not worth it.
    alone = values["odd"].nbytes + values["small"].nbytes
    shared = sum(value.nbytes for value in values.values()) - alone
    with ckptio.open_backend(place.uri, place.storage_options) as backend:
        gap = backend.limits.read_gap
    # What is verified is read in whole blocks, so at either end of a part there may be one more;
    # and small gaps between two rows' parts are read rather than skipped.
    more = (2 * BLOCK if verify else gap) * len(values)
    for each in found:
        assert alone <= each["read"] <= alone + shared / count + more
    if gap < BLOCK and not verify:
        assert sum(each["read"] for each in found) < count * alone + shared + count * more


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "process 1 failed: CorruptionError"),
        ("kill", "process 1 did not finish"),
        ("other", "process 1 restores replicated float32 from .* all must restore the same"),
    ],
)
def test_a_failure_while_sharing_reads_reaches_every_process(tmp_path, how, message):
    ckptio.save(tmp_path / "c", scenarios.shared_values())
    outcomes = processes.run(
        "restore_sharing", 2, uri=str(tmp_path / "c"), who=1, how=how, deadline=6
    )
    assert re.search(message, outcomes[0].result["message"]), outcomes[0]
    if how == "kill":
        assert outcomes[1].code == -signal.SIGKILL
    else:
        assert outcomes[1].result["error"] in ("CorruptionError", "MismatchError")


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
