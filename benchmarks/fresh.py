"""Running one measurement in a fresh process.

A measurement is a function of a module that takes and returns what JSON can hold. What it needs,
credentials too, goes through standard input, so that no process list shows it.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.meter import HARNESS
from benchmarks.reserve import GIB, Reserve

ROOT = Path(__file__).parents[1]
_reserve = Reserve()


class MeasurementError(Exception):
    """A measurement failed; the message holds the end of what it printed."""


def run_fresh(
    function: str,
    request: Mapping[str, Any],
    *,
    python: str | Path = sys.executable,
    environment: Mapping[str, str] | None = None,
    seconds: float = 600,
    memory: int = GIB,
) -> dict[str, Any]:
    """Call ``package.module:function`` with `request` in a process of its own.

    Parameters
    ----------
    python : path
        The interpreter, of a virtual environment perhaps.
    environment : mapping, optional
        Added to this process's.
    seconds : float
        After which it is killed.
    memory : int
        Bytes that it finds free and at hand, once it is ready.
    """
    # This checkout's own code, whatever else is installed.
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "backends")))
    environ = {**os.environ, **(environment or {}), "PYTHONPATH": paths}
    with _held(memory) as line:
        try:
            done = subprocess.run(
                [str(python), "-m", "benchmarks.fresh", function],
                input=json.dumps(request),
                text=True,
                capture_output=True,
                env={**environ, HARNESS: str(line)},
                pass_fds=[line],
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(f"{function} was not done within {seconds:g} s") from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise MeasurementError(f"{function} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@contextmanager
def _held(memory: int) -> Iterator[int]:
    """Hold memory until the process says, on the file descriptor that it gets, that it is ready."""
    _reserve.hold(memory)
    ours, theirs = socket.socketpair()

    def listen() -> None:
        while ours.recv(1):
            _reserve.release()
            ours.send(b"g")

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield theirs.fileno()
    finally:
        theirs.close()
        ours.shutdown(socket.SHUT_RDWR)
        listener.join()
        ours.close()
        _reserve.hold(memory)  # at once, what was measured has only just left its memory


def main() -> None:
    """Be the fresh process."""
    module, _, name = sys.argv[1].partition(":")
    request = json.load(sys.stdin)
    print(json.dumps(getattr(importlib.import_module(module), name)(request)), flush=True)
    # Not every client can take its threads down in time, and nothing is left to be lost.
    os._exit(0)


if __name__ == "__main__":
    main()
