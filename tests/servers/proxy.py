"""A proxy in front of a real HTTP server that counts, delays, cuts, refuses, loses and stalls.

::

    with fault_proxy(server.endpoint) as proxy:
        proxy.latency = 0.05                                    # seconds, for every request
        proxy.add(respond(503, s3_error("SlowDown")), method="PUT", path="/data/", times=2)
        lost = proxy.add(lose_answer(), method="PUT", path="manifest.json")
        ...                                                     # a client, at proxy.url
        assert lost.hits == 1
        assert [r.status for r in proxy.requests if r.method == "GET"] == [206, 206]

A rule is a condition on requests and an action; the first rule that matches acts. An action is any
function of an `Exchange`, so a test can write its own. Headers are forwarded as they came, since S3
signs ``Host``; each request gets a connection of its own to the server.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from urllib.parse import urlsplit

from servers.http1 import Answer, Request, read_answer, read_request

RESET = struct.pack("ii", 1, 0)  # linger for no time: closing sends RST


class _CutError(Exception):
    """The connection to the client is to end here."""


class Exchange:
    """One request on its way, for an action to do with as it likes."""

    def __init__(
        self, proxy: FaultProxy, rule: Rule | None, request: Request, client: socket.socket
    ):
        self.request = request
        self._proxy = proxy
        self._rule = rule
        self._client = client
        self._open = contextlib.ExitStack()

    def forward(self) -> Answer:
        """Let the server carry the request out; return its answer, not yet sent to the client."""
        server = socket.create_connection(self._proxy.upstream, timeout=60)
        self._open.enter_context(server)
        server.sendall(self.request.raw_head)
        server.sendall(self.request.raw_body)
        stream = self._open.enter_context(server.makefile("rb"))
        return read_answer(stream, self.request.method)

    def send(self, answer: Answer) -> None:
        """Send a whole answer to the client."""
        self.send_head(answer)
        for piece in answer.pieces:
            self.send_body(piece)
        if answer.until_closed:
            self.close()

    def send_head(self, answer: Answer) -> None:
        """Send an answer's head to the client."""
        self.request.status = answer.status
        self._client.sendall(answer.head())

    def send_body(self, piece: bytes) -> None:
        """Send some of a body to the client."""
        self.request.received += len(piece)
        self._client.sendall(piece)

    def wait(self) -> None:
        """Wait until the rule is released or the proxy ends."""
        assert self._rule is not None
        self._rule.released.wait()

    def close(self) -> None:
        """End the connection to the client, in order."""
        raise _CutError

    def reset(self) -> None:
        """End the connection to the client with a reset."""
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        raise _CutError

    def finish(self) -> None:
        """Give up the connection to the server."""
        self._open.close()


Action = Callable[[Exchange], None]


@dataclass
class Rule:
    """An action, and the requests that it is for.

    Attributes
    ----------
    hits : int
        How often it acted.
    reached : threading.Event
        Set when it first acts.
    released : threading.Event
        Set it to let what it stalled go on.
    """

    action: Action
    method: str | None
    path: str
    when: Callable[[Request], bool]
    skip: int
    times: int | None
    hits: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def takes(self, request: Request) -> bool:
        """Whether it acts on this request; counts it."""
        if self.method not in (None, request.method) or self.path not in request.path:
            return False
        if not self.when(request) or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        self.hits += 1
        return True


def respond(status: int, body: bytes = b"", headers: Iterable[tuple[str, str]] = ()) -> Action:
    """Answer in the server's place; it never hears of the request."""

    def action(exchange: Exchange) -> None:
        length = ("Content-Length", str(len(body)))
        is_head = exchange.request.method == "HEAD"
        pieces = iter(()) if is_head else iter([body])
        exchange.send(Answer(status, [length, *headers], pieces))

    return action


