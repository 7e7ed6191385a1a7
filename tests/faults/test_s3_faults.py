"""What the S3 driver makes of servers and networks that fail, and what it asks of good ones."""

import contextlib
import random
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers.process import ServerUnavailableError, unavailable
from servers.proxy import (
    cut,
    end_early,
    fault_proxy,
    lose_answer,
    refuse_connection,
    respond,
    s3_error,
    stall,
)
from servers.seaweedfs import seaweedfs

import ckptio
from ckptio.errors import (
    AlreadyExistsError,
    CorruptionError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    StoreUnavailableError,
)

MIB = 1 << 20
SIZE = 3 * MIB + 5
DATA = random.Random(7).randbytes(SIZE)


@pytest.fixture(scope="module")
def server():
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(seaweedfs())
        except ServerUnavailableError as error:
            unavailable(error)


@pytest.fixture
def proxy(server):
    with fault_proxy(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def backend(server, proxy):
    uri = f"{server.uri}/{uuid.uuid4().hex}"
    with ckptio.open_backend(uri, server.storage_options(proxy.url)) as backend:
        backend.put("k", DATA)
        proxy.clear()
        yield backend


def fill(backend, start=0, size=SIZE):
    buffer = bytearray(size)
    backend.read_into("k", start, memoryview(buffer))
    return bytes(buffer)


def every_call(backend):
    upload = backend.start_upload("other", 3, 5 * MIB)
    upload.write_part(0, b"abc")
    return {
        "put": lambda: backend.put("k", DATA),
        "create": lambda: backend.put("new", DATA, mode="create"),
        "read_into": lambda: fill(backend),
        "read": lambda: backend.read("k"),
        "head": lambda: backend.head("k"),
        "list": lambda: [*backend.list()],
        "list_children": lambda: [*backend.list_children()],
        "delete": lambda: backend.delete(["absent"]),
        "start_upload": lambda: backend.start_upload("other", 3, 5 * MIB),
        "write_part": lambda: upload.write_part(0, b"abc"),
        "complete": upload.complete,
        "abort": upload.abort,
        "discard_uploads": lambda: backend.discard_uploads(3600),
    }


def assert_says_where(error, backend, proxy):
    assert backend.uri in str(error)
    assert proxy.url in str(error)
    assert error.__cause__ is not None


BUSY = [
    (503, s3_error("SlowDown")),
    (503, s3_error("ServiceUnavailable")),
    (500, s3_error("InternalError")),
    (429, s3_error("TooManyRequests")),
    (400, s3_error("RequestTimeout")),
    (409, s3_error("OperationAborted")),
    (502, b"<html><body>Bad gateway</body></html>"),
    (504, b""),
]


class TestBusy:
    @pytest.mark.parametrize(("status", "body"), BUSY)
    def test_each_answer_that_may_go_away_is_left_to_the_caller_to_retry(
        self, backend, proxy, status, body
    ):
        rule = proxy.add(respond(status, body, [("Retry-After", "1")]))
        with pytest.raises(StoreUnavailableError) as caught:
            backend.read("k")
        assert_says_where(caught.value, backend, proxy)
        assert len(proxy.requests) == rule.hits == 1
        assert backend.read("k") == DATA

    def test_every_call_says_so(self, backend, proxy):
        calls = every_call(backend)
        proxy.add(respond(503, s3_error("SlowDown")), times=None)
        for name, call in calls.items():
            with pytest.raises(StoreUnavailableError) as caught:
                call()
            assert_says_where(caught.value, backend, proxy)
            assert name  # names the call in a failure's locals
        proxy.clear()
        assert calls["complete"]().size == 3

    def test_an_error_after_the_ok_of_a_completion(self, backend, proxy):
        upload = backend.start_upload("big", 3, 5 * MIB)
        upload.write_part(0, b"abc")
        proxy.add(respond(200, s3_error("InternalError")), method="POST", path="/big")
        with pytest.raises(StoreUnavailableError, match="big"):
            upload.complete()
        assert not backend.exists("big")
        upload.complete()
        assert backend.read("big") == b"abc"

    def test_an_answer_that_makes_no_sense(self, backend, proxy):
        proxy.add(respond(200, b"<ListBucketResult><Contents>"))
        with pytest.raises(StoreUnavailableError):
            [*backend.list()]


class TestRefused:
    @pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "ExpiredToken"])
    def test_permission_is_denied_once_and_in_words(self, backend, proxy, code):
        calls = every_call(backend)
        proxy.clear()
        status = 400 if code == "ExpiredToken" else 403
        for name, call in calls.items():
            if name == "head":
                continue  # has no body that could say so
            proxy.requests.clear()
            proxy.add(respond(status, s3_error(code)))
            with pytest.raises(PermissionDeniedError, match=code) as caught:
                call()
            assert_says_where(caught.value, backend, proxy)
            assert len(proxy.requests) == 1

    def test_a_head_that_is_forbidden_says_what_may_be_missing(self, backend, proxy):
        proxy.add(respond(403))
        with pytest.raises(PermissionDeniedError, match="s3:ListBucket"):
            backend.head("k")

    def test_a_bucket_that_may_not_be_looked_at_is_no_missing_bucket(self, backend, proxy):
        proxy.add(respond(403), method="HEAD", when=lambda r: r.path.strip("/").count("/") == 0)
        with pytest.raises(NotFoundError, match="absent"):
            backend.head("absent")

    def test_what_is_not_deleted_is_named(self, backend, proxy):
        def answer(*codes):
            errors = (
                f"<Error><Key>{backend.uri.split('/')[-1]}/{i}</Key><Code>{code}</Code>"
                f"<Message>m</Message></Error>"
                for i, code in enumerate(codes)
            )
            return respond(200, f"<DeleteResult>{''.join(errors)}</DeleteResult>".encode())

        for codes, kind in [
            (["AccessDenied"], PermissionDeniedError),
            (["SlowDown", "InternalError"], StoreUnavailableError),
            (["SlowDown", "AccessDenied"], StorageError),
        ]:
            proxy.add(answer(*codes))
            with pytest.raises(kind, match=f"{len(codes)} not deleted: 0: {codes[0]}") as caught:
                backend.delete(["0", "1"])
            assert type(caught.value) is kind
        proxy.add(answer("NoSuchKey"))
        backend.delete(["0"])


