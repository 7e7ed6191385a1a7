"""The generic fsspec driver, on a local file system in disguise and on a real FTP server."""

import ftplib
import io
import shutil
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from servers.moto import moto
from servers.process import ServerUnavailableError, free_ports, running, unavailable

import ckptio
from ckptio.testing import BackendContract
from ckptio_backends import fsspec as driver

pytestmark = pytest.mark.filterwarnings("ignore::ckptio_backends.fsspec.BestEffortWarning")


class ShelfFileSystem(LocalFileSystem):
    """The local disk under a scheme that no ckptio driver claims."""

    protocol = "shelf"

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).rpartition("://")[2])


class TimidShelfFileSystem(ShelfFileSystem):
    """Its rename refuses to replace, as SMB's does."""

    protocol = "timidshelf"

    def mv(self, path1, path2, **kwargs):
        if self.exists(path2):
            raise FileExistsError(path2)
        super().mv(path1, path2, **kwargs)


class FixedShelfFileSystem(ShelfFileSystem):
    """It has no rename of its own, and writes whole objects, as an object store does."""

    protocol = "fixedshelf"
    mv = fsspec.AbstractFileSystem.mv

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        fd, temporary = tempfile.mkstemp()
        with open(fd, "wb") as file:
            file.write(value)
        shutil.move(temporary, path)


@pytest.fixture(autouse=True)
def _registered():
    for kind in (ShelfFileSystem, TimidShelfFileSystem, FixedShelfFileSystem):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
    manager = ckptio.plugin_manager()
    added = None if manager.is_registered(driver) else manager.register(driver)
    yield
    if added:
        manager.unregister(driver)


class FileSystemContract(BackendContract):
    key_and_prefix = False

    def test_of_concurrent_replacements_exactly_one_wins(self, backend, monkeypatch):
        # No file system can promise that: the driver says so, and every object is whole.
        monkeypatch.setattr(driver, "_warned", set())
        etag, start = backend.put("k", b"old").etag, threading.Barrier(4)

        def replace(i):
            start.wait(30)
            try:
                backend.put("k", b"%d" % i * 1000, if_match=etag)
            except ckptio.PreconditionFailedError:
                return None
            return i

        told = pytest.warns(driver.BestEffortWarning, match="the later one wins")
        with told, ThreadPoolExecutor(4) as pool:
            winners = [i for i in pool.map(replace, range(4)) if i is not None]
        assert self.raw_get(backend, "k") in [b"%d" % i * 1000 for i in winners]

    def test_a_checkpoint_goes_there_and_back(self, backend):
        uri, options = f"{backend._full_uri}/run", backend._options
        tree = {"w": np.arange(5_000_000, dtype=np.float32), "step": 3}
        ckptio.save(uri, tree, storage_options=options)
        found = ckptio.restore(uri, storage_options=options)
        np.testing.assert_array_equal(found["w"], tree["w"])
        with pytest.raises(ckptio.AlreadyExistsError):
            ckptio.save(uri, tree, storage_options=options)


class WithoutExclusiveCreation(FileSystemContract):
    def test_of_concurrent_creates_exactly_one_wins(self, backend, monkeypatch):
        # Nothing here creates a name exclusively: the driver says so, and every object is whole.
        monkeypatch.setattr(driver, "_warned", set())
        start = threading.Barrier(4)

        def create(i):
            start.wait(30)
            try:
                backend.put("k", b"%d" % i * 1000, mode="create")
            except ckptio.AlreadyExistsError:
                return None
            return i

        told = pytest.warns(driver.BestEffortWarning, match="the later one wins")
        with told, ThreadPoolExecutor(4) as pool:
            winners = [i for i in pool.map(create, range(4)) if i is not None]
        assert self.raw_get(backend, "k") in [b"%d" % i * 1000 for i in winners]


