"""A proxy that makes fake-gcs-server keep the promises of Cloud Storage that checkpoints rest on.

The bare server looks at `ifGenerationMatch` on some uploads only, and on those not atomically; it
ignores it on media uploads, on compose and on delete; and it never splits a list into pages. So a
test against it would pass or fail for the server's reasons, not the driver's. In front of it, this
program lets the writers of an object take turns, compares its generation with the wanted one and
answers 412 where they differ; and it lists in pages of a few entries. All else passes through.

It runs as a program of its own, so that the tests' own process has no server threads.
Conditions on resumable uploads are refused with 501, for nobody here needs them.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

PAGE = 7
CHUNK = 1 << 20
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Handler(BaseHTTPRequestHandler):
    """One connection of a client, with one to the server behind."""

    protocol_version = "HTTP/1.1"
    upstream: ClassVar[int]
    locks: ClassVar[defaultdict[tuple[str, str], threading.Lock]] = defaultdict(threading.Lock)

    def setup(self) -> None:
        super().setup()
        self.behind = HTTPConnection("127.0.0.1", self.upstream)

    def finish(self) -> None:
        self.behind.close()
        super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_GET  # noqa: N815

    def answer(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            return self.refuse(411, "lengthRequired")
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client broke off: nothing was asked for
            self.close_connection = True
            return None
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        segments = [unquote(segment) for segment in url.path.strip("/").split("/")]
        named = segments[segments.index("b") + 1 :] if "b" in segments else []
        if self.command == "GET" and len(named) == 2 and named[1] == "o":
            return self.list(query)
        if len(named) < 2:
            return self.forward(body)
        name = named[2] if len(named) > 2 else query.get("name") or _name_inside(body)
        writes = self.command not in ("GET", "HEAD")
        with self.locks[named[0], name] if writes else nullcontext():
            wanted = query.get("ifGenerationMatch")
            if wanted is not None:
                if query.get("uploadType") == "resumable":
                    return self.refuse(501, "notImplemented")
                if self.generation(named[0], name) != wanted:
                    return self.refuse(412, "conditionNotMet")
            return self.forward(body)

    def generation(self, bucket: str, name: str) -> str:
        path = f"/storage/v1/b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"
        with self.exchange("GET", path, b"", {}) as response:
            content = response.read()
            return str(json.loads(content)["generation"]) if response.status == 200 else "0"

    def list(self, query: dict[str, str]) -> None:
        whole = {n: v for n, v in query.items() if n not in ("pageToken", "maxResults")}
        path = f"{urlsplit(self.path).path}?{urlencode(whole, quote_via=quote)}"
        with self.exchange("GET", path, b"", dict(self.headers)) as response:
            status, content = response.status, response.read()
        if status == 200:
            found = json.loads(content)
            items = [(item["name"], "items", item) for item in found.pop("items", None) or []]
            below = [(name, "prefixes", name) for name in found.pop("prefixes", None) or []]
            start = int(query.get("pageToken", 0))
            stop = start + min(PAGE, int(query.get("maxResults", PAGE)))
            entries = sorted([*items, *below], key=lambda entry: entry[0])
            for _, kind, entry in entries[start:stop]:
                found.setdefault(kind, []).append(entry)
            if stop < len(entries):
                found["nextPageToken"] = str(stop)
            content = json.dumps(found).encode()
        self.reply(status, content)

    def forward(self, body: bytes) -> None:
        with self.exchange(self.command, self.path, body, dict(self.headers)) as response:
            self.send_response(response.status, response.reason)
            for name, value in response.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            length = response.headers.get("Content-Length")
            whole = None if length else response.read()
            self.send_header("Content-Length", length or str(len(whole or b"")))
            self.end_headers()
            if whole:
                self.wfile.write(whole)
            while piece := response.read(CHUNK):
                self.wfile.write(piece)

    @contextmanager
    def exchange(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> Iterator[HTTPResponse]:
        kept = {n: v for n, v in headers.items() if n.lower() not in HOP_BY_HOP}
        self.behind.request(method, path, body=body or None, headers=kept)
        with self.behind.getresponse() as response:
            yield response

    def refuse(self, status: int, reason: str) -> None:
        error = {"code": status, "message": reason, "errors": [{"reason": reason}]}
        self.reply(status, json.dumps({"error": error}).encode())

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _name_inside(body: bytes) -> str:
    """Return the object's name that the first part of a multipart upload gives."""
    start = body.index(b"{")
    return str(
        json.JSONDecoder().raw_decode(body[start : start + 65536].decode("latin-1"))[0]["name"]
    )


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    port, Handler.upstream = map(int, sys.argv[1:])
    Server(("127.0.0.1", port), Handler).serve_forever()
