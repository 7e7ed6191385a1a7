"""The tests' own fault proxy: transparent where no rule acts, and exact in what it counts."""

import http.client
import http.server
import socket
import threading

import pytest
from servers.proxy import (
    cut,
    delay,
    end_early,
    fault_proxy,
    lose_answer,
    respond,
    stall,
    throttle,
)


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the request's body, in chunks if the path says so."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str, bytes]]

    def answer(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.command, self.headers["Host"], body))
        body = body or b"hello"
        self.send_response(200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for i in range(0, len(body), 3):
                piece = body[i : i + 3]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        elif self.path == "/until-closed":
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
        else:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = answer  # noqa: N815  # http.server's names

    def log_message(self, *_):
        pass


@pytest.fixture
def seen():
    return []


@pytest.fixture
def proxy(seen):
    handler = type("Handler", (Echo,), {"seen": seen})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with fault_proxy(f"http://127.0.0.1:{server.server_port}") as proxy:
                yield proxy
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def client(proxy):
    client = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=20)
    yield client
    client.close()


def ask(client, method="GET", path="/x", body=None, headers=None, **more):
    client.request(method, path, body, headers or {}, **more)
    with client.getresponse() as response:
        return response.status, response.read()


@pytest.mark.parametrize("path", ["/sized", "/chunked", "/until-closed"])
def test_is_transparent_and_keeps_the_connection(proxy, client, seen, path):
    for body in [b"0123456789" * 1000, b"a", b"again"]:
        assert ask(client, "PUT", path, body) == (200, body)
        assert seen[-1] == ("PUT", client.host + f":{client.port}", body)
    assert [(r.method, r.path, r.status, r.sent) for r in proxy.requests] == [
        ("PUT", path, 200, 10_000),
        ("PUT", path, 200, 1),
        ("PUT", path, 200, 5),
    ]
    if path != "/chunked":
        assert [r.received for r in proxy.requests] == [10_000, 1, 5]


def test_forwards_a_chunked_body(client, seen):
    assert ask(client, "POST", "/x", iter([b"one", b"two"]), encode_chunked=True) == (
        200,
        b"onetwo",
    )
    assert seen[-1][2] == b"onetwo"


def test_a_head_has_no_body(client):
    for _ in range(2):
        assert ask(client, "HEAD") == (200, b"")
    assert ask(client) == (200, b"hello")


def test_consents_to_a_body_that_asks(proxy):
    with socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])), 20) as sock:
        sock.sendall(
            b"PUT /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        with sock.makefile("rb") as stream:
            assert stream.readline() == b"HTTP/1.1 100 Continue\r\n"
            assert stream.readline() == b"\r\n"
            sock.sendall(b"ok")
            assert stream.readline() == b"HTTP/1.1 200 OK\r\n"


def test_a_rule_acts_on_the_nth_request_that_matches(proxy, client, seen):
    rule = proxy.add(respond(503, b"busy"), method="PUT", path="data", skip=1, times=2)
    answers = [ask(client, method, "/some/data") for method in ["PUT", "GET", "PUT", "PUT", "PUT"]]
    assert [status for status, _ in answers] == [200, 200, 503, 503, 200]
    assert rule.hits == 2
    assert len(seen) == 3


def test_query_and_odd_paths_are_recorded_and_forwarded(proxy, client):
    assert ask(client, path="/a%20b%2Bc?x=%20y")[0] == 200
    assert (proxy.requests[0].path, proxy.requests[0].query) == ("/a b+c", "x=%20y")


def test_an_answer_can_be_lost_after_the_server_acted(proxy, client, seen):
    proxy.add(lose_answer())
    with pytest.raises(ConnectionResetError):
        ask(client, "PUT", body=b"done")
    assert seen[-1][2] == b"done"
    assert proxy.requests[0].status == 0


def test_a_body_can_be_cut_or_end_early(proxy, client):
    body = b"x" * 100_000
    proxy.add(cut(10))
    with pytest.raises(ConnectionResetError):
        ask(client, "PUT", body=body)
    client.close()
    proxy.add(end_early(10))
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(client, "PUT", body=body)
    assert caught.value.partial == body[:10]
    client.close()
    assert ask(client, "PUT", body=body) == (200, body)


def test_a_stalled_answer_waits_until_it_is_released(proxy, client):
    rule = proxy.add(stall())
    caught = []

    def work():
        try:
            ask(client)
        except http.client.RemoteDisconnected as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert rule.reached.wait(20)
    assert thread.is_alive()
    rule.released.set()
    thread.join(20)
    assert len(caught) == 1


def test_slow_answers_are_whole(proxy, client):
    proxy.latency = 0.01
    for action in [delay(0.01), throttle(1e6)]:
        proxy.add(action)
        assert ask(client, "PUT", body=b"y" * 10_000) == (200, b"y" * 10_000)