class TestLocalDisk(FileSystemContract):
    scheme = "shelf"

    @pytest.fixture
    def backend(self, tmp_path):
        with ckptio.open_backend(f"{self.scheme}://{tmp_path}/root") as backend:
            yield backend

    def raw_put(self, backend, key, data):
        path = Path(backend.uri.partition("://")[2], key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_get(self, backend, key):
        path = Path(backend.uri.partition("://")[2], key)
        return path.read_bytes() if path.is_file() else None


class TestRenameThatDoesNotReplace(WithoutExclusiveCreation, TestLocalDisk):
    scheme = "timidshelf"

    @pytest.fixture
    def rename(self, monkeypatch):
        """Let something happen in the moment when the old file has stepped aside, or before."""
        real = TimidShelfFileSystem.mv

        def let(happen, *, before=False):
            pending = [happen]

            def mv(fs, path1, path2, **kwargs):
                steps_aside = Path(path1).name == "k"
                if steps_aside and before and pending:
                    pending.pop()()
                real(fs, path1, path2, **kwargs)
                if steps_aside and not before and pending:
                    pending.pop()()

            monkeypatch.setattr(TimidShelfFileSystem, "mv", mv)

        return let

    def left(self, backend):
        return [path.name for path in Path(backend.uri.partition("://")[2]).iterdir()]

    def test_a_writer_who_comes_between_is_noticed(self, backend, rename):
        etag = backend.put("k", b"old").etag
        rename(lambda: self.raw_put(backend, "k", b"theirs"))
        with pytest.raises(ckptio.PreconditionFailedError, match="another writer"):
            backend.put("k", b"ours", if_match=etag)
        assert self.raw_get(backend, "k") == b"theirs"
        assert self.left(backend) == ["k"]

    def test_a_writer_who_comes_between_is_replaced_where_that_is_wanted(self, backend, rename):
        backend.put("k", b"old")
        rename(lambda: self.raw_put(backend, "k", b"theirs"))
        info = backend.put("k", b"ours")
        assert self.raw_get(backend, "k") == b"ours"
        assert backend.head("k").etag == info.etag
        assert self.left(backend) == ["k"]

    def test_two_who_let_the_old_file_step_aside_do_not_trip(self, backend, rename):
        etag = backend.put("k", b"old").etag
        old = Path(backend.uri.partition("://")[2], "k")
        rename(old.unlink, before=True)
        backend.put("k", b"ours", if_match=etag)
        assert self.raw_get(backend, "k") == b"ours"
        assert self.left(backend) == ["k"]

    def test_the_old_file_comes_back_where_the_rename_breaks(self, backend, rename):
        backend.put("k", b"old")

        def fail():
            raise OSError("no more renames")

        rename(fail)
        with pytest.raises(ckptio.StorageError, match="no more renames"):
            backend.put("k", b"ours")
        assert self.raw_get(backend, "k") == b"old"
        assert self.left(backend) == ["k"]


class TestNoRename(WithoutExclusiveCreation, TestLocalDisk):
    scheme = "fixedshelf"


@pytest.fixture(scope="module")
def ftp_server(tmp_path_factory):
    if find_spec("pyftpdlib") is None:
        unavailable(ServerUnavailableError("the FTP server needs: pip install pyftpdlib"))
    [port] = free_ports(1)
    root = tmp_path_factory.mktemp("ftp")
    command = [sys.executable, "-m", "pyftpdlib", "-i", "127.0.0.1", "-p", str(port), "-w"]
    command += ["-d", root, "-u", "user", "-P", "s3cret"]
    try:
        with running(command, f"ftp://user:s3cret@127.0.0.1:{port}/"):
            yield port
    except ServerUnavailableError as error:
        unavailable(error)


class TestFTP(WithoutExclusiveCreation):
    @pytest.fixture
    def backend(self, ftp_server):
        uri = f"ftp://user:s3cret@127.0.0.1:{ftp_server}/{uuid4().hex}"
        self.port = ftp_server
        with ckptio.open_backend(uri) as backend:
            yield backend

    def connect(self):
        ftp = ftplib.FTP(encoding="utf-8")
        ftp.connect("127.0.0.1", self.port, timeout=30)
        ftp.login("user", "s3cret")
        return closing(ftp)

    def path(self, backend, key):
        return "/" + backend._full_uri.split("/", 3)[3] + "/" + key

    def raw_put(self, backend, key, data):
        path = self.path(backend, key)
        with self.connect() as ftp:
            segments = path.split("/")[1:-1]
            for i in range(len(segments)):
                with suppress(ftplib.error_perm):  # it is there
                    ftp.mkd("/" + "/".join(segments[: i + 1]))
            ftp.storbinary(f"STOR {path}", io.BytesIO(data))

    def raw_get(self, backend, key):
        data = io.BytesIO()
        with self.connect() as ftp:
            try:
                ftp.retrbinary(f"RETR {self.path(backend, key)}", data.write)
            except ftplib.error_perm:
                return None
        return data.getvalue()

    def test_a_password_in_the_uri_is_in_no_message(self, backend):
        assert "s3cret" not in repr(backend) + backend.uri
        with pytest.raises(ckptio.NotFoundError) as caught:
            backend.head("missing")
        assert "s3cret" not in str(caught.value)

    def test_a_wrong_password_is_refused(self, ftp_server):
        uri = f"ftp://user:wrong@127.0.0.1:{ftp_server}/x"
        with ckptio.open_backend(uri) as backend, pytest.raises(ckptio.StorageError) as caught:
            backend.put("k", b"")
        assert "wrong" not in str(caught.value)


def test_a_checkpoint_copied_to_a_web_server_is_restored_from_there(tmp_path):
    tree = {"w": np.arange(5_000_000, dtype=np.float32), "step": 3}
    ckptio.save(tmp_path, tree)
    try:
        with moto() as server:
            with server.client() as client:
                for path in filter(Path.is_file, tmp_path.rglob("*")):
                    key = f"run/{path.relative_to(tmp_path)}"
                    place = {"Bucket": server.bucket, "Key": key}
                    client.put_object(**place, Body=path.read_bytes(), ACL="public-read")
                client.put_object(Bucket=server.bucket, Key="secret/manifest.json", Body=b"{}")
            uri = f"{server.endpoint}/{server.bucket}/run"
            np.testing.assert_array_equal(ckptio.restore(uri)["w"], tree["w"])
            np.testing.assert_array_equal(ckptio.open(uri)["w"][7:9], [7, 8])
            with pytest.raises(ckptio.PermissionDeniedError):
                ckptio.restore(f"{server.endpoint}/{server.bucket}/secret")
    except ServerUnavailableError as error:
        unavailable(error)


def test_a_scheme_that_fsspec_does_not_know_is_unknown():
    with pytest.raises(ckptio.UnknownSchemeError):
        ckptio.open_backend("no-such-scheme://x/y")


def test_a_server_that_is_not_there_is_worth_a_retry():
    [port] = free_ports(1)
    refused = pytest.raises(ckptio.StoreUnavailableError, match=str(port))
    with ckptio.open_backend(f"ftp://127.0.0.1:{port}/x") as backend, refused:
        backend.head("k")