class TestCutOff:
    @pytest.mark.parametrize("size", [0, 1, 70_000, SIZE - 1])
    @pytest.mark.parametrize("end", [cut, end_early])
    def test_a_body_that_ends_early_is_worth_a_retry(self, backend, proxy, end, size):
        for read in [lambda: fill(backend), lambda: backend.read("k")]:
            rule = proxy.add(end(size), method="GET")
            with pytest.raises(StoreUnavailableError) as caught:
                read()
            assert_says_where(caught.value, backend, proxy)
            assert rule.hits == 1
            assert read() == DATA

    def test_a_server_that_sends_less_than_it_was_asked_for(self, backend, proxy):
        total = SIZE
        proxy.add(respond(206, DATA[:5], [("Content-Range", f"bytes 0-4/{total}")]))
        with pytest.raises(StoreUnavailableError, match="sends 5 bytes"):
            fill(backend)

    def test_a_server_that_sends_another_range(self, backend, proxy):
        total = SIZE
        proxy.add(respond(206, DATA[:5], [("Content-Range", f"bytes 0-4/{total}")]))
        with pytest.raises(StoreUnavailableError, match="asked for 5 bytes from 3"):
            fill(backend, 3, 5)

    def test_an_object_that_is_shorter_than_asked_for_is_corrupt(self, backend):
        with pytest.raises(CorruptionError, match=f"ends at byte {SIZE}"):
            fill(backend, 10, SIZE)

    def test_a_connection_that_breaks_before_the_answer(self, backend, proxy):
        calls = every_call(backend)
        for name, call in calls.items():
            proxy.add(refuse_connection())
            with pytest.raises(StoreUnavailableError) as caught:
                call()
            assert_says_where(caught.value, backend, proxy)
            if name not in ("complete", "abort"):
                call()


class TestStalled:
    @pytest.fixture
    def impatient(self, backend, server, proxy):
        options = server.storage_options(proxy.url) | {"config_kwargs": {"read_timeout": 2}}
        with ckptio.open_backend(backend.uri, options) as impatient:
            yield impatient

    def test_every_call_gives_up(self, impatient, proxy):
        calls = every_call(impatient)
        rule = proxy.add(stall(), times=None)

        def call_one(call):
            begin = time.monotonic()
            with pytest.raises(StoreUnavailableError, match="stopped answering") as caught:
                call()
            assert_says_where(caught.value, impatient, proxy)
            return time.monotonic() - begin

        with ThreadPoolExecutor(len(calls)) as pool:
            assert max(pool.map(call_one, calls.values())) < 20
        assert rule.hits == len(calls)

    @pytest.mark.parametrize("size", [0, 100_000])
    def test_a_body_that_stalls_gives_up(self, impatient, proxy, size):
        for read in [lambda: fill(impatient), lambda: impatient.read("k")]:
            rule = proxy.add(stall(after=size), method="GET")
            with pytest.raises(StoreUnavailableError, match="stopped answering"):
                read()
            rule.released.set()
            assert read() == DATA


