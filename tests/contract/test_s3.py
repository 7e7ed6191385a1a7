"""The S3 driver keeps the backend contract, and what S3 alone asks of it."""

import contextlib
import os
import pickle
import subprocess
import sys
import time
import uuid

import botocore.session
import pytest
from servers.moto import moto
from servers.process import ServerUnavailableError, unavailable
from servers.s3 import RealS3
from servers.seaweedfs import seaweedfs

import ckptio
from ckptio.errors import (
    InvalidOptionError,
    InvalidURIError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    StoreUnavailableError,
    StoreUnreachableError,
)
from ckptio.testing import BackendContract

MIB = 1 << 20
REAL_S3_URI = os.environ.get("CKPTIO_TEST_S3_URI", "")


@contextlib.contextmanager
def server_of(start):
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(start())
        except ServerUnavailableError as error:
            unavailable(error)
        client = stack.enter_context(server.client())
        yield server, client


@pytest.fixture(scope="module")
def seaweedfs_server():
    with server_of(seaweedfs) as found:
        yield found


@pytest.fixture(scope="module")
def moto_server():
    with server_of(moto) as found:
        yield found


class S3Contract(BackendContract):
    """The contract and S3's own promises; a subclass names the server."""

    @pytest.fixture
    def store(self):
        raise NotImplementedError

    @pytest.fixture
    def backend(self, store):
        server, self.client = store
        uri = f"{server.uri}/{uuid.uuid4().hex}/run"
        with ckptio.open_backend(uri, server.storage_options()) as backend:
            yield backend

    def raw_put(self, backend, key, data):
        bucket, _, root = backend.uri.removeprefix("s3://").partition("/")
        self.client.put_object(Bucket=bucket, Key=f"{root}/{key}", Body=data)

    def raw_get(self, backend, key):
        bucket, _, root = backend.uri.removeprefix("s3://").partition("/")
        try:
            answer = self.client.get_object(Bucket=bucket, Key=f"{root}/{key}")
        except self.client.exceptions.NoSuchKey:
            return None
        with contextlib.closing(answer["Body"]) as body:
            return body.read()

    def test_markers_of_directories_are_no_objects(self, backend):
        self.raw_put(backend, "dir/", b"")
        self.raw_put(backend, "dir/k", b"1")
        assert [info.key for info in backend.list()] == ["dir/k"]
        assert [*backend.list_children("dir")] == ["k"]

    def test_an_upload_of_no_bytes(self, backend):
        upload = backend.start_upload("empty", 0, 5 * MIB)
        assert upload.complete().size == 0
        assert self.raw_get(backend, "empty") == b""

    def test_an_upload_with_a_part_missing_is_not_completed(self, backend):
        upload = backend.start_upload("k", 15 * MIB, 5 * MIB)
        upload.write_part(0, b"x" * 5 * MIB)
        upload.write_part(10 * MIB, b"x" * 5 * MIB)
        with pytest.raises(StorageError, match="2 of 3 parts"):
            upload.complete()
        assert not backend.exists("k")
        upload.abort()

    def test_an_upload_that_somebody_aborted_is_not_taken_for_complete(self, backend):
        backend.put("k", b"another's")
        upload = backend.start_upload("k", 3, 5 * MIB)
        upload.write_part(0, b"abc")
        assert backend.discard_uploads(0) == 1
        with pytest.raises(StorageError, match="upload is gone"):
            upload.complete()
        upload.abort()
        assert self.raw_get(backend, "k") == b"another's"

    def test_users_checksums_work_for_parts_too(self, backend, store):
        options = store[0].storage_options()
        options["config_kwargs"] = {"request_checksum_calculation": "when_supported"}
        with ckptio.open_backend(backend.uri, options) as checking:
            checking.put("small", b"small")
            upload = checking.start_upload("big", 6 * MIB, 5 * MIB)
            upload.write_part(0, b"x" * 5 * MIB)
            upload.write_part(5 * MIB, b"y" * MIB)
            upload.complete()
        assert self.raw_get(backend, "small") == b"small"
        assert self.raw_get(backend, "big") == b"x" * 5 * MIB + b"y" * MIB

    def test_additional_parameters_reach_the_requests_that_know_them(self, backend, store):
        options = store[0].storage_options()
        options["s3_additional_kwargs"] = {"Metadata": {"team": "x"}, "ContentType": "text/plain"}
        with ckptio.open_backend(backend.uri, options) as backend:
            backend.put("small", b"small")
            upload = backend.start_upload("big", 3, 5 * MIB)
            upload.write_part(0, b"big")
            upload.complete()
            for key in ["small", "big"]:
                found = backend.look_up(key)
                assert found["Metadata"]["team"] == "x"
                assert found["ContentType"] == "text/plain"

    def test_a_missing_bucket_is_named(self, backend, store):
        bucket = f"ckptio-{uuid.uuid4().hex}"
        with ckptio.open_backend(f"s3://{bucket}/x", store[0].storage_options()) as missing:
            for call in [
                lambda: missing.head("k"),
                lambda: missing.read("k"),
                lambda: missing.put("k", b"1"),
                lambda: missing.start_upload("k", 1, 5 * MIB),
                lambda: [*missing.list()],
                lambda: [*missing.list_children()],
            ]:
                with pytest.raises(NotFoundError, match=f"bucket '{bucket}' does not exist"):
                    call()

    def test_what_was_never_closed_warns_of_nothing(self, backend, store):
        code = (
            "import sys, pickle, ckptio; b = pickle.loads(sys.stdin.buffer.read());"
            "b.put('k', b'1'); assert b.read('k') == b'1'"
        )
        child = subprocess.run(
            [sys.executable, "-W", "error", "-X", "dev", "-c", code],
            input=pickle.dumps(backend),
            capture_output=True,
            timeout=60,
        )
        assert (child.returncode, child.stderr) == (0, b"")


