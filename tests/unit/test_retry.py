"""A store that is unavailable is asked again, with growing pauses, and not for ever."""

from __future__ import annotations

import pytest

from ckptio import (
    DeadlineExceededError,
    NotFoundError,
    StoreUnavailableError,
    StoreUnreachableError,
    open_backend,
    retry,
)
from ckptio.memory import MemoryBackend
from ckptio.operation import Operation
from ckptio.retry import RetryingBackend
from ckptio.testing import FaultyBackend


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Short pauses; the policy is the same."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(retry, "PATIENCE", 0.2)
    monkeypatch.setattr(retry, "FIRST_CONTACT", 0.02)


class Flaky:
    """Fails a number of times at each kind of call."""

    def __init__(self, times, error=None):
        self.times, self.error, self.seen = times, error or StoreUnavailableError("busy"), {}

    def __call__(self, call):
        self.seen[call.method] = self.seen.get(call.method, 0) + 1
        if self.seen[call.method] <= self.times:
            raise self.error


def make(script, seconds=None):
    inner = FaultyBackend(open_backend("memory://retry/x"), script)
    return inner, RetryingBackend(inner, Operation("testing", seconds))


def test_every_kind_of_call_is_tried_again():
    inner, backend = make(Flaky(3))
    backend.put("a/b", b"123")
    upload = backend.start_upload("a/c", 3, 3)
    upload.write_part(0, b"abc")
    upload.complete()
    upload.abort()
    buffer = bytearray(3)
    backend.read_into("a/b", 0, memoryview(buffer))
    assert buffer == b"123"
    assert backend.read("a/c") == b"abc"
    assert backend.head("a/b").size == 3
    assert [info.key for info in backend.list()] == ["a/b", "a/c"]
    assert [*backend.list_children()] == ["a/"]
    backend.delete(iter(["a/b", "a/c"]))
    assert backend.discard_uploads(0) == 0
    assert min(inner.before.seen.values()) >= 4


@pytest.mark.parametrize("error", [NotFoundError("gone"), ValueError("wrong")])
def test_other_errors_are_not_retried(error):
    inner, backend = make(Flaky(1, error))
    with pytest.raises(type(error)):
        backend.head("k")
    assert inner.count("head") == 1


def test_patience_ends_with_the_stores_own_error():
    inner, backend = make(Flaky(10**9))
    with pytest.raises(StoreUnavailableError, match="busy"):
        backend.head("k")
    assert inner.count("head") > 3


def test_a_store_that_never_answered_is_given_up_sooner():
    refused = StoreUnreachableError("http://127.0.0.1:1 refused the connection")
    inner, backend = make(Flaky(10**9, refused))
    with pytest.raises(StoreUnreachableError, match="refused"):
        backend.head("k")
    soon = inner.count("head")
    inner, backend = make(None)
    backend.put("k", b"")  # it answered once
    inner.before = late = Flaky(10**9, refused)
    with pytest.raises(StoreUnreachableError):
        backend.head("k")
    assert late.seen["head"] > soon


class Breaking(MemoryBackend):
    """Passes one piece on, and breaks."""

    def read_through(self, key, start, size, buffer, sink):
        piece = buffer[: min(len(buffer), size)]
        self.read_into(key, start, piece)
        sink(piece)
        raise StoreUnavailableError("broke off")


def test_a_read_that_gets_on_loses_no_patience(monkeypatch):
    monkeypatch.setattr(retry, "PATIENCE", 0.0)
    inner, came, buffer = Breaking("memory://retry/y"), [], memoryview(bytearray(4))
    inner.put("k", b"0123456789")
    backend = RetryingBackend(inner, Operation("testing"))
    backend.read_through("k", 0, 10, buffer, lambda piece: came.append(bytes(piece)))
    assert came == [b"0123", b"4567", b"89"]
    _, stuck = make(Flaky(10**9))
    with pytest.raises(StoreUnavailableError, match="busy"):
        stuck.read_through("k", 0, 10, buffer, came.append)
    given_up = Operation("testing")
    given_up.given_up.set()
    with pytest.raises(StoreUnavailableError, match="broke off"):
        RetryingBackend(inner, given_up).read_through("k", 0, 10, buffer, came.append)


def test_a_write_that_was_given_up_is_not_made_to_its_end():
    inner, _ = make(None)
    operation = Operation("testing")
    asked = []

    def fill(start, piece):
        asked.append(start)
        operation.give_up(OSError("another part failed"))

    with pytest.raises(OSError, match="another part failed"):
        RetryingBackend(inner, operation).put_through("k", 12, memoryview(bytearray(4)), fill)
    assert asked == [0]


def test_a_deadline_ends_it_and_names_the_cause():
    _, backend = make(Flaky(10**9), seconds=0.05)
    with pytest.raises(DeadlineExceededError, match="testing: busy") as caught:
        backend.head("k")
    assert isinstance(caught.value.__cause__, StoreUnavailableError)


def test_an_operation_that_was_given_up_does_not_wait():
    inner = FaultyBackend(open_backend("memory://retry/x"), Flaky(10**9))
    operation = Operation("testing")
    operation.given_up.set()
    with pytest.raises(StoreUnavailableError):
        RetryingBackend(inner, operation).head("k")
    assert inner.count("head") == 1
