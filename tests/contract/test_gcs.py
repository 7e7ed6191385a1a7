"""The Google Cloud Storage driver keeps the backend contract, and promises of its own."""

import asyncio
import gzip
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from servers.fakegcs import fake_gcs
from servers.process import ServerUnavailableError, free_ports, unavailable
from servers.proxy import fault_proxy, lose_answer, respond

import ckptio
from ckptio.errors import (
    AlreadyExistsError,
    InvalidKeyError,
    InvalidOptionError,
    InvalidURIError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    StorageFullError,
    StoreUnavailableError,
)
from ckptio.operation import Operation
from ckptio.retry import RetryingBackend
from ckptio.testing import BackendContract
from ckptio_backends import gcs_client


@pytest.fixture(scope="module")
def server():
    try:
        with fake_gcs(in_memory=True) as server:
            yield server
    except ServerUnavailableError as error:
        unavailable(error)


@pytest.fixture
def backend(server):
    uri = f"{server.uri}/{uuid4().hex}"
    with ckptio.open_backend(uri, server.storage_options()) as backend:
        yield backend


class TestGcs(BackendContract):
    @pytest.fixture(autouse=True)
    def beside(self, server):
        self.server = server

    @pytest.fixture
    def backend(self, backend):
        return backend

    def raw_put(self, backend, key, data):
        self.server.raw_put(backend.describe(key), data)

    def raw_get(self, backend, key):
        return self.server.raw_get(backend.describe(key))