class TestSeaweedFS(S3Contract):
    forgets_directories = False  # it does so only later

    @pytest.fixture
    def store(self, seaweedfs_server):
        return seaweedfs_server

    def test_wrong_credentials_are_named_at_once_and_not_shown(self, backend, store):
        for wrong in [{"key": "wrong-key"}, {"secret": "wrong-secret"}]:
            options = store[0].storage_options() | wrong
            with ckptio.open_backend(backend.uri, options) as refused:
                for call in [
                    lambda b=refused: b.head("k"),
                    lambda b=refused: b.read("k"),
                    lambda b=refused: b.put("k", b"1"),
                    lambda b=refused: [*b.list()],
                    lambda b=refused: b.delete(["k"]),
                ]:
                    with pytest.raises(PermissionDeniedError, match="credentials") as caught:
                        call()
                    assert isinstance(caught.value, PermissionError)
                    text = str(caught.value) + repr(refused) + repr(refused._settings)
                    assert store[0].secret not in text
                    assert store[0].key not in text
                    assert "wrong" not in text

    def test_anonymous_access_is_refused_in_words(self, backend, store):
        options = {"anon": True, "endpoint_url": store[0].endpoint}
        with (
            ckptio.open_backend(backend.uri, options) as refused,
            pytest.raises(PermissionDeniedError, match="permission denied"),
        ):
            refused.read("k")


class TestMoto(S3Contract):
    @pytest.fixture
    def store(self, moto_server):
        return moto_server

    def test_an_abandoned_upload_is_invisible_and_can_be_discarded(self, backend):
        pytest.skip("moto says that every upload began in 2010: see SeaweedFS")

    def test_an_upload_that_somebody_aborted_is_not_taken_for_complete(self, backend):
        pytest.skip("moto fails to answer here: see SeaweedFS")

    def test_anonymous_access_needs_no_credentials(self, backend, store, monkeypatch):
        public = store[0].storage_options() | {"s3_additional_kwargs": {"ACL": "public-read"}}
        with ckptio.open_backend(backend.uri, public) as publisher:
            publisher.put("k", b"1")
        monkeypatch.setattr(botocore.session.Session, "get_credentials", pytest.fail)
        options = {"anon": True, "endpoint_url": store[0].endpoint}
        with ckptio.open_backend(backend.uri, options) as anonymous:
            assert anonymous.read("k") == b"1"


@pytest.mark.skipif(not REAL_S3_URI, reason="CKPTIO_TEST_S3_URI names no scratch prefix")
class TestRealService(S3Contract):
    """With the credentials and the region of the environment."""

    @pytest.fixture
    def store(self):
        service = RealS3(REAL_S3_URI)
        with service.client() as client:
            yield service, client

    @pytest.fixture
    def backend(self, store):
        server, self.client = store
        uri = f"{server.uri}/{uuid.uuid4().hex}/run"
        with ckptio.open_backend(uri, server.storage_options()) as backend:
            yield backend
            backend.delete([info.key for info in backend.list()])
            backend.discard_uploads(0)


