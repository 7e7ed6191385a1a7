"""Requests to Google Cloud Storage's JSON API, one HTTP exchange each.

gcsfs supplies credentials, endpoint and HTTP session, so that its options mean here what they mean
there. The exchanges are our own: gcsfs's retry by themselves for a minute, which is the core's
business, carry preconditions on some calls only, and hold whole bodies in memory.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ckptio.backend import Buffer
from ckptio_backends.gcs_session import open_session

import aiohttp  # isort: skip  # after gcs_session, which says what to install if it is missing
from yarl import URL  # isort: skip

from ckptio_backends.event_loop import event_loop, run, start  # isort: skip
from ckptio_backends.feed import Feed  # isort: skip

__all__ = ["Answer", "Client", "Refused", "Request", "object_path"]

CONCURRENCY = 16
_STALL = 30.0  # seconds without a byte either way
_CONNECT = 10.0
_CHUNK = 256 << 10  # what asyncio reads from a socket at once
_READ_AHEAD = 1 << 20

_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes
    ----------
    path : str
        After the endpoint's slash, percent-encoded.
    body : sequence of buffers, or Feed
        Sent one after the other.
    into : memoryview, optional
        Where the bytes of the object go that a ranged GET returns; they begin at `start`.
    absent_ok : bool
        Whether 404 is a fine answer.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[Buffer] | Feed = ()
    into: memoryview | None = None
    start: int = 0
    absent_ok: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes
    ----------
    size : int or None
        After a ranged GET: of the whole object. Nothing was read if the range is not inside it.
    """

    content: bytes = b""
    size: int | None = None

    def json(self) -> Any:
        """Return the content, decoded."""
        try:
            return json.loads(self.content)
        except ValueError as error:
            raise Refused(200, "", "what should be JSON is not") from error


