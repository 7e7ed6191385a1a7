"""`BackendContract`: the backend contract as a pytest suite that drivers subclass.

Write one class with a fixture and two methods that reach the store *beside* the driver, so that
each method is tested against independent truth::

    class TestMyStore(BackendContract):
        @pytest.fixture
        def backend(self):
            with ckptio.open_backend("mystore://scratch/" + uuid4().hex) as backend:
                yield backend

        def raw_put(self, backend, key, data): ...
        def raw_get(self, backend, key): ...     # None if there is no such object
"""

from __future__ import annotations

import os
import pickle
import random
import select
import signal
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from ckptio.backend import Backend
from ckptio.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidKeyError,
    NotFoundError,
    PreconditionFailedError,
)

__all__ = ["BackendContract"]

ODD_KEYS = [
    "with space",
    "plus+and%25percent%",
    "equals=hash#question?and&",
    "dir.with.dots/..name/~tilde",
    "ünïcode/日本語/🙂",
    "quote'\"and`back",
    "brackets[0:3](x){y}<z>",
    "semi;colon:comma,at@bang!star*dollar$",
    "-leading-dash/_x",
    "a" * 200,
]
BAD_KEYS = ["", "/absolute", "a//b", "trailing/", "..", "a/../b", "./a", "a/.", "nul\0byte"]

KIB = 1 << 10
MIB = 1 << 20


