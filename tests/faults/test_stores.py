"""A store that fails, stalls or loses answers: a save and a restore get through, or say why."""

from __future__ import annotations

import itertools
import logging
import socket
from uuid import uuid4

import numpy as np
import pytest
from places import SERVED
from servers import proxy as faults
from servers.proxy import fault_proxy

import ckptio
from ckptio.operation import Operation
from ckptio.retry import RetryingBackend

MIB = 1 << 20
TREE = {"w": np.arange(6_000_000, dtype=np.float32), "step": 3}  # 24 MB
OPTIONS = ckptio.SaveOptions(part_size=1, object_size=16 << 20)


@pytest.fixture(params=SERVED)
def far(request, monkeypatch):
    """A place behind a fault proxy; and the proxy."""
    monkeypatch.setattr("ckptio.retry.FIRST_PAUSE", 0.01)
    store = request.getfixturevalue(f"{request.param}_store")
    with fault_proxy(store.endpoint) as proxy:
        yield store.place(uuid4().hex, proxy.url), proxy


def assert_whole(place):
    back = ckptio.restore(**place.to)
    assert np.array_equal(back["w"], TREE["w"])
    assert back["step"] == 3


def every(count, start=0):
    """Hold for each so-manieth request."""
    numbers = itertools.count(start)
    return lambda _: next(numbers) % count == 0


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_store_is_asked_again(far, status):
    place, proxy = far
    proxy.add(faults.respond(status), when=every(3), times=None)
    ckptio.save(**place.to, tree=TREE, options=OPTIONS)
    assert_whole(place)
    assert sum(r.status == status for r in proxy.requests) >= 4


def test_connections_that_break_are_made_anew(far):
    place, proxy = far
    proxy.add(faults.cut(1000), method="GET", when=every(2), times=3)
    proxy.add(faults.refuse_connection(), method="PUT", when=every(2, 1), times=2)
    ckptio.save(**place.to, tree=TREE, options=OPTIONS)
    assert_whole(place)


def test_one_read_after_the_other_takes_the_same_connection(far):
    place, proxy = far
    data = bytes(range(256)) * 4096
    with ckptio.open_backend(**place.to) as backend:
        backend.put("k", data)
        before = proxy.connections
        for start in range(0, len(data), 100_000):
            buffer = bytearray(min(100_000, len(data) - start))
            backend.read_into("k", start, memoryview(buffer))
            assert buffer == data[start : start + 100_000]
        assert proxy.connections == before


def test_a_read_goes_on_where_its_answer_broke_off(far):
    place, proxy = far
    data = np.random.default_rng(5).bytes(20 * MIB)
    with ckptio.open_backend(**place.to) as driver:
        if not driver.limits.read_buffer:
            pytest.skip("this driver takes its answers whole")
        driver.put("k", data)
        proxy.clear()
        proxy.add(faults.end_early(9 * MIB), method="GET")
        backend = RetryingBackend(driver, Operation("a test"))
        came = []
        buffer = memoryview(bytearray(4 * MIB))
        backend.read_through("k", 0, len(data), buffer, lambda piece: came.append(bytes(piece)))
    assert b"".join(came) == data
    asked = [r.headers.get("x-ms-range") or r.headers["range"] for r in proxy.requests]
    assert [text.partition("-")[0] for text in asked] == ["bytes=0", f"bytes={8 * MIB}"]


def test_a_body_shorter_than_it_says_is_read_again(far):
    place, proxy = far
    ckptio.save(**place.to, tree=TREE, options=OPTIONS)
    proxy.add(faults.end_early(70_000), method="GET", path="safetensors", times=2)
    assert_whole(place)


def test_a_lost_answer_to_the_commit_is_success_not_conflict(far):
    place, proxy = far
    # Google's request names the object in its body; what makes it the commit is the condition.
    commit = proxy.add(
        faults.lose_answer(),
        when=lambda r: (
            r.method in ("PUT", "POST")
            and ("manifest.json" in r.path or "ifGenerationMatch=0" in r.query)
        ),
    )
    ckptio.save(**place.to, tree=TREE, options=OPTIONS)
    assert commit.reached.is_set()
    assert_whole(place)
    with pytest.raises(ckptio.AlreadyExistsError):
        ckptio.save(**place.to, tree=TREE)


def test_what_is_forbidden_is_not_asked_twice(far):
    place, proxy = far
    proxy.add(faults.respond(403), times=None)
    for verb in [
        ckptio.open,
        ckptio.exists,
        ckptio.delete,
        lambda **to: ckptio.save(tree=TREE, **to),
    ]:
        proxy.requests.clear()
        with pytest.raises(ckptio.PermissionDeniedError) as caught:
            verb(**place.to)
        assert place.uri in str(caught.value)
        assert len(proxy.requests) == 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("store", SERVED)
def test_an_address_where_nothing_answers_is_named_within_seconds(store, request, caplog):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{sock.getsockname()[1]}"
    place = request.getfixturevalue(f"{store}_store").place("x", dead)
    with caplog.at_level(logging.DEBUG), pytest.raises(ckptio.StoreUnreachableError) as caught:
        ckptio.open(**place.to)
    assert dead.removeprefix("http://") in str(caught.value)
    for secret in ["test-secret-key", "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UV"]:
        assert secret not in caplog.text + str(caught.value) + repr(caught.value.__cause__)


def test_a_save_that_cannot_finish_leaves_nothing_visible(far, monkeypatch):
    place, proxy = far
    monkeypatch.setattr("ckptio.retry.PATIENCE", 0.3)
    ckptio.save(**place.to, tree={"step": 1})
    proxy.add(faults.respond(503), when=lambda r: r.sent > 1_000_000, times=None)
    with pytest.raises(ckptio.StoreUnavailableError, match="503"):
        ckptio.save(**place.to, tree=TREE, overwrite=True, options=OPTIONS)
    proxy.clear()
    assert ckptio.restore(**place.to) == {"step": 1}
    ckptio.collect_garbage(**place.to, grace=0)
    with ckptio.open_backend(place.uri, place.storage_options) as backend:
        assert len([*backend.list()]) == 2
