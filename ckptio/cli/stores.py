"""``backends`` and ``doctor``: which stores there are, and what works here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Annotated, Any

import typer
from rich.text import Text

from ckptio import hooks
from ckptio.backend import Backend
from ckptio.cli.app import NO, Json, Options, command, parse_options, parse_size
from ckptio.cli.output import print_error, print_json, print_table
from ckptio.errors import (
    AlreadyExistsError,
    CkptioError,
    NotFoundError,
    StorageError,
    StoreUnreachableError,
)
from ckptio.operation import Operation
from ckptio.transfer import Transfer
from ckptio.units import format_bytes


@command("ckptio backends")
def backends(as_json: Json = False) -> None:
    """List URI schemes, the drivers that serve them, and what is missing."""
    drivers = hooks.driver_entry_points()
    schemes = sorted(drivers, key=lambda scheme: (scheme == hooks.GENERIC, scheme))
    found = [_driver(scheme, drivers[scheme]) for scheme in schemes]
    if as_json:
        print_json({"backends": found})
        return
    rows = [
        (
            "(any other)" if item["scheme"] == hooks.GENERIC else f"{item['scheme']}://",
            item["driver"],
            item["distribution"],
            item["problem"] or "ready",
        )
        for item in found
    ]
    print_table(["scheme", "driver", "from", "state"], rows, last="wrap")


def _driver(scheme: str, entry_points: tuple[EntryPoint, ...]) -> dict[str, Any]:
    names = [f"{ep.dist.name} {ep.dist.version}" if ep.dist else "unknown" for ep in entry_points]
    facts = {
        "scheme": scheme,
        "driver": ", ".join(ep.value for ep in entry_points),
        "distribution": ", ".join(names),
        "problem": None,
    }
    if len(entry_points) > 1:
        facts["problem"] = "claimed twice: uninstall one"
        return facts
    try:
        entry_points[0].load()
    except Exception as error:  # whatever a third party's module raises, the list goes on
        facts["problem"] = str(error) or type(error).__name__
    return facts


@command("ckptio doctor s3://bucket/scratch")
def doctor(
    uri: Annotated[str, typer.Argument(metavar="URI", help="A place to try: nothing is left.")],
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the object that is written and read.")
    ] = "64MB",
    option: Options = [],  # noqa: B006  # Typer reads it, nobody writes it
    as_json: Json = False,
) -> None:
    """Try what saving and restoring need of a store: list, put, create, read, delete; how fast."""
    with hooks.open_backend(uri, parse_options(option)) as backend:
        checks = _Checks(backend, parse_size(size)).run()
    ok = all(check["ok"] for check in checks)
    if as_json:
        print_json({"uri": backend.uri, "ok": ok, "checks": checks})
    else:
        rows = [
            (
                check["check"],
                Text("ok", "green") if check["ok"] else Text("failed", "bold red"),
                _say(check["seconds"]),
                check["detail"],
            )
            for check in checks
        ]
        print_table(["check", "result", "time", "detail"], rows, right=["time"], last="wrap")
    if not ok:
        raise typer.Exit(NO)


def _say(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


class _Checks:
    """Checks of one store, in order.

    The later ones go on where an earlier one failed, unless nobody answers at all.
    """

    def __init__(self, backend: Backend, size: int) -> None:
        self._backend = backend
        self._size = max(size, 1)
        self._prefix = f"ckptio-doctor-{os.urandom(4).hex()}"
        self._key = f"{self._prefix}/object"
        self._big = f"{self._prefix}/large"
        self._unreachable = False

    def run(self) -> list[dict[str, Any]]:
        checks: list[tuple[str, Callable[[], str]]] = [
            ("list", self._list),
            ("put", self._put),
            ("create only if absent", self._create),
            ("read a range", self._read_range),
            ("head and list again", self._see),
            (f"write {format_bytes(self._size)}", self._write),
            (f"read {format_bytes(self._size)}", self._read),
            ("delete", self._delete),
        ]
        found = []
        try:
            for name, check in checks:
                found.append(self._run(name, check))
                if self._unreachable:
                    # Each of the others would wait for the same.
                    break
            return found
        finally:
            if not self._unreachable:
                self._clean_up()

    def _run(self, name: str, check: Callable[[], str]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            detail, ok = check(), True
        except CkptioError as error:
            detail, ok = str(error), False
            self._unreachable = isinstance(error, StoreUnreachableError)
        seconds = time.monotonic() - began
        if ok and name.split()[0] in ("write", "read") and detail == "":
            detail = f"{format_bytes(self._size / max(seconds, 1e-9))}/s"
        return {"check": name, "ok": ok, "seconds": seconds, "detail": detail}

    def _list(self) -> str:
        return f"{sum(1 for _ in self._backend.list_children()):,} entries"

    def _put(self) -> str:
        self._backend.put(self._key, b"0123456789")
        return "10 bytes"

    def _create(self) -> str:
        key = f"{self._prefix}/once"
        self._backend.put(key, b"first", mode="create")
        try:
            self._backend.put(key, b"second", mode="create")
        except AlreadyExistsError:
            return "the second one was refused, as it must be"
        raise StorageError("the second one was not refused: two writers could both win")

    def _read_range(self) -> str:
        buffer = bytearray(4)
        self._backend.read_into(self._key, 3, memoryview(buffer))
        if bytes(buffer) != b"3456":
            raise StorageError(f"bytes 3:7 came back as {bytes(buffer)!r}")
        return "4 bytes"

    def _see(self) -> str:
        if self._backend.head(self._key).size != 10:
            raise StorageError("the size is wrong")
        if self._key not in [info.key for info in self._backend.list(self._prefix)]:
            raise StorageError("what was written is not listed")
        return "what was written is seen at once"

    def _write(self) -> str:
        limits = self._backend.limits
        part = max(limits.part_size, limits.min_part_size)
        upload = self._backend.start_upload(self._big, self._size, part)
        data = memoryview(os.urandom(min(part, self._size)))

        def write(start: int) -> None:
            upload.write_part(start, data[: min(part, self._size - start)])

        try:
            for _ in self._transfer("writing").map(write, range(0, self._size, part)):
                pass
            upload.complete()
        except BaseException:
            upload.abort()
            raise
        return ""

    def _read(self) -> str:
        step = self._backend.limits.read_size

        def read(start: int) -> None:
            length = min(step, self._size - start)
            self._backend.read_into(self._big, start, memoryview(bytearray(length)))

        for _ in self._transfer("reading").map(read, range(0, self._size, step)):
            pass
        return ""

    def _delete(self) -> str:
        self._backend.delete([self._key])
        try:
            self._backend.head(self._key)
        except NotFoundError:
            return "gone at once"
        raise StorageError("it is still there")

    def _transfer(self, doing: str) -> Transfer:
        return Transfer(
            Operation(f"{doing} {self._backend.uri}"),
            concurrency=self._backend.limits.concurrency,
            memory=1,
        )

    def _clean_up(self) -> None:
        try:
            self._backend.delete([info.key for info in self._backend.list(self._prefix)])
        except CkptioError as error:
            print_error(f"{self._prefix} may be left behind: {error}")