class TestLostAnswers:
    def test_a_create_that_was_carried_out_is_found_by_the_retry(self, backend, proxy):
        proxy.add(lose_answer(), method="PUT")
        with pytest.raises(StoreUnavailableError):
            backend.put("new", b"ours", mode="create")
        with pytest.raises(AlreadyExistsError):
            backend.put("new", b"ours", mode="create")
        assert backend.read("new") == b"ours"

    def test_a_replacement_that_was_carried_out_is_found_by_the_retry(self, backend, proxy):
        etag = backend.head("k").etag
        proxy.add(lose_answer(), method="PUT")
        with pytest.raises(StoreUnavailableError):
            backend.put("k", b"ours", if_match=etag)
        with pytest.raises(PreconditionFailedError):
            backend.put("k", b"ours", if_match=etag)
        assert backend.read("k") == b"ours"

    def test_a_completion_that_was_carried_out_succeeds_when_repeated(self, backend, proxy):
        upload = backend.start_upload("big", 6 * MIB, 5 * MIB)
        upload.write_part(5 * MIB, b"y" * MIB)
        proxy.add(lose_answer(), method="PUT")
        with pytest.raises(StoreUnavailableError):
            upload.write_part(0, b"x" * 5 * MIB)
        upload.write_part(0, b"x" * 5 * MIB)
        proxy.add(lose_answer(), method="POST")
        with pytest.raises(StoreUnavailableError):
            upload.complete()
        info = upload.complete()
        assert (info.size, info.etag) == (6 * MIB, backend.head("big").etag)
        assert backend.read("big") == b"x" * 5 * MIB + b"y" * MIB

    def test_an_abort_that_was_carried_out_succeeds_when_repeated(self, backend, proxy):
        upload = backend.start_upload("big", 6 * MIB, 5 * MIB)
        upload.write_part(0, b"x" * 5 * MIB)
        proxy.add(lose_answer(), method="DELETE")
        with pytest.raises(StoreUnavailableError):
            upload.abort()
        upload.abort()
        assert backend.discard_uploads(0) == 0


class TestConflicts:
    @pytest.mark.parametrize("condition", [{"mode": "create"}, {"if_match": '"x"'}])
    def test_a_conflict_in_progress_is_worth_a_retry(self, backend, proxy, condition):
        proxy.add(respond(409, s3_error("ConditionalRequestConflict")))
        with pytest.raises(StoreUnavailableError, match="ConditionalRequestConflict"):
            backend.put("new", b"1", **condition)
        assert not backend.exists("new")

    def test_a_server_without_conditions_is_not_asked_again(self, backend, proxy):
        proxy.add(respond(501, s3_error("NotImplemented")))
        with pytest.raises(StorageError, match="NotImplemented") as caught:
            backend.put("new", b"1", mode="create")
        assert not isinstance(caught.value, StoreUnavailableError)


REGION = "<Region>eu-central-1</Region>"
MOVED = [
    (301, s3_error("PermanentRedirect"), [("x-amz-bucket-region", "eu-central-1")]),
    (400, s3_error("AuthorizationHeaderMalformed", extra=REGION), []),
    (
        400,
        s3_error("IllegalLocationConstraintException"),
        [("x-amz-bucket-region", "eu-central-1")],
    ),
]