@pytest.fixture
def no_credentials(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("AWS_", "BOTO"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("BOTO_CONFIG", str(tmp_path / "none"))


DEAD = "http://127.0.0.1:9"


@pytest.mark.usefixtures("no_credentials")
class TestWithoutServer:
    def test_no_credentials_says_how_to_give_them(self):
        with (
            ckptio.open_backend("s3://bucket/x", {"endpoint_url": DEAD}) as backend,
            pytest.raises(PermissionDeniedError, match=r"'key' and 'secret'.*anon=True"),
        ):
            backend.head("k")

    def test_an_unreachable_endpoint_is_named_within_seconds(self):
        for endpoint in [DEAD, "http://no-such-host.invalid"]:
            begin = time.monotonic()
            options = {"key": "k", "secret": "s", "endpoint_url": endpoint}
            with (
                ckptio.open_backend("s3://bucket/x", options) as backend,
                pytest.raises(StoreUnreachableError, match=f"{endpoint}.*cannot connect"),
            ):
                backend.head("k")
            assert time.monotonic() - begin < 10

    def test_a_profile_that_is_missing_is_named(self):
        with (
            ckptio.open_backend("s3://bucket/x", {"profile": "nobody"}) as backend,
            pytest.raises(InvalidOptionError, match="nobody"),
        ):
            backend.head("k")

    def test_a_profile_gives_credentials_and_endpoint(self, monkeypatch, tmp_path):
        config = tmp_path / "config"
        config.write_text(
            f"[profile mine]\naws_access_key_id=a\naws_secret_access_key=b\nendpoint_url={DEAD}\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        with (
            ckptio.open_backend("s3://bucket/x", {"profile": "mine"}) as backend,
            pytest.raises(StoreUnavailableError, match=DEAD),
        ):
            backend.head("k")

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"endpoint": "http://x"}, "endpoint"),
            ({"acces_key": "x", "regoin": "y"}, "acces_key, regoin"),
            ({"config_kwargs": {"nonsense": 1}}, "nonsense"),
            ({"session": object()}, "session"),
            ({"key": "a", "username": "b"}, "username"),
            ({"endpoint_url": "localhost:9000"}, "endpoint_url"),
            ({"endpoint_url": "http://me:hunter2@host"}, "'key' and 'secret'"),
        ],
    )
    def test_options_that_make_no_sense_are_named(self, options, named):
        with pytest.raises(InvalidOptionError, match=named) as caught:
            ckptio.open_backend("s3://bucket/x", options)
        assert "hunter2" not in str(caught.value)

    def test_every_option_of_s3fs_is_taken(self):
        import inspect

        import s3fs

        known = inspect.signature(s3fs.S3FileSystem.__init__).parameters
        options = {
            name: parameter.default
            for name, parameter in known.items()
            if parameter.default is not inspect.Parameter.empty
        }
        options |= {"profile": None, "use_listings_cache": False, "skip_instance_cache": True}
        ckptio.open_backend("s3://bucket/x", options).close()

    def test_fsspecs_own_configuration_counts(self, monkeypatch):
        import fsspec.config

        monkeypatch.setitem(
            fsspec.config.conf, "s3", {"endpoint_url": DEAD, "key": "a", "secret": "b"}
        )
        with (
            ckptio.open_backend("s3://bucket/x") as backend,
            pytest.raises(StoreUnavailableError, match=DEAD),
        ):
            backend.head("k")

    @pytest.mark.parametrize("uri", ["s3://", "s3:///key", "s3://bucket/../x", "s3://bucket//x"])
    def test_uris_that_name_no_place_are_refused(self, uri):
        with pytest.raises(InvalidURIError):
            ckptio.open_backend(uri)

    def test_a_parameter_of_a_wrong_type_is_named_but_not_shown(self):
        options = {"key": "k", "secret": "s", "endpoint_url": DEAD}
        options["s3_additional_kwargs"] = {"SSEKMSKeyId": 4711, "ContentType": {"hunter2"}}
        with (
            ckptio.open_backend("s3://bucket/x", options) as backend,
            pytest.raises(InvalidOptionError, match="ContentType") as caught,
        ):
            backend.put("k", b"1")
        assert "hunter2" not in str(caught.value)
        assert "4711" not in str(caught.value)

    @pytest.mark.parametrize(
        ("endpoint", "unsigned"), [(DEAD, False), (DEAD.replace("http:", "https:"), True)]
    )
    def test_a_body_is_hashed_for_its_signature_where_there_is_no_tls(self, endpoint, unsigned):
        options = {"key": "k", "secret": "s", "endpoint_url": endpoint}
        hashes = []
        with ckptio.open_backend("s3://bucket/x", options) as backend:
            backend._client.get().meta.events.register_first(
                "before-send.s3",
                lambda request, **_: hashes.append(request.headers["X-Amz-Content-SHA256"]),
            )
            with pytest.raises(StoreUnavailableError):
                backend.put("k", b"1")
        assert (hashes == [b"UNSIGNED-PAYLOAD"]) is unsigned

    def test_a_bucket_name_that_cannot_be_is_refused(self):
        options = {"key": "k", "secret": "s", "endpoint_url": DEAD}
        with (
            ckptio.open_backend("s3://no good/x", options) as backend,
            pytest.raises(InvalidURIError, match="bucket name"),
        ):
            backend.head("k")

    def test_a_missing_extra_says_what_to_install(self):
        code = (
            "import sys; sys.modules['botocore'] = None; import ckptio\n"
            "try: ckptio.open_backend('s3://bucket/x')\n"
            "except ckptio.DriverUnavailableError as error: print(error)"
        )
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
        assert b"pip install 'ckptio[s3]'" in child.stdout, child.stderr