@contextmanager
def http_server(answer):
    """Answer every request as `answer(handler)` does, which gets the body read already."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server.seen.append(self.path)
            answer(self)

        do_POST = do_DELETE = do_GET  # noqa: N815 - the names are http.server's

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def status(code, body=b"{}", headers=()):
    def answer(handler):
        handler.send_response(code)
        for name, value in headers:
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def open_at(endpoint, **options):
    return ckptio.open_backend(
        "gs://bucket/root", {"token": "anon", "endpoint_url": endpoint} | options
    )


def fill(upload, data, part):
    offsets = [*range(0, len(data), part)]
    random.Random(4).shuffle(offsets)
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(lambda o: upload.write_part(o, data[o : o + part]), offsets):
            pass


# Uploads


@pytest.mark.parametrize("count", [32, 33, 1025])
def test_any_number_of_parts_is_composed_and_nothing_stays_behind(server, backend, count):
    data = random.Random(count).randbytes(count * 100 - 7)
    upload = backend.start_upload("big", len(data), 100)
    fill(upload, data, 100)
    upload.complete()
    assert server.raw_get(backend.describe("big")) == data
    assert server.raw_names(backend.uri) == [backend.describe("big").split("/", 3)[3]]


def test_objects_of_a_checkpoint_go_whole_so_that_no_temporary_ones_are_paid_for(server, backend):
    leaves = {f"leaf{i}": np.full((1 << 20, 7), i, np.float32) for i in range(5)}  # 28 MiB each
    with fault_proxy(server.endpoint) as proxy:
        options = server.storage_options(proxy.url)
        ckptio.save(f"{backend.uri}/step", leaves, storage_options=options)
        uploads = [r for r in proxy.requests if r.method == "POST"]
    objects = [info.size for info in backend.list("step/data")]
    assert len(objects) == len(uploads) - 1 == 3  # two leaves in each, and the manifest
    found = ckptio.restore(f"{backend.uri}/step", storage_options=server.storage_options())
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(found[name], leaf)


def content(start, piece):
    piece[:] = np.arange(start, start + len(piece), dtype=np.uint32).astype(np.uint8).data


def test_an_object_on_its_way_takes_little_memory(server, backend):
    size = 64 << 20
    buffer = memoryview(bytearray(1 << 20))
    backend.put_through("warm", 2 << 20, buffer, content)
    tracemalloc.start()
    try:
        backend.put_through("k", size, buffer, content)
        assert tracemalloc.get_traced_memory()[1] < size // 4
    finally:
        tracemalloc.stop()
    assert backend.read("k") == bytes(range(256)) * (size >> 8)


def test_an_object_that_broke_off_is_made_again(server, backend):
    size, asked = 8 << 20, []

    def fill(start, piece):
        asked.append(start)
        content(start, piece)

    with fault_proxy(server.endpoint) as proxy:
        rule = proxy.add(lose_answer(), method="POST", path="/upload/", times=1)
        options = server.storage_options(proxy.url)
        with ckptio.open_backend(backend.uri, options) as shaken:
            retrying = RetryingBackend(shaken, Operation("testing"))
            retrying.put_through("k", size, memoryview(bytearray(1 << 20)), fill)
    assert rule.hits == 1
    assert asked == [*range(0, size, 1 << 20)] * 2
    assert backend.read("k") == bytes(range(256)) * (size >> 8)


def test_an_object_that_is_refused_is_not_made_to_its_end():
    asked = []

    class Impatient(BaseHTTPRequestHandler):
        def do_POST(self):  # without reading the body
            status(403)(self)

        def log_message(self, *args):
            pass

    def fill(start, piece):
        asked.append(start)

    with ThreadingHTTPServer(("127.0.0.1", 0), Impatient) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            with open_at(f"http://127.0.0.1:{server.server_port}") as backend:
                buffer = memoryview(bytearray(1 << 20))
                with pytest.raises(StorageError):
                    backend.put_through("k", 1 << 40, buffer, fill)
        finally:
            server.shutdown()
            thread.join()
    assert len(asked) < 1000


def test_parts_are_hidden_and_end_alike_for_a_lifecycle_rule(server, backend):
    upload = backend.start_upload("dir/big", 20, 10)
    upload.write_part(10, b"x" * 10)
    assert [*backend.list_children()] == []
    (name,) = server.raw_names(backend.uri)
    assert name.endswith(".ckptio-part")
    with pytest.raises(InvalidKeyError, match=r"\.ckptio-parts"):
        backend.head(name.removeprefix(backend.uri.split("/", 3)[3] + "/"))
    upload.abort()
    assert server.raw_names(backend.uri) == []


def test_abandoned_uploads_of_inner_prefixes_are_discarded_whole(server, backend):
    with ckptio.open_backend(f"{backend.uri}/step-1", server.storage_options()) as inner:
        torn = [inner.start_upload("a", 20, 10), inner.start_upload("b", 30, 10)]
        for upload in torn:
            upload.write_part(0, b"x" * 10)
        torn[1].write_part(10, b"x" * 10)
    backend.put("kept", b"1")
    assert backend.discard_uploads(3600) == 0
    assert backend.discard_uploads(0) == 2
    assert [info.key for info in backend.list()] == ["kept"]
    assert len(server.raw_names(backend.uri)) == 1


def test_an_upload_without_all_its_parts_is_not_completed(server, backend):
    upload = backend.start_upload("k", 30, 10)
    upload.write_part(20, b"x" * 10)
    with pytest.raises(InvalidOptionError, match="part at 0"):
        upload.complete()
    with pytest.raises(InvalidOptionError, match="no part of"):
        upload.write_part(5, b"x" * 10)
    upload.abort()
    assert not backend.exists("k")


def test_completing_again_changes_nothing(backend):
    upload = backend.start_upload("k", 20, 10)
    fill(upload, b"0123456789" * 2, 10)
    first = upload.complete()
    assert upload.complete() == first == backend.head("k")


def test_an_upload_whose_answers_got_lost_is_completed_by_trying_again(server, backend):
    data = random.Random(6).randbytes(40 * 100)
    with fault_proxy(server.endpoint) as proxy:
        lost = proxy.add(lose_answer(), method="POST", path="/compose", times=3)
        options = server.storage_options(proxy.url)
        with ckptio.open_backend(backend.uri, options) as shaken:
            upload = shaken.start_upload("k", len(data), 100)
            fill(upload, data, 100)
            failures = 0
            while True:
                try:
                    upload.complete()
                    break
                except StoreUnavailableError:
                    failures += 1
    assert lost.hits == 3
    assert 0 < failures <= 3
    assert server.raw_get(backend.describe("k")) == data
    assert len(server.raw_names(backend.uri)) == 1


def test_temporary_objects_are_deleted_though_deleting_fails_at_first(server, backend):
    with fault_proxy(server.endpoint) as proxy:
        busy = proxy.add(respond(503), method="DELETE", times=1)
        options = server.storage_options(proxy.url)
        with ckptio.open_backend(backend.uri, options) as shaken:
            upload = shaken.start_upload("k", 20, 10)
            fill(upload, b"0123456789" * 2, 10)
            upload.complete()
    assert busy.hits == 1
    assert len(server.raw_names(backend.uri)) == 1


def test_an_upload_is_complete_though_its_temporary_objects_cannot_be_deleted(server, backend):
    with fault_proxy(server.endpoint) as proxy:
        proxy.add(respond(403), method="DELETE", times=None)
        options = server.storage_options(proxy.url)
        with ckptio.open_backend(backend.uri, options) as shaken:
            upload = shaken.start_upload("k", 20, 10)
            fill(upload, b"0123456789" * 2, 10)
            upload.complete()
    assert [info.key for info in backend.list()] == ["k"]
    assert len(server.raw_names(backend.uri)) == 3
    assert backend.discard_uploads(0) == 1


def test_large_objects_are_created_conditionally_too(server, backend):
    data = random.Random(5).randbytes(20 << 20)
    info = backend.put("k", data, mode="create")
    with pytest.raises(AlreadyExistsError):
        backend.put("k", data[::-1], mode="create")
    backend.put("k", data[::-1], if_match=info.etag)
    assert server.raw_get(backend.describe("k")) == data[::-1]


@pytest.mark.parametrize("etag", ["0", "abc", "", "１"])
def test_an_etag_of_another_store_never_matches(backend, etag):
    with pytest.raises(PreconditionFailedError):
        backend.put("k", b"1", if_match=etag)
    assert not backend.exists("k")


# Reading and listing


def test_bytes_come_as_they_are_stored_and_are_never_unpacked(server, backend):
    packed = gzip.compress(b"text" * 1000)
    bucket, name = backend.describe("k").removeprefix("gs://").split("/", 1)
    metadata = json.dumps({"name": name, "contentEncoding": "gzip"}).encode()
    body = b"--b\r\nContent-Type: application/json\r\n\r\n%s\r\n--b\r\n\r\n%s\r\n--b--\r\n"
    request = urllib.request.Request(
        f"{server.bare}/upload/storage/v1/b/{bucket}/o?uploadType=multipart",
        body % (metadata, packed),
        {**server.headers, "Content-Type": "multipart/related; boundary=b"},
    )
    urllib.request.urlopen(request, timeout=30).close()
    assert backend.head("k").size == len(packed)
    assert backend.read("k") == packed


def test_long_lists_come_in_pages_that_are_put_together(server, backend):
    keys = [f"run/{i:02}/x" for i in range(20)] + [f"run/{i:02}.txt" for i in range(20)]
    with ThreadPoolExecutor(8) as pool:
        [*pool.map(lambda key: backend.put(key, b"1"), keys)]
    assert [info.key for info in backend.list()] == sorted(keys)
    children = sorted(key.removeprefix("run/").removesuffix("x") for key in keys)
    assert [*backend.list_children("run")] == children


def test_directory_markers_of_other_tools_are_no_objects(server, backend):
    server.raw_put(backend.describe("dir") + "/", b"")
    server.raw_put(backend.describe("dir/k"), b"1")
    assert [info.key for info in backend.list()] == ["dir/k"]
    assert [*backend.list_children("dir")] == ["k"]


# Opening


def test_gcs_is_the_same_driver(server, backend):
    backend.put("k", b"1")
    uri = backend.uri.replace("gs://", "gcs://")
    with ckptio.open_backend(uri, server.storage_options()) as other:
        assert type(other) is type(backend)
        assert other.read("k") == b"1"


def test_the_emulators_environment_variable_counts(server, backend, monkeypatch):
    backend.put("k", b"1")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
    with ckptio.open_backend(backend.uri, {"token": server.token}) as other:
        assert other.read("k") == b"1"


def test_gcsfs_options_are_taken(server, backend):
    backend.put("k", b"1")
    options = server.storage_options() | {
        "access": "read_write",
        "cache_timeout": 0,
        "consistency": "md5",
        "project": "p",
        "requester_pays": True,
        "session_kwargs": {"trust_env": True},
        "skip_instance_cache": True,
        "timeout": 30,
        "use_listings_cache": False,
    }
    with ckptio.open_backend(backend.uri, options) as other:
        assert other.read("k") == b"1"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"anon": True, "tokn": "x"}, "anon.*tokn"),
        ({"access": "everything"}, "everything"),
        ({"endpoint_url": "127.0.0.1:4443"}, "endpoint_url"),
    ],
)
def test_options_that_cannot_work_are_named(options, named):
    with pytest.raises(InvalidOptionError, match=named):
        ckptio.open_backend("gs://bucket/root", options)


@pytest.mark.parametrize("uri", ["gs://", "gs:///key", "gs://bucket//key", "gs://bucket/a/../b"])
def test_uris_that_name_no_place_are_refused(uri):
    with pytest.raises(InvalidURIError):
        ckptio.open_backend(uri, {"token": "anon"})


def test_a_missing_gcsfs_says_what_to_install():
    code = (
        "import sys, ckptio\n"
        "sys.modules['gcsfs'] = None\n"
        "try: ckptio.open_backend('gs://bucket/root')\n"
        "except ckptio.DriverUnavailableError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install 'ckptio[gcs]'" in done.stdout, done.stderr


def test_works_inside_a_running_event_loop(backend):
    async def main():
        backend.put("k", b"1")
        return backend.read("k")

    assert asyncio.run(main()) == b"1"


def test_opening_and_closing_leaks_no_files(server, backend):
    def once():
        with ckptio.open_backend(backend.uri, server.storage_options()) as other:
            other.exists("k")
        return len(os.listdir("/proc/self/fd"))

    first = once()
    assert [once() for _ in range(10)][-1] <= first


# What goes wrong


def test_a_missing_bucket_is_named(server):
    with ckptio.open_backend("gs://no-such-bucket/x", server.storage_options()) as backend:
        for call in (
            lambda: backend.put("k", b"1"),
            lambda: backend.head("k"),
            lambda: [*backend.list()],
        ):
            with pytest.raises(NotFoundError, match="bucket 'no-such-bucket'"):
                call()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("The specified bucket does not exist.", "bucket 'bucket' does not exist"),
        ("No such object: bucket/root/k", "gs://bucket/root/k does not exist$"),
    ],
)
def test_a_missing_bucket_is_told_from_a_missing_object(message, text):
    body = json.dumps({"error": {"code": 404, "message": message}}).encode()
    with (
        http_server(status(404, body)) as server,
        open_at(server.url) as backend,
        pytest.raises(NotFoundError, match=text),
    ):
        backend.head("k")


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (400, "invalid", StorageError),
        (401, "authError", PermissionDeniedError),
        (403, "forbidden", PermissionDeniedError),
        (403, "rateLimitExceeded", StoreUnavailableError),
        (403, "quotaExceeded", StorageFullError),
        (408, "", StoreUnavailableError),
        (412, "orgPolicyConstraintFailed", PermissionDeniedError),
        (429, "rateLimitExceeded", StoreUnavailableError),
        (500, "backendError", StoreUnavailableError),
        (502, "", StoreUnavailableError),
        (503, "backendError", StoreUnavailableError),
        (504, "", StoreUnavailableError),
    ],
)
def test_an_answer_is_the_error_that_fits_after_one_request(code, reason, kind):
    body = {"error": {"code": code, "message": "said so", "errors": [{"reason": reason}]}}
    with (
        http_server(status(code, json.dumps(body).encode())) as server,
        open_at(server.url) as backend,
    ):
        calls = (
            lambda: backend.put("k", b"1"),
            lambda: backend.read_into("k", 0, memoryview(bytearray(5))),
            lambda: backend.head("k"),
            lambda: [*backend.list()],
            lambda: backend.delete(["k"]),
        )
        for call in calls:
            with pytest.raises(kind, match="gs://bucket/root") as caught:
                call()
            assert type(caught.value) is kind
            assert "said so" in str(caught.value)
            assert server.url in str(caught.value)
        assert len(server.seen) == len(calls)


@pytest.mark.parametrize("content", [b"<html>a proxy's page</html>", b""])
def test_an_answer_of_something_else_is_an_error(content):
    with http_server(status(200, content)) as server, open_at(server.url) as backend:
        for call in (
            lambda: backend.put("k", b"1"),
            lambda: backend.head("k"),
            lambda: [*backend.list()],
            lambda: backend.read_into("k", 3, memoryview(bytearray(5))),
        ):
            with pytest.raises(StorageError, match="gs://bucket/root"):
                call()


def test_a_body_that_is_cut_off_is_worth_a_retry():
    def cut(handler):
        handler.send_response(206)
        handler.send_header("Content-Range", "bytes 0-99/100")
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(b"x" * 50)
        handler.close_connection = True

    with (
        http_server(cut) as server,
        open_at(server.url) as backend,
        pytest.raises(StoreUnavailableError, match="gs://bucket/root/k"),
    ):
        backend.read_into("k", 0, memoryview(bytearray(100)))


def test_a_dead_endpoint_is_named():
    (port,) = free_ports(1)
    with open_at(f"http://127.0.0.1:{port}") as backend:
        for call in (lambda: backend.put("k", b"1"), lambda: backend.exists("k")):
            with pytest.raises(StoreUnavailableError, match=f"127.0.0.1:{port}"):
                call()


@pytest.mark.parametrize("size", [1, 32 << 20])
def test_a_server_that_stalls_is_given_up(size, monkeypatch):
    monkeypatch.setattr(gcs_client, "_STALL", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with open_at(url) as backend:
            for call in (lambda: backend.put("k", bytes(size)), lambda: backend.head("k")):
                with pytest.raises(StoreUnavailableError, match=url):
                    call()


def test_a_request_takes_no_longer_than_the_timeout_that_was_given():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        open_at(f"http://127.0.0.1:{silent.getsockname()[1]}", requests_timeout=0.5) as backend,
        pytest.raises(StoreUnavailableError, match="in time"),
    ):
        backend.head("k")


# Credentials


@pytest.fixture(scope="module")
def account():
    """A service account that exists nowhere."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "id-of-key",
        "private_key": text.decode(),
        "client_email": "somebody@p.iam.gserviceaccount.com",
        "token_uri": "",
    }