class TestOtherRegion:
    @pytest.mark.parametrize(("status", "body", "headers"), MOVED)
    def test_the_region_to_use_is_named(self, backend, proxy, status, body, headers):
        calls = every_call(backend)
        proxy.add(respond(status, body, headers), times=None)
        for name, call in calls.items():
            if name == "head" and not headers:
                continue  # has no body that could say so
            with pytest.raises(StorageError, match="'region_name': 'eu-central-1'") as caught:
                call()
            assert_says_where(caught.value, backend, proxy)
            assert not isinstance(caught.value, StoreUnavailableError)

    def test_without_a_name_it_is_said_that_there_is_another(self, backend, proxy):
        proxy.add(respond(301, s3_error("PermanentRedirect")), times=None)
        for call in [lambda: backend.read("k"), lambda: backend.head("k")]:
            with pytest.raises(StorageError, match="another region"):
                call()

    def test_a_server_that_names_its_region_is_asked_again_in_its_terms(self, backend, proxy):
        body = s3_error("AuthorizationHeaderMalformed", extra=REGION)
        proxy.add(respond(400, body), method="PUT")
        backend.put("moved", DATA)
        assert backend.read("moved") == DATA
        assert "eu-central-1" in proxy.requests[1].headers["authorization"]


class TestRequests:
    """What good servers are asked: the least that does it."""

    def counts(self, proxy):
        return [request.method for request in proxy.requests]

    def test_each_call_is_one_request(self, backend, proxy):
        calls = every_call(backend)
        for call in calls.values():
            proxy.clear()
            call()
            assert len(proxy.requests) == 1

    def test_an_upload_is_its_parts_and_two_more(self, backend, proxy):
        upload = backend.start_upload("big", 11 * MIB, 5 * MIB)
        for offset in range(0, 11 * MIB, 5 * MIB):
            upload.write_part(offset, b"x" * min(5 * MIB, 11 * MIB - offset))
        upload.complete()
        assert self.counts(proxy) == ["POST", "PUT", "PUT", "PUT", "POST"]
        assert sum(r.sent for r in proxy.requests if r.method == "PUT") == 11 * MIB

    def test_a_ranged_read_moves_that_range(self, backend, proxy):
        assert fill(backend, MIB, 1000) == DATA[MIB : MIB + 1000]
        assert [(r.method, r.status, r.received) for r in proxy.requests] == [("GET", 206, 1000)]

    def test_a_missing_bucket_is_looked_for_once(self, backend, proxy):
        for _ in range(3):
            assert not backend.exists("absent")
        assert self.counts(proxy) == ["HEAD"] * 4

    def test_deleting_is_batched(self, backend, proxy):
        backend.delete(f"absent/{i}" for i in range(1001))
        assert self.counts(proxy) == ["POST", "POST"]

    def test_no_request_waits_for_consent_to_its_body(self, backend, proxy):
        backend.put("big", DATA)
        assert all("expect" not in request.headers for request in proxy.requests)

    def test_an_endpoint_of_the_environment_is_asked_by_path(self, server, proxy, monkeypatch):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        options = server.storage_options()
        del options["endpoint_url"]
        with ckptio.open_backend(f"{server.uri}/env", options) as backend:
            backend.put("k", b"1")
        assert proxy.requests[0].path == f"/{server.bucket}/env/k"

    def test_one_level_of_many_objects_is_one_request(self, backend, proxy):
        for i in range(30):
            backend.put(f"{i % 3}/{i}", b"")
        proxy.clear()
        assert [*backend.list_children()] == ["0/", "1/", "2/", "k"]
        assert self.counts(proxy) == ["GET"]

    def test_pages_are_read_to_the_end(self, server, backend, proxy):
        options = server.storage_options(proxy.url) | {"s3_additional_kwargs": {"MaxKeys": 4}}
        keys = sorted(f"many/{i}" for i in range(10))
        for key in keys:
            backend.put(key, b"")
        proxy.clear()
        with ckptio.open_backend(backend.uri, options) as small_pages:
            assert [info.key for info in small_pages.list("many")] == keys
            assert [*small_pages.list_children("many")] == [key[5:] for key in keys]
        assert self.counts(proxy) == ["GET"] * 6

    @pytest.mark.parametrize("anon", [False, True])
    def test_anonymous_access_looks_for_no_credentials(self, server, monkeypatch, tmp_path, anon):
        for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"]:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
        for name in ["AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BOTO_CONFIG"]:
            monkeypatch.setenv(name, str(tmp_path / "none"))
        with fault_proxy(server.endpoint) as metadata:
            metadata.add(respond(404), times=None)
            monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
            options = {"anon": anon, "endpoint_url": server.endpoint}
            with (
                ckptio.open_backend(f"{server.uri}/x", options) as backend,
                pytest.raises(PermissionDeniedError),
            ):
                backend.read("k")
            assert bool(metadata.requests) is not anon
