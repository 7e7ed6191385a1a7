"""HTTP/1.1 as it is on the wire, for the fault proxy: heads, bodies with their framing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from io import BufferedReader
from urllib.parse import unquote

PIECE = 64 << 10


@dataclass
class Request:
    """One request, and what became of it.

    Attributes
    ----------
    method, path, query : str
        `path` is percent-decoded, `query` is not.
    headers : dict
        Names in lower case.
    sent, received : int
        Bytes of body from the client, and to the client.
    status : int
        That the client got; 0 if it got none.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    raw_head: bytes = field(repr=False)
    raw_body: bytes = field(default=b"", repr=False)
    sent: int = 0
    received: int = 0
    status: int = 0


@dataclass
class Answer:
    """The head of an answer, and its body as it comes, framing included."""

    status: int
    headers: list[tuple[str, str]]
    pieces: Iterator[bytes]
    until_closed: bool = False

    def header(self, name: str) -> str:
        """Return a header's value, empty if there is none."""
        return next((v for k, v in self.headers if k.lower() == name), "")

    def head(self) -> bytes:
        """Return the head as it goes to the client."""
        lines = [f"HTTP/1.1 {self.status} {_phrase(self.status)}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def _read_line(stream: BufferedReader) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


def read_head(stream: BufferedReader) -> tuple[bytes, list[tuple[str, str]]]:
    """Read the first line and the headers."""
    start, headers = _read_line(stream), []
    while (line := _read_line(stream)) not in (b"\r\n", b"\n"):
        name, _, value = line.decode("latin-1").partition(":")
        headers.append((name.strip(), value.strip()))
    return start, headers


def read_answer(stream: BufferedReader, method: str) -> Answer:
    """Read the head of the answer to a request; the body follows as it is asked for."""
    while True:
        start, headers = read_head(stream)
        status = int(start.split(b" ", 2)[1])
        if status >= 200:  # what came before was 100 Continue
            break
    if method == "HEAD" or status in (204, 304):
        return Answer(status, headers, iter(()))
    names = {name.lower() for name, _ in headers}
    until_closed = names.isdisjoint({"content-length", "transfer-encoding"})
    return Answer(status, headers, _pieces(stream, headers, until_closed), until_closed)


def read_request(client: socket.socket, stream: BufferedReader) -> Request:
    """Read a whole request, consenting to its body if it asks."""
    start, headers = read_head(stream)
    method, target, _ = start.decode("latin-1").split(" ", 2)
    path, _, query = target.partition("?")
    lines = [start.rstrip(), *(f"{k}: {v}".encode("latin-1") for k, v in headers), b"", b""]
    by_name = {name.lower(): value for name, value in headers}
    request = Request(method, unquote(path), query, by_name, b"\r\n".join(lines))
    if by_name.get("expect", "").lower() == "100-continue":
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.raw_body = b"".join(_pieces(stream, headers, False))
    request.sent = len(request.raw_body)
    return request


def _pieces(
    stream: BufferedReader, headers: list[tuple[str, str]], until_closed: bool
) -> Iterator[bytes]:
    """Yield a body as it was framed."""
    by_name = {name.lower(): value for name, value in headers}
    if "chunked" in by_name.get("transfer-encoding", "").lower():
        yield from _chunks(stream)
    elif "content-length" in by_name:
        left = int(by_name["content-length"])
        while left:
            piece = stream.read1(min(left, PIECE))
            if not piece:
                raise EOFError
            left -= len(piece)
            yield piece
    elif until_closed:
        while piece := stream.read1(PIECE):
            yield piece


def _chunks(stream: BufferedReader) -> Iterator[bytes]:
    while True:
        line = _read_line(stream)
        size = int(line.split(b";")[0], 16)
        if not size:
            break
        yield line + stream.read(size) + _read_line(stream)
    tail = line
    while (line := _read_line(stream)) not in (b"\r\n", b"\n"):  # trailers
        tail += line
    yield tail + line