class Refused(Exception):  # noqa: N818 - never leaves the driver
    """The server answered with an error.

    Attributes
    ----------
    status : int
        Of HTTP.
    reason : str
        The API's word for it, such as ``conditionNotMet``; may be empty.
    message : str
        The server's.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @classmethod
    def parse(cls, status: int, content: bytes) -> Refused:
        """Read the error out of a body: JSON mostly, plain text for media."""
        text = content.decode(errors="replace").strip()
        try:
            error = json.loads(text)["error"]
            details = error.get("errors") or [{}]
            return cls(status, str(details[0].get("reason", "")), str(error.get("message", "")))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return cls(status, "", text[:500])


class Client:
    """A session with the service, for one process.

    Parameters
    ----------
    options : mapping
        gcsfs's own, as `check_options` lets them pass.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._fs, self._total = open_session(options)
        self._base = self._fs.base.removesuffix("storage/v1/")

    @property
    def is_anonymous(self) -> bool:
        """Whether requests carry no credentials, be it because none were found."""
        return self._fs.credentials.credentials is None

    @property
    def endpoint(self) -> str:
        """Where requests go, without what a URL may hide before the host; for messages."""
        parts = urlsplit(self._base)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def call(self, request: Request) -> Answer:
        """Make one request and wait for the answer."""
        return run(self._send(request, self._authorization()))

    def begin(self, request: Request, size: int) -> tuple[Feed, Future[Answer]]:
        """Begin a request whose body, of `size` bytes, the caller makes while it is sent."""
        feed = Feed(size, event_loop())
        answer = start(self._send(replace(request, body=feed), self._authorization()))
        answer.add_done_callback(lambda _: feed.end())
        return feed, answer

    def call_all(self, requests: Sequence[Request]) -> list[Answer]:
        """Make several requests, some at a time; the first error stops the rest."""
        return run(self._send_all(requests, self._authorization()))

    def close(self) -> None:
        """Close the connections."""
        if (session := self._fs.session) is not None:
            run(session.close())

    def _authorization(self) -> dict[str, str]:
        # May fetch a fresh token with a blocking request: in the caller's thread, not on the loop.
        headers: dict[str, str] = {}
        self._fs.credentials.apply(headers)
        return headers

    async def _send_all(
        self, requests: Sequence[Request], authorization: Mapping[str, str]
    ) -> list[Answer]:
        answers: list[Answer | None] = [None] * len(requests)
        waiting = iter(enumerate(requests))

        async def work() -> None:
            for i, request in waiting:
                answers[i] = await self._send(request, authorization)

        tasks = [asyncio.ensure_future(work()) for _ in range(min(CONCURRENCY, len(requests)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [answer for answer in answers if answer is not None]

    async def _send(self, request: Request, authorization: Mapping[str, str]) -> Answer:
        session: aiohttp.ClientSession = await self._fs._set_session()
        now = asyncio.get_running_loop().time
        end = now() + self._total

        def moved() -> None:
            with suppress(RuntimeError):  # the body's last piece may be sent after the answer
                clock.reschedule(min(now() + _STALL, end))

        async with (
            asyncio.timeout_at(min(now() + _STALL, end)) as clock,
            session.request(
                request.method,
                self._url(request),
                data=_payload(request.body, moved),
                headers=_headers(request, authorization),
                allow_redirects=False,
                # The object's bytes are wanted as they are stored.
                auto_decompress=request.into is None,
                read_bufsize=_READ_AHEAD,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT),
            ) as response,
        ):
            if request.into is not None and response.status in (200, 206, 416):
                return await _receive(response, request.start, request.into, moved)
            content = await response.read()
        if response.status < 300 or (response.status == 404 and request.absent_ok):
            return Answer(content)
        raise Refused.parse(response.status, content)

    def _url(self, request: Request) -> URL:
        query = dict(request.query)
        if payer := self._fs.requester_pays:
            query["userProject"] = payer if isinstance(payer, str) else self._fs.project
        text = urlencode(query, quote_via=quote, safe="")
        # Already encoded: yarl would decode and re-encode some characters of a key.
        return URL(f"{self._base}{request.path}?{text}", encoded=True)


def object_path(bucket: str, name: str | None = None) -> str:
    """Return the API's path of an object, or of a bucket's list of objects."""
    path = f"storage/v1/b/{quote(bucket, safe='')}/o"
    return path if name is None else f"{path}/{quote(name, safe='')}"


def _headers(request: Request, authorization: Mapping[str, str]) -> dict[str, str]:
    headers = {**request.headers, **authorization}
    if request.into is not None:
        # Accepting gzip keeps the service from unpacking an object that is stored packed.
        last = request.start + len(request.into) - 1
        headers |= {"Range": f"bytes={request.start}-{last}", "Accept-Encoding": "gzip"}
    if size := _size(request.body):
        headers.setdefault("Content-Type", "application/octet-stream")
        headers["Content-Length"] = str(size)
    return headers


def _size(body: Sequence[Buffer] | Feed) -> int:
    return body.size if isinstance(body, Feed) else sum(memoryview(part).nbytes for part in body)


def _payload(
    body: Sequence[Buffer] | Feed, moved: Callable[[], None]
) -> bytes | AsyncIterator[bytes]:
    if isinstance(body, Feed):
        return _fed(body, moved)
    if _size(body) <= _CHUNK:
        return b"".join(body)
    return _pieces(body, moved)


async def _pieces(body: Sequence[Buffer], moved: Callable[[], None]) -> AsyncIterator[bytes]:
    for part in body:
        view = memoryview(part).cast("B")
        for at in range(0, len(view), _CHUNK):
            # A copy: a transport that is closed with an error may still send what it holds, and
            # the caller's buffer is the caller's again by then.
            yield bytes(view[at : at + _CHUNK])
            moved()


async def _fed(feed: Feed, moved: Callable[[], None]) -> AsyncIterator[bytes]:
    async for piece in feed:
        yield piece
        moved()


async def _receive(
    response: aiohttp.ClientResponse, start: int, into: memoryview, moved: Callable[[], None]
) -> Answer:
    match = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
    if response.status == 416:
        return Answer(size=int(match[2]) if match else start)
    if response.status == 200:
        if start or response.content_length != len(into):
            raise Refused(200, "", "the server ignored the range that was asked for")
    elif not match or match[1] is None or int(match[1]) != start:
        raise Refused(206, "", "the server sent another range than the one asked for")
    elif int(match[2]) < start + len(into):
        return Answer(size=int(match[2]))
    at = 0
    while piece := (await response.content.readchunk())[0]:
        if at + len(piece) > len(into):
            raise Refused(206, "", "the server sent more bytes than were asked for")
        into[at : at + len(piece)] = piece
        at += len(piece)
        moved()
    if at < len(into):
        raise aiohttp.ClientPayloadError(f"{at} of {len(into)} bytes arrived")
    return Answer(size=int(match[2]) if match else len(into))
