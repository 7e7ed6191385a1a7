"""What this driver promises: the contract, and two things that obstore cannot do."""

from __future__ import annotations

import os
import select
import signal
import warnings

import pytest
from ckptio import StorageError
from ckptio.testing import BackendContract


class ObstorePromises(BackendContract):
    survives_fork = False

    def test_a_part_may_be_written_again(self, backend):
        part = self._part_size(backend)
        upload = backend.start_upload("k", 2 * part + 10, part)
        # Not its turn yet, so it can still be replaced.
        upload.write_part(part, b"?" * part)
        upload.write_part(part, b"!" * part)
        upload.write_part(2 * part, b"0123456789")
        upload.write_part(0, b"a" * part)
        upload.write_part(0, b"a" * part)
        upload.complete()
        assert self.raw_get(backend, "k") == b"a" * part + b"!" * part + b"0123456789"

    def test_a_part_that_was_sent_cannot_be_changed(self, backend):
        part = self._part_size(backend)
        upload = backend.start_upload("k", part + 10, part)
        upload.write_part(0, b"?" * part)
        upload.write_part(part, b"0123456789")
        info = upload.complete()
        with pytest.raises(StorageError, match="sent already, with other bytes"):
            upload.write_part(0, b"!" * part)
        upload.write_part(0, b"?" * part)
        assert upload.complete() == info
        assert self.raw_get(backend, "k") == b"?" * part + b"0123456789"

    def test_completing_without_a_part_is_an_error(self, backend):
        part = self._part_size(backend)
        upload = backend.start_upload("k", 3 * part, part)
        upload.write_part(0, b"x" * part)
        upload.write_part(2 * part, b"x" * part)
        with pytest.raises(StorageError, match=f"at offset {part}"):
            upload.complete()
        upload.abort()
        assert not backend.exists("k")

    def test_a_forked_child_is_refused_and_the_parent_goes_on(self, backend):
        backend.put("k", b"from the parent")
        ready, answer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that obstore's threads will not be there
            child = os.fork()
        if child == 0:
            try:
                backend.read("k")
                os.write(answer, b"it worked")
            except BaseException as error:
                os.write(answer, repr(error).encode())
            os._exit(0)
        try:
            assert select.select([ready], [], [], 30)[0], "the child hangs"
            said = os.read(ready, 2000).decode()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(ready)
            os.close(answer)
        assert "StorageError" in said
        assert "forked" in said
        part = self._part_size(backend)
        upload = backend.start_upload("later", part, part)
        upload.write_part(0, b"x" * part)
        upload.complete()
        assert backend.read("k") == b"from the parent"

    def test_more_uploads_than_obstore_has_threads(self, backend):
        part = self._part_size(backend)
        uploads = [backend.start_upload(f"many/{i}", 2 * part, part) for i in range(12)]
        for i, upload in enumerate(uploads):
            upload.write_part(0, bytes([i]) * part)
        backend.put("meanwhile", b"works")  # while every upload waits for its second part
        assert backend.read("meanwhile") == b"works"
        for i, upload in enumerate(uploads):
            upload.write_part(part, bytes([i]) * part)
        for i, upload in enumerate(uploads):
            upload.complete()
            assert self.raw_get(backend, f"many/{i}") == bytes([i]) * 2 * part
