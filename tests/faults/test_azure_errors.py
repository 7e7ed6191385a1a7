"""What goes wrong with Azure becomes one clear error, soon, and no credential is told to anyone."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import logging
import os
import socket
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

import pytest
from azure.storage.blob import ContainerSasPermissions, generate_container_sas
from servers.azurite import ACCOUNT, KEY, azurite
from servers.process import ServerUnavailableError, free_ports, unavailable

import ckptio

SECONDS = 10
"""Within which each error has to come."""


@pytest.fixture(scope="module")
def server():
    try:
        with azurite() as server:
            yield server
    except ServerUnavailableError as error:
        unavailable(error)


@pytest.fixture(scope="module")
def sas():
    expiry = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    everything = ContainerSasPermissions.from_string("racwdl")
    return generate_container_sas(ACCOUNT, "ckptio-test", KEY, None, everything, expiry)


def calls(backend):
    """Return every call that a backend takes, by name."""

    def upload():
        upload = backend.start_upload("k", 8, 8)
        upload.write_part(0, b"12345678")
        upload.complete()

    return {
        "put": lambda: backend.put("k", b"x" * 100),
        "put 8 MiB": lambda: backend.put("k", bytes(8 << 20)),
        "create": lambda: backend.put("k", b"", mode="create"),
        "if_match": lambda: backend.put("k", b"1", if_match="0x1"),
        "upload": upload,
        "read_into": lambda: backend.read_into("k", 0, memoryview(bytearray(4))),
        "head": lambda: backend.head("k"),
        "list": lambda: [*backend.list()],
        "list_children": lambda: [*backend.list_children()],
        "delete": lambda: backend.delete(["k"]),
        "delete two": lambda: backend.delete(["k", "l"]),
    }


NAMES = list(calls(None))


@contextlib.contextmanager
def nothing_told(caplog, *secrets):
    """Check that no secret is in what is logged meanwhile."""
    with caplog.at_level(logging.DEBUG):
        yield
    for record in caplog.records:
        assert not any(secret in record.getMessage() for secret in secrets)


def raised(kind, call, *secrets):
    """Return the message of the error that a call raises soon, once no secret is found in it."""
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - start < SECONDS
    trace = "".join(traceback.format_exception(caught.value))
    assert not any(secret in trace for secret in secrets)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_key_is_permission_denied(server, caplog, name):
    wrong = "d3JvbmcK" + KEY[8:]
    uri = f"{server.uri}/{uuid4().hex}"
    with (
        ckptio.open_backend(uri, server.storage_options(key=wrong)) as backend,
        nothing_told(caplog, wrong),
    ):
        text = raised(ckptio.PermissionDeniedError, calls(backend)[name], wrong)
    assert uri in text
    assert server.endpoint() in text
    assert "403" in text


def test_a_key_that_is_none_says_so(server):
    key = "not-base64"
    with ckptio.open_backend(server.uri, server.storage_options(key=key)) as backend:
        text = raised(ckptio.PermissionDeniedError, lambda: backend.head("k"), key)
    assert "no usable credentials" in text


def test_a_chain_without_a_usable_credential_says_so(server, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    others = "managed_identity workload_identity cli powershell developer_cli shared_token_cache"
    options = {f"exclude_{name}_credential": True for name in others.split()}
    options |= {"account_name": ACCOUNT, "account_host": f"127.0.0.1:{server.port}"}
    options |= {
        "exclude_visual_studio_code_credential": True,
        "exclude_broker_credential": True,
    }
    with ckptio.open_backend("az://ckptio-test/x", options) as backend:
        text = raised(ckptio.PermissionDeniedError, lambda: backend.head("k"))
    assert "no usable credentials" in text


@pytest.mark.parametrize("name", NAMES)
def test_anonymous_access_to_a_private_container_is_permission_denied(server, name):
    with ckptio.open_backend(server.uri, server.storage_options(key=None)) as backend:
        text = raised(ckptio.PermissionDeniedError, calls(backend)[name])
    assert server.uri in text


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_container_is_not_found_and_named(server, name):
    uri = "az://no-such-container/run"
    with ckptio.open_backend(uri, server.storage_options()) as backend:
        text = raised(ckptio.NotFoundError, calls(backend)[name])
    assert uri in text
    assert "its container does not exist" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_dead_endpoint_is_unavailable_and_named(server, sas, caplog, name):
    (port,) = free_ports(1)
    options = server.storage_options(port, sas=sas)
    secret = sas.partition("sig=")[2]
    with (
        ckptio.open_backend(server.uri, options) as backend,
        nothing_told(caplog, secret),
    ):
        text = raised(ckptio.StoreUnavailableError, calls(backend)[name], secret)
    assert f"http://127.0.0.1:{port}/" in text


def test_a_sas_token_opens_everything_and_is_never_told(server, sas, caplog):
    secret = sas.partition("sig=")[2]
    uri = f"{server.uri}/{uuid4().hex}"
    with (
        ckptio.open_backend(uri, server.storage_options(sas=sas)) as backend,
        nothing_told(caplog, secret),
    ):
        backend.put("k", b"12345678", mode="create")
        assert backend.read("k") == b"12345678"
        calls(backend)["upload"]()
        assert [info.key for info in backend.list()] == [*backend.list_children()] == ["k"]
        raised(ckptio.NotFoundError, lambda: backend.head("absent"), secret)
        backend.delete(["k", "absent"])
        assert repr(backend) == f"<AzureBackend {uri}>"
    assert any("sig=REDACTED" in record.getMessage() for record in caplog.records)


def test_a_wrong_sas_token_is_permission_denied(server, sas):
    wrong = sas.partition("sig=")[0] + "sig=d3Jvbmc%3D"
    with ckptio.open_backend(server.uri, server.storage_options(sas=wrong)) as backend:
        for call in calls(backend).values():
            raised(ckptio.PermissionDeniedError, call, "d3Jvbmc")


# A proxy that disturbs


class Disturbing(ThreadingHTTPServer):
    """Forwards to the store, except that it does as `fault` says with the next answers."""

    daemon_threads = True

    def __init__(self, target):
        super().__init__(("127.0.0.1", 0), Forward)
        self.target = target
        self.fault = None
        self.over = threading.Event()


class Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("x-ms-error-code", "ServerBusy" if fault >= 500 else "Throttled")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        store = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
        store.request(self.command, self.path, body, dict(self.headers))
        answer = store.getresponse()
        content = answer.read()
        store.close()
        if fault == "lost":
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = answer.headers.get("Content-Length") if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        if fault in ("cut", "stalled"):
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
            if fault == "stalled":
                self.server.over.wait(SECONDS)
            return
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815  # http.server's names

    def log_message(self, *_):
        pass


@pytest.fixture
def proxy(server):
    with Disturbing(server.port) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        thread.start()
        yield proxy
        proxy.over.set()
        proxy.shutdown()
        thread.join(SECONDS)


@pytest.fixture
def disturbed(server, proxy):
    """Return a backend behind the proxy."""
    options = server.storage_options(proxy.server_port) | {"read_timeout": 0.5}
    with ckptio.open_backend(f"{server.uri}/{uuid4().hex}", options) as backend:
        yield backend


@pytest.mark.parametrize("fault", [429, 500, 502, 503, 504, "lost"])
@pytest.mark.parametrize("name", NAMES)
def test_what_may_pass_is_unavailable_and_the_next_try_succeeds(proxy, disturbed, fault, name):
    proxy.fault = fault
    text = raised(ckptio.StoreUnavailableError, calls(disturbed)[name])
    assert disturbed.uri in text
    assert f":{proxy.server_port}" in text
    proxy.fault = None
    disturbed.put("k", b"12345678")
    assert disturbed.read("k") == b"12345678"


@pytest.mark.parametrize("fault", ["cut", "stalled"])
@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_body_that_does_not_all_come_is_unavailable(proxy, disturbed, fault, size):
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    disturbed.put("k", data)
    buffer = memoryview(bytearray(size))
    proxy.fault = fault
    text = raised(ckptio.StoreUnavailableError, lambda: disturbed.read_into("k", 0, buffer))
    assert disturbed.describe("k") in text
    proxy.fault = None
    disturbed.read_into("k", 0, buffer)
    assert buffer == data


def test_a_commit_whose_answer_is_lost_succeeds_when_repeated(server, proxy, disturbed):
    upload = disturbed.start_upload("k", 3 << 16, 1 << 16)
    for offset in range(0, 3 << 16, 1 << 16):
        upload.write_part(offset, bytes([offset >> 16]) * (1 << 16))
    proxy.fault = "lost"
    raised(ckptio.StoreUnavailableError, upload.complete)
    proxy.fault = None
    assert upload.complete().size == 3 << 16
    whole = b"".join(bytes([i]) * (1 << 16) for i in range(3))
    assert server.raw_get(disturbed.describe("k")) == whole


def test_a_slow_line_gets_a_part_through(server):
    """The timeout is for a piece of a part, not for a part: a slow line is not a dead one."""
    size, timeout = 16 << 20, 0.5
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        took = []

        def serve():
            accepted, _ = listener.accept()
            with accepted:
                start, pause, got = time.monotonic(), threading.Event(), 0
                while got < size and (piece := accepted.recv(128 << 10)):
                    got += len(piece)
                    pause.wait(0.01)
                took.append(time.monotonic() - start)
                accepted.sendall(
                    b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\nETag: 0x1\r\n"
                    b"Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n\r\n"
                )

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        options = server.storage_options(listener.getsockname()[1])
        options["connection_timeout"] = timeout
        with ckptio.open_backend(server.uri, options) as backend:
            assert backend.put("k", bytes(size)).etag == "0x1"
        thread.join(SECONDS)
    assert took[0] > 2 * timeout