class BackendContract(ABC):
    """Every promise of `ckptio.Backend`, one test each."""

    key_and_prefix: ClassVar[bool] = True
    """Whether ``c`` and ``c/d`` may both be keys; a file system cannot have both."""

    forgets_directories: ClassVar[bool] = True
    """Whether a directory is gone from listings as soon as its last object is."""

    survives_fork: ClassVar[bool] = True
    """Whether a forked child can use the parent's instance and its data."""

    @pytest.fixture
    @abstractmethod
    def backend(self) -> Backend:
        """Return a backend rooted at an empty place."""

    @abstractmethod
    def raw_put(self, backend: Backend, key: str, data: bytes) -> None:
        """Store an object without the driver."""

    @abstractmethod
    def raw_get(self, backend: Backend, key: str) -> bytes | None:
        """Fetch an object without the driver; None if there is none."""

    # Whole objects

    @pytest.mark.parametrize("size", [0, 1, 4096, 5 * MIB + 3])
    def test_put_stores_exactly_the_bytes(self, backend: Backend, size: int) -> None:
        data = random.Random(size).randbytes(size)
        info = backend.put("dir/object", data)
        assert self.raw_get(backend, "dir/object") == data
        assert (info.key, info.size) == ("dir/object", size)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_put_takes_any_buffer(self, backend: Backend, kind: Callable[..., bytes]) -> None:
        backend.put("k", kind(b"payload"))
        assert self.raw_get(backend, "k") == b"payload"

    def test_put_replaces_and_the_etag_changes(self, backend: Backend) -> None:
        first = backend.put("k", b"one")
        second = backend.put("k", b"two!")
        assert self.raw_get(backend, "k") == b"two!"
        assert first.etag != second.etag
        assert backend.head("k").etag == second.etag

    def test_create_refuses_what_exists(self, backend: Backend) -> None:
        backend.put("k", b"first", mode="create")
        with pytest.raises(AlreadyExistsError) as caught:
            backend.put("k", b"second", mode="create")
        assert isinstance(caught.value, FileExistsError)
        assert "k" in str(caught.value)
        assert self.raw_get(backend, "k") == b"first"

    def test_create_refuses_what_was_put_beside_the_driver(self, backend: Backend) -> None:
        self.raw_put(backend, "k", b"theirs")
        with pytest.raises(AlreadyExistsError):
            backend.put("k", b"ours", mode="create")
        assert self.raw_get(backend, "k") == b"theirs"

    def test_of_concurrent_creates_exactly_one_wins(self, backend: Backend) -> None:
        for race in range(3):
            key, start = f"race-{race}", threading.Barrier(8)

            def create(i: int, key: str = key, start: threading.Barrier = start) -> int | None:
                start.wait(30)
                try:
                    backend.put(key, b"%d" % i * 1000, mode="create")
                except AlreadyExistsError:
                    return None
                return i

            with ThreadPoolExecutor(8) as pool:
                winners = [i for i in pool.map(create, range(8)) if i is not None]
            assert len(winners) == 1
            assert self.raw_get(backend, key) == b"%d" % winners[0] * 1000

    def test_if_match_replaces_only_what_was_seen(self, backend: Backend) -> None:
        seen = backend.put("k", b"one")
        changed = backend.put("k", b"two", if_match=seen.etag)
        assert self.raw_get(backend, "k") == b"two"
        with pytest.raises(PreconditionFailedError):
            backend.put("k", b"three", if_match=seen.etag)
        assert self.raw_get(backend, "k") == b"two"
        backend.put("k", b"four", if_match=backend.head("k").etag)
        assert changed.etag != backend.head("k").etag

    def test_if_match_refuses_what_is_gone(self, backend: Backend) -> None:
        seen = backend.put("k", b"one")
        backend.delete(["k"])
        with pytest.raises(PreconditionFailedError):
            backend.put("k", b"two", if_match=seen.etag)
        assert self.raw_get(backend, "k") is None

    def test_of_concurrent_replacements_exactly_one_wins(self, backend: Backend) -> None:
        etag, start = backend.put("k", b"old").etag, threading.Barrier(6)

        def replace(i: int) -> int | None:
            start.wait(30)
            try:
                backend.put("k", b"%d" % i, if_match=etag)
            except PreconditionFailedError:
                return None
            return i

        with ThreadPoolExecutor(6) as pool:
            winners = [i for i in pool.map(replace, range(6)) if i is not None]
        assert len(winners) == 1
        assert self.raw_get(backend, "k") == b"%d" % winners[0]

    # Uploads

    def _part_size(self, backend: Backend) -> int:
        return max(backend.limits.min_part_size, 64 * KIB)

    def test_upload_takes_parts_in_any_order_from_any_thread(self, backend: Backend) -> None:
        part = self._part_size(backend)
        data = random.Random(1).randbytes(5 * part + 1234)
        upload = backend.start_upload("dir/big", len(data), part)
        offsets = [*range(0, len(data), part)]
        random.Random(2).shuffle(offsets)
        with ThreadPoolExecutor(3) as pool:
            for _ in pool.map(lambda o: upload.write_part(o, data[o : o + part]), offsets):
                pass
        info = upload.complete()
        assert self.raw_get(backend, "dir/big") == data
        assert info.size == backend.head("dir/big").size == len(data)

    def test_upload_is_invisible_until_complete(self, backend: Backend) -> None:
        part = self._part_size(backend)
        upload = backend.start_upload("dir/big", 2 * part, part)
        upload.write_part(0, b"x" * part)
        assert not backend.exists("dir/big")
        assert [*backend.list()] == []
        upload.write_part(part, b"y" * part)
        assert not backend.exists("dir/big")
        upload.complete()
        assert self.raw_get(backend, "dir/big") == b"x" * part + b"y" * part
        assert [info.key for info in backend.list()] == ["dir/big"]

    def test_upload_does_not_keep_the_callers_buffer(self, backend: Backend) -> None:
        part = self._part_size(backend)
        upload = backend.start_upload("k", 2 * part, part)
        buffer = bytearray(part)
        for offset, fill in [(0, b"a"), (part, b"b")]:
            buffer[:] = fill * part
            upload.write_part(offset, memoryview(buffer))
        buffer[:] = b"z" * part
        upload.complete()
        assert self.raw_get(backend, "k") == b"a" * part + b"b" * part

    def test_a_part_may_be_written_again(self, backend: Backend) -> None:
        part = self._part_size(backend)
        upload = backend.start_upload("k", part + 10, part)
        upload.write_part(0, b"?" * part)
        upload.write_part(part, b"0123456789")
        upload.write_part(0, b"!" * part)
        upload.complete()
        assert self.raw_get(backend, "k") == b"!" * part + b"0123456789"

    def test_upload_of_one_short_part(self, backend: Backend) -> None:
        upload = backend.start_upload("k", 3, self._part_size(backend))
        upload.write_part(0, b"abc")
        upload.complete()
        assert self.raw_get(backend, "k") == b"abc"

    def test_completing_again_does_no_harm(self, backend: Backend) -> None:
        upload = backend.start_upload("k", 3, self._part_size(backend))
        upload.write_part(0, b"abc")
        first = upload.complete()
        assert upload.complete().size == first.size
        assert self.raw_get(backend, "k") == b"abc"

    def test_an_aborted_upload_leaves_nothing(self, backend: Backend) -> None:
        part = self._part_size(backend)
        self.raw_put(backend, "kept", b"kept")
        for key in ["dir/gone", "kept"]:
            upload = backend.start_upload(key, 2 * part, part)
            upload.write_part(part, b"x" * part)
            upload.abort()
        assert [info.key for info in backend.list()] == ["kept"]
        assert self.raw_get(backend, "kept") == b"kept"
        assert backend.discard_uploads(0) == 0

    def test_an_abandoned_upload_is_invisible_and_can_be_discarded(self, backend: Backend) -> None:
        part = self._part_size(backend)
        upload = backend.start_upload("dir/torn", 2 * part, part)
        upload.write_part(0, b"x" * part)
        assert not backend.exists("dir/torn")
        assert [*backend.list()] == []
        assert backend.discard_uploads(3600) == 0, "a young upload may still be at work"
        backend.discard_uploads(0)
        backend.put("dir/torn", b"whole")
        assert self.raw_get(backend, "dir/torn") == b"whole"

    # Reading

    def test_reads_exactly_the_range(self, backend: Backend) -> None:
        data = random.Random(3).randbytes(300 * KIB + 7)
        self.raw_put(backend, "k", data)
        size = len(data)
        ranges = [(0, size), (0, 1), (size - 1, 1), (1, 4096), (4095, 8194), (4096, 4096), (7, 0)]
        for start, length in ranges:
            buffer = bytearray(length)
            backend.read_into("k", start, memoryview(buffer))
            assert buffer == data[start : start + length], (start, length)

    def test_reads_into_part_of_a_buffer_only(self, backend: Backend) -> None:
        self.raw_put(backend, "k", b"0123456789")
        buffer = bytearray(b"-" * 8)
        backend.read_into("k", 4, memoryview(buffer)[2:5])
        assert buffer == b"--456---"

    @pytest.mark.parametrize(
        ("size", "length"), [(20, 1), (20, 11), (700 * KIB + 5, 300 * KIB), (20, 1024)]
    )
    def test_reads_a_range_through_a_smaller_buffer(
        self, backend: Backend, size: int, length: int
    ) -> None:
        data = random.Random(4).randbytes(size)
        self.raw_put(backend, "k", data)
        pieces: list[bytes] = []
        buffer = memoryview(bytearray(length))
        backend.read_through("k", 9, len(data) - 9, buffer, lambda p: pieces.append(bytes(p)))
        assert b"".join(pieces) == data[9:]
        # Whole buffers and the rest, so that blocks stay blocks.
        assert {len(piece) for piece in pieces[:-1]} <= {length}

    def test_what_takes_the_bytes_may_refuse_them(self, backend: Backend) -> None:
        self.raw_put(backend, "k", b"0123456789")
        seen: list[bytes] = []

        def refuse(piece: memoryview) -> None:
            seen.append(bytes(piece))
            raise CorruptionError("not these")

        with pytest.raises(CorruptionError, match="not these"):
            backend.read_through("k", 0, 10, memoryview(bytearray(4)), refuse)
        assert seen == [b"0123"]
        assert backend.read("k") == b"0123456789"  # the next call gets its own answer

    @pytest.mark.parametrize(
        ("size", "length"), [(0, 4), (10, 4), (8, 4), (3, 4), (3 * KIB * KIB + 5, 700 * KIB)]
    )
    def test_an_object_is_written_through_a_smaller_buffer(
        self, backend: Backend, size: int, length: int
    ) -> None:
        data = random.Random(5).randbytes(size)
        asked: list[tuple[int, int]] = []

        def fill(start: int, piece: memoryview) -> None:
            asked.append((start, len(piece)))
            piece[:] = data[start : start + len(piece)]

        backend.put("k", b"of another size")
        info = backend.put_through("k", size, memoryview(bytearray(length)), fill)
        assert (info.key, info.size) == ("k", size)
        assert self.raw_get(backend, "k") == data
        # Whole buffers and the rest, in order, so that blocks stay blocks.
        assert asked == [(at, min(length, size - at)) for at in range(0, size, length)]

    def test_an_object_whose_bytes_cannot_be_made_is_not_written(self, backend: Backend) -> None:
        def fill(start: int, piece: memoryview) -> None:
            if start:
                raise OSError("the array's file is gone")

        backend.put("k", b"as it was")
        for key in ("k", "new"):
            with pytest.raises(OSError, match="the array's file is gone"):
                backend.put_through(key, 3 << 20, memoryview(bytearray(1 << 20)), fill)
        assert backend.read("k") == b"as it was"  # the next call gets its own answer
        assert [info.key for info in backend.list()] == ["k"]

    @pytest.mark.parametrize("start", [5, 10, 11])
    def test_reading_past_the_end_is_an_error(self, backend: Backend, start: int) -> None:
        self.raw_put(backend, "k", b"0123456789")
        with pytest.raises(CorruptionError, match="k"):
            backend.read_into("k", start, memoryview(bytearray(6)))

    def test_a_missing_key_is_not_found_everywhere(self, backend: Backend) -> None:
        calls: list[Callable[[], object]] = [
            lambda: backend.head("no/such"),
            lambda: backend.read_into("no/such", 0, memoryview(bytearray(1))),
            lambda: backend.read("no/such"),
        ]
        for call in calls:
            with pytest.raises(NotFoundError) as caught:
                call()
            assert isinstance(caught.value, FileNotFoundError)
            assert backend.describe("no/such") in str(caught.value)
        assert not backend.exists("no/such")

    def test_head_tells_size_and_time(self, backend: Backend) -> None:
        backend.put("k", b"12345")
        info = backend.head("k")
        assert (info.key, info.size) == ("k", 5)
        assert abs(info.modified - time.time()) < 300

    # Listing and deleting

    def test_list_is_recursive_sorted_and_by_whole_segments(self, backend: Backend) -> None:
        keys = ["a/b/c", "a/b/d/e", "a/bc", "ab", "b", "a-b/c", "a/B"]
        for key in keys:
            self.raw_put(backend, key, key.encode())
        assert [info.key for info in backend.list()] == sorted(keys)
        assert [info.key for info in backend.list("a/b")] == ["a/b/c", "a/b/d/e"]
        assert [info.key for info in backend.list("a")] == ["a/B", "a/b/c", "a/b/d/e", "a/bc"]
        assert [info.key for info in backend.list("nothing")] == []
        assert [info.key for info in backend.list("b")] == []
        assert {info.key: info.size for info in backend.list()} == {k: len(k) for k in keys}
        assert backend.head("a/bc").etag == next(i for i in backend.list("a") if i.size == 4).etag

    def test_list_children_goes_one_level(self, backend: Backend) -> None:
        for key in ["run/1/x", "run/1/y/z", "run/10/x", "run/notes.txt", "other/q"]:
            self.raw_put(backend, key, b"1")
        assert [*backend.list_children()] == ["other/", "run/"]
        assert [*backend.list_children("run")] == ["1/", "10/", "notes.txt"]
        assert [*backend.list_children("run/1")] == ["x", "y/"]
        assert [*backend.list_children("nothing")] == []

    def test_what_others_did_is_seen_at_once(self, backend: Backend) -> None:
        assert not backend.exists("d/k")
        assert [*backend.list("d")] == []
        self.raw_put(backend, "d/k", b"1")
        assert backend.exists("d/k")
        assert [info.key for info in backend.list("d")] == ["d/k"]
        assert [*backend.list_children()] == ["d/"]
        self.raw_put(backend, "d/k", b"22")
        assert backend.head("d/k").size == 2
        assert backend.read("d/k") == b"22"

    def test_delete_is_batched_and_takes_absent_keys(self, backend: Backend) -> None:
        for key in ["d/1", "d/2", "keep"]:
            self.raw_put(backend, key, b"1")
        backend.delete(["d/1", "absent", "d/2", "no/dir"])
        assert [info.key for info in backend.list()] == ["keep"]
        assert self.raw_get(backend, "d/1") is None
        backend.delete(iter(["keep"]))
        backend.delete([])
        assert [*backend.list()] == []
        if self.forgets_directories:
            assert [*backend.list_children()] == []

    # Keys

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_keys_are_taken_as_they_are(self, backend: Backend, key: str) -> None:
        backend.put(key, b"by driver")
        assert self.raw_get(backend, key) == b"by driver"
        assert [info.key for info in backend.list()] == [key]
        assert backend.head(key).key == key
        assert backend.read(key) == b"by driver"
        upload = backend.start_upload(key, 4, self._part_size(backend))
        upload.write_part(0, b"part")
        upload.complete()
        assert backend.read(key) == b"part"
        backend.delete([key])
        assert self.raw_get(backend, key) is None

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_keys_that_leave_the_root_are_refused(self, backend: Backend, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: backend.put(key, b""),
            lambda: backend.head(key),
            lambda: backend.read_into(key, 0, memoryview(bytearray(1))),
            lambda: backend.delete([key]),
            lambda: backend.start_upload(key, 1, self._part_size(backend)),
        ]
        if key:
            calls.append(lambda: [*backend.list(key)])
        for call in calls:
            with pytest.raises(InvalidKeyError):
                call()

    def test_a_key_may_begin_like_another(self, backend: Backend) -> None:
        keys = ["c", "cc", "c.d", "c/d"] if self.key_and_prefix else ["c", "cc", "c.d"]
        for key in keys:
            backend.put(key, key.encode())
        assert {key: backend.read(key) for key in keys} == {key: key.encode() for key in keys}
        backend.delete(["c"])
        assert [info.key for info in backend.list()] == sorted(set(keys) - {"c"})

    # Processes and threads

    def test_thirty_two_threads_at_once(self, backend: Backend) -> None:
        def work(i: int) -> bytes:
            backend.put(f"t/{i}", b"%d" % i * 100)
            return backend.read(f"t/{i}")

        with ThreadPoolExecutor(32) as pool:
            assert [*pool.map(work, range(64))] == [b"%d" % i * 100 for i in range(64)]
        assert len([*backend.list("t")]) == 64

    def test_pickles(self, backend: Backend) -> None:
        backend.put("k", b"before")
        with pickle.loads(pickle.dumps(backend)) as copy:
            assert copy.uri == backend.uri
            assert copy.read("k") == b"before"
            copy.put("k", b"after")
        assert backend.read("k") == b"after"

    def test_a_forked_child_can_use_it(self, backend: Backend) -> None:
        if not self.survives_fork:
            pytest.skip("this driver says that it does not survive a fork")
        backend.put("k", b"from the parent")
        ready, answer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # other libraries warn that their threads won't be there
            child = os.fork()
        if child == 0:
            try:
                os.write(answer, backend.read("k"))
            except BaseException as error:
                os.write(answer, repr(error).encode())
            os._exit(0)
        try:
            assert select.select([ready], [], [], 60)[0], "the child hangs"
            assert os.read(ready, 1000) == b"from the parent"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(ready)
            os.close(answer)
        assert backend.read("k") == b"from the parent"

    def test_closes_twice(self, backend: Backend) -> None:
        backend.put("k", b"1")
        backend.close()
        backend.close()
