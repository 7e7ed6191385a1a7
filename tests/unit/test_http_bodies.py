"""Bodies of answers from a real server, however it cuts them; and their connections."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import urllib3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ckptio.errors import StoreUnavailableError
from ckptio_backends.http_bodies import receive

pytestmark = pytest.mark.timeout(60)

_SIZE = (5 << 20) + 12345
_BODY = np.random.default_rng(5).bytes(_SIZE)

Answer = Callable[[socket.socket], None]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a key and a certificate of its own for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@contextmanager
def server(*answers: Answer, tls: Path | None = None) -> Iterator[urllib3.HTTPConnectionPool]:
    """Serve one connection: each request is answered by the next of the answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            if tls is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(tls)
                connection = context.wrap_socket(connection, server_side=True)
            with connection:
                for answer in answers:
                    asked = b""
                    while not asked.endswith(b"\r\n\r\n"):
                        asked += connection.recv(65536)
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        scheme, known = ("https", {"ca_certs": str(tls)}) if tls else ("http", {})
        where = f"{scheme}://127.0.0.1:{port}"
        with urllib3.connection_from_url(where, maxsize=1, timeout=20, **known) as pool:
            yield pool
        thread.join(20)
        assert not thread.is_alive()


def body_cut_at(cuts: Sequence[int], upto: int = _SIZE) -> Answer:
    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % _SIZE)
        for start, stop in pairwise([0, *cuts, upto]):
            connection.sendall(_BODY[start:stop])

    return answer


def fetch(
    pool: urllib3.HTTPConnectionPool, buffer: int, seen: Callable[[urllib3.HTTPResponse], None]
) -> bytes:
    """Return the body, fetched through a buffer; `seen` is called with each piece."""
    got = bytearray()
    body = pool.request("GET", "/", preload_content=False, retries=False)
    assert isinstance(body, urllib3.HTTPResponse)

    def sink(piece: memoryview) -> None:
        got.extend(piece)
        seen(body)

    try:
        receive(body, _SIZE, memoryview(bytearray(buffer)), sink, "it")
    except StoreUnavailableError:
        body.close()
        raise
    return bytes(got)


def least(body: urllib3.HTTPResponse) -> int:
    """Return the bytes that wake a thread which waits for more of a body."""
    assert body.connection is not None
    sock = body.connection.sock
    assert sock is not None
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("buffer", [1000, 64 << 10, 1 << 20, _SIZE, 2 * _SIZE])
@pytest.mark.parametrize(
    "cuts",
    [
        [],
        [1],
        [1 << 20],
        [256 << 10, 512 << 10],
        [*range(0, _SIZE, 65_521)],
        [_SIZE - 1],
        [*range(_SIZE - 40, _SIZE)],
        [_SIZE - (512 << 10) - 1, _SIZE - (512 << 10), _SIZE - (256 << 10), _SIZE - 8192],
    ],
)
def test_a_body_comes_whole_however_it_is_cut_and_its_connection_serves_again(
    buffer: int, cuts: list[int], secure: bool, certificate: Path
) -> None:
    tls = certificate if secure else None
    with server(body_cut_at(cuts), body_cut_at(cuts), tls=tls) as pool:
        for _ in range(2):
            assert fetch(pool, buffer, lambda body: None) == _BODY
        assert pool.num_connections == 1


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for it")
def test_a_long_body_wakes_its_reader_for_many_bytes_and_leaves_the_connection_as_it_was(
    secure: bool, certificate: Path
) -> None:
    woken: list[int] = []

    def short(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    def note(body: urllib3.HTTPResponse) -> None:
        if body.connection is not None:  # with the last piece it is the pool's again
            woken.append(least(body))

    with server(body_cut_at([]), short, tls=certificate if secure else None) as pool:
        fetch(pool, 1 << 20, note)
        with pool.request("GET", "/", preload_content=False, retries=False) as body:
            assert isinstance(body, urllib3.HTTPResponse)
            assert least(body) == 1
            assert body.read() == b"ok"
    assert woken[:4] == [256 << 10] * 4


@pytest.mark.parametrize("upto", [0, 1, 100_000, (1 << 20) + 1, _SIZE - 1])
def test_a_body_that_breaks_off_is_told_at_once(upto: int) -> None:
    told = pytest.raises(StoreUnavailableError, match=f"broke off after .* of {_SIZE} bytes")
    with server(body_cut_at([], upto)) as pool, told:
        fetch(pool, 1 << 20, lambda body: None)


def test_a_store_that_stops_in_a_long_body_is_told_when_its_time_is_up() -> None:
    waited = threading.Event()

    def stops(connection: socket.socket) -> None:
        body_cut_at([], 100_000)(connection)
        assert waited.wait(20)

    with server(stops) as pool:
        pool.timeout = urllib3.Timeout(2)
        try:
            with pytest.raises(StoreUnavailableError, match="stopped answering"):
                fetch(pool, 1 << 20, lambda body: None)
        finally:
            waited.set()