def test_refused_credentials_are_one_clear_error(server, account):
    refusal = json.dumps({"error": "invalid_grant", "error_description": "no such account"})
    started = time.monotonic()
    with http_server(status(400, refusal.encode())) as issuer:
        options = server.storage_options() | {"token": {**account, "token_uri": issuer.url}}
        with (
            ckptio.open_backend(f"{server.uri}/x", options) as backend,
            pytest.raises(PermissionDeniedError, match="'token'") as caught,
        ):
            backend.head("k")
    assert time.monotonic() - started < 10
    assert "PRIVATE" not in str(caught.value) + repr(backend)


def test_an_unreachable_issuer_of_credentials_is_worth_a_retry(server, account):
    (port,) = free_ports(1)
    options = server.storage_options() | {
        "token": {**account, "token_uri": f"http://127.0.0.1:{port}"}
    }
    with (
        ckptio.open_backend(f"{server.uri}/x", options) as backend,
        pytest.raises(StoreUnavailableError, match="credentials"),
    ):
        backend.head("k")


def test_an_access_token_is_sent_and_never_shown():
    with http_server(status(401)) as server, open_at(server.url, token="ya29.secret") as backend:
        with pytest.raises(PermissionDeniedError) as caught:
            backend.head("k")
        assert "secret" not in str(caught.value) + repr(backend)
        assert "without credentials" not in str(caught.value)
        assert len(server.seen) == 1