def s3_error(code: str, message: str = "by the proxy", extra: str = "") -> bytes:
    """Return the body of an S3 error answer, with more XML elements in `extra`."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message>{extra}</Error>"
    ).encode()


def delay(seconds: float) -> Action:
    """Wait, then forward."""

    def action(exchange: Exchange) -> None:
        time.sleep(seconds)
        exchange.send(exchange.forward())

    return action


def throttle(bytes_per_second: float) -> Action:
    """Send the answer's body slowly."""

    def action(exchange: Exchange) -> None:
        answer = exchange.forward()
        exchange.send_head(answer)
        for piece in answer.pieces:
            exchange.send_body(piece)
            time.sleep(len(piece) / bytes_per_second)

    return action


def cut(after: int) -> Action:
    """Reset the connection after so many bytes of the answer's body."""

    def action(exchange: Exchange) -> None:
        _send_some(exchange, exchange.forward(), after)
        exchange.reset()

    return action


def end_early(after: int) -> Action:
    """End the connection in order after so many bytes, fewer than the answer's head says."""

    def action(exchange: Exchange) -> None:
        _send_some(exchange, exchange.forward(), after)
        exchange.close()

    return action


def lose_answer() -> Action:
    """Let the server carry the request out, then reset the connection instead of answering."""

    def action(exchange: Exchange) -> None:
        for _ in exchange.forward().pieces:
            pass
        exchange.reset()

    return action


def refuse_connection() -> Action:
    """Reset the connection at once; the server never hears of the request."""
    return Exchange.reset


def stall(after: int | None = None) -> Action:
    """Say nothing until the rule is released: not a byte, or no more than some of the body."""

    def action(exchange: Exchange) -> None:
        if after is not None:
            _send_some(exchange, exchange.forward(), after)
        exchange.wait()
        exchange.close()

    return action


def _send_some(exchange: Exchange, answer: Answer, size: int) -> None:
    exchange.send_head(answer)
    for piece in answer.pieces:
        exchange.send_body(piece[:size])
        size -= len(piece)
        if size <= 0:
            break


class FaultProxy:
    """A running proxy.

    Attributes
    ----------
    url : str
        Where clients find it.
    requests : list of Request
        All that came, in the order in which they came.
    connections : int
        How many clients have opened.
    latency : float
        Seconds before anything is done about a request.
    """

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self.upstream = (parts.hostname or "", parts.port or 80)
        self.requests: list[Request] = []
        self.connections = 0
        self.latency = 0.0
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._clients: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def add(
        self,
        action: Action,
        *,
        method: str | None = None,
        path: str = "",
        when: Callable[[Request], bool] = lambda _: True,
        skip: int = 0,
        times: int | None = 1,
    ) -> Rule:
        """Act on requests of a method, with `path` in their path, and for which `when` holds.

        Parameters
        ----------
        skip : int
            How many of them are left alone first.
        times : int, optional
            How many are acted on then; None for all.
        """
        rule = Rule(action, method, path, when, skip, times)
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget rules and requests; what was stalled goes on."""
        with self._lock:
            for rule in self._rules:
                rule.released.set()
            self._rules.clear()
            self.requests.clear()

    def close(self) -> None:
        """End every connection, and wait until all threads are gone."""
        self.clear()
        with self._lock:
            self._closed = True
            clients = [*self._clients]
        for sock in [self._listener, *clients]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="fault-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._closed:
                    client.close()
                    return
                self._clients.add(client)
                self.connections += 1
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        # A client may go at any moment, and so may the server: that ends the connection, no more.
        with client, client.makefile("rb") as stream:
            try:
                while self._exchange(client, stream):
                    pass
            except (_CutError, OSError, EOFError):
                pass
            finally:
                with self._lock:
                    self._clients.discard(client)

    def _exchange(self, client: socket.socket, stream: BufferedReader) -> bool:
        request = read_request(client, stream)
        with self._lock:
            self.requests.append(request)
            rule = next((rule for rule in self._rules if rule.takes(request)), None)
        if self.latency:
            time.sleep(self.latency)
        exchange = Exchange(self, rule, request, client)
        try:
            if rule is None:
                exchange.send(exchange.forward())
            else:
                rule.reached.set()
                rule.action(exchange)
        finally:
            exchange.finish()
            request.raw_body = b""
        return request.headers.get("connection", "").lower() != "close"


@contextlib.contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """Run a proxy in front of the server at a URL until the block ends."""
    proxy = FaultProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()
