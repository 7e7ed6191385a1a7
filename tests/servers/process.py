"""Starting a server for the tests, and being sure that it is gone afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


class ServerUnavailableError(Exception):
    """The server is not installed, or did not start; the message says what to do."""


def unavailable(error: Exception) -> None:
    """Fail under CI, skip elsewhere: a store that CI cannot test is not tested."""
    if os.environ.get("CI"):
        pytest.fail(f"under CI every server has to run: {error}")
    pytest.skip(str(error))


def free_ports(count: int) -> list[int]:
    """Return distinct ports of 127.0.0.1 that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


@contextlib.contextmanager
def running(
    command: Sequence[str | Path], ready_url: str, *, seconds: float = 60
) -> Iterator[None]:
    """Run a server until the block ends; it is ready once `ready_url` answers anything.

    It runs in a session of its own and is killed with all its children: its data is a throwaway
    directory, and some servers take half a minute to stop politely.
    """
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerUnavailableError(f"cannot start {command[0]}: {error}") from error
        try:
            _wait_until_ready(process, ready_url, seconds, log.name)
            yield
        except ServerUnavailableError as error:
            log.seek(0)
            tail = log.read()[-2000:].decode(errors="replace")
            raise ServerUnavailableError(f"{error}\n{tail}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, seconds: float, log: object
) -> None:
    deadline = time.monotonic() + seconds
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerUnavailableError(f"{process.args!r} ended with {process.returncode}")
        try:
            opener.open(url, timeout=1).close()
            return
        except urllib.error.HTTPError:
            return  # it speaks HTTP: that is ready
        except (OSError, urllib.error.URLError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)  # polls: a server tells nobody when it is ready
    raise ServerUnavailableError(f"{process.args!r} was not ready within {seconds} s")
