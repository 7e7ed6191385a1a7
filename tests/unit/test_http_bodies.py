"""Bodies of answers from a real server, however it cuts them; and their connections."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import urllib3

from ckptio.errors import StoreUnavailableError
from ckptio_backends.http_bodies import receive

pytestmark = pytest.mark.timeout(60)

_SIZE = (5 << 20) + 12345
_BODY = np.random.default_rng(5).bytes(_SIZE)

Answer = Callable[[socket.socket], None]


@contextmanager
def server(*answers: Answer) -> Iterator[urllib3.HTTPConnectionPool]:
    """Serve one connection: each request is answered by the next of the answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                for answer in answers:
                    asked = b""
                    while not asked.endswith(b"\r\n\r\n"):
                        asked += connection.recv(65536)
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        with urllib3.HTTPConnectionPool("127.0.0.1", port, maxsize=1, timeout=20) as pool:
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
    buffer: int, cuts: list[int]
) -> None:
    with server(body_cut_at(cuts), body_cut_at(cuts)) as pool:
        for _ in range(2):
            assert fetch(pool, buffer, lambda body: None) == _BODY
        assert pool.num_connections == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for it")
def test_a_long_body_wakes_its_reader_for_many_bytes_and_leaves_the_connection_as_it_was() -> None:
    woken: list[int] = []

    def short(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    def note(body: urllib3.HTTPResponse) -> None:
        if body.connection is not None:  # with the last piece it is the pool's again
            woken.append(least(body))

    with server(body_cut_at([]), short) as pool:
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
        pool.timeout = urllib3.Timeout(0.2)
        try:
            with pytest.raises(StoreUnavailableError, match="stopped answering"):
                fetch(pool, 1 << 20, lambda body: None)
        finally:
            waited.set()
