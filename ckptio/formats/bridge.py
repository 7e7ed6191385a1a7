"""A backend's objects over HTTP on the loopback interface, for a library that opens its own files.

TensorStore reads S3, GCS and local files by itself, but not with every credential that ckptio's
drivers take, and no other store. Through this, it reads whatever ckptio reads. Only GET is
answered, only on 127.0.0.1, and only below a random path that nobody else is told.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from ckptio.backend import Backend, ObjectInfo, check_key
from ckptio.errors import InvalidKeyError, NotFoundError

__all__ = ["Bridge"]

HOST = "127.0.0.1"
PIECE = 8 << 20
"""Bytes that are read, and sent, at a time."""

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Bridge:
    """Serves a backend until it is closed.

    Attributes
    ----------
    url : str
        Of the server.
    root : str
        The path that keys are appended to; begins and ends with a slash.
    failure : Exception or None
        The first error of the backend's, which its client has no way to tell.
    """

    def __init__(self, backend: Backend) -> None:
        _never_by_proxy()
        self._backend = backend
        self._known: dict[str, ObjectInfo] = {}
        self.root = f"/{secrets.token_urlsafe(24)}/"
        self.failure: Exception | None = None
        self._server = _Server((HOST, 0), self._handler())
        self.url = f"http://{HOST}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="ckptio-bridge",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        bridge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            timeout = 60

            def do_GET(self) -> None:
                bridge._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        try:
            if not request.path.startswith(self.root):
                raise NotFoundError("not below this bridge's path")
            key = check_key(unquote(request.path[len(self.root) :]))
            info = self._look_up(key)
        except (NotFoundError, InvalidKeyError):
            _send_head(request, 404, 0)
            return
        except Exception as error:
            self._fail(request, error)
            return
        start, stop = _range(request.headers.get("Range"), info.size)
        if start >= stop and info.size:
            _send_head(request, 416, 0)
            return
        piece = bytearray(min(PIECE, stop - start))
        whole = start == 0 and stop == info.size
        sent = False
        for at in range(start, stop, PIECE):
            view = memoryview(piece)[: min(PIECE, stop - at)]
            try:
                self._backend.read_into(key, at, view)
            except Exception as error:
                if sent:
                    # Too late for a status: the client sees an answer cut short.
                    self.failure = self.failure or error
                    request.close_connection = True
                    return
                self._fail(request, error)
                return
            if not sent:
                _send_head(request, 200 if whole else 206, stop - start, info, start)
                sent = True
            request.wfile.write(view)
        if not sent:
            _send_head(request, 200, 0, info)

    def _look_up(self, key: str) -> ObjectInfo:
        # A committed checkpoint does not change, so each object is asked for once.
        if key not in self._known:
            self._known[key] = self._backend.head(key)
        return self._known[key]

    def _fail(self, request: BaseHTTPRequestHandler, error: Exception) -> None:
        self.failure = self.failure or error
        # Not one of those that are tried again: the backend has done so itself.
        _send_head(request, 400, 0)


def _never_by_proxy() -> None:
    """Exempt the loopback interface from this process's HTTP proxy, which could not reach us.

    libcurl, which TensorStore asks, knows proxies from the environment alone.
    """
    if any(os.environ.get(name) for name in ("http_proxy", "all_proxy", "ALL_PROXY")):
        for name in ("no_proxy", "NO_PROXY"):
            exempt = os.environ.get(name, "")
            if HOST not in exempt and exempt.strip() != "*":
                os.environ[name] = f"{exempt},{HOST}".lstrip(",")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """Say nothing: a client that closed its connection is no error."""


def _range(header: str | None, size: int) -> tuple[int, int]:
    match = _RANGE.fullmatch(header or "")
    if match is None or match[0] == "bytes=-":
        return 0, size
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(int(last) + 1 if last else size, size)


def _send_head(
    request: BaseHTTPRequestHandler,
    status: int,
    length: int,
    info: ObjectInfo | None = None,
    start: int = 0,
) -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(length))
    if info is not None:
        request.send_header("ETag", f'"{abs(hash(info.etag)):x}"')
        if status == 206:
            content = f"bytes {start}-{start + length - 1}/{info.size}"
            request.send_header("Content-Range", content)
    request.end_headers()