@pytest.mark.parametrize(
    "token", ["no/such/file.json", {"client_id": "secret"}, {"private_key": "secret"}, 3, "browser"]
)
def test_credentials_that_make_no_sense_are_refused_without_showing_them(server, token):
    options = server.storage_options() | {"token": token}
    with ckptio.open_backend(f"{server.uri}/x", options) as backend:
        with pytest.raises(InvalidOptionError, match="'token'") as caught:
            backend.head("k")
        assert "secret" not in str(caught.value)


def test_anonymous_access_looks_for_no_credentials(server, monkeypatch):
    with http_server(status(500)) as metadata:
        address = metadata.url.removeprefix("http://")
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        monkeypatch.setenv("GCE_METADATA_IP", address)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "no-such-file.json")
        options = server.storage_options() | {"token": "anon"}
        with ckptio.open_backend(f"{server.uri}/x", options) as backend:
            backend.exists("k")
        assert metadata.seen == []


def test_refusals_without_credentials_say_so():
    with (
        http_server(status(401)) as server,
        open_at(server.url) as backend,
        pytest.raises(PermissionDeniedError, match="without credentials"),
    ):
        backend.head("k")


# Processes

FORKS = """
import gc, os, sys, ckptio
backend = ckptio.open_backend(sys.argv[1], {"token": "anon", "endpoint_url": sys.argv[2]})
backend.put("k", b"1")
for use in (True, False):
    child = os.fork()
    if child == 0:
        if use:
            assert backend.read("k") == b"1"
        del backend
        gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert backend.read("k") == b"1"
"""


def test_children_that_end_leave_the_parents_connections_alone(server):
    if server.token != "anon":
        pytest.skip("the child processes have no credentials")
    arguments = [f"{server.uri}/{uuid4().hex}", server.endpoint]
    command = [sys.executable, "-X", "dev", "-W", "ignore::DeprecationWarning", "-c", FORKS]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
