"""Running one measurement in a fresh process.

A measurement is a function of a module that takes and returns what JSON can hold. What it needs,
credentials too, goes through standard input, so that no process list shows it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class MeasurementError(Exception):
    """A measurement failed; the message holds the end of what it printed."""


def run_fresh(
    function: str,
    request: Mapping[str, Any],
    *,
    python: str | Path = sys.executable,
    environment: Mapping[str, str] | None = None,
    seconds: float = 600,
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
    """
    # This checkout's own code, whatever else is installed.
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "backends")))
    environ = {**os.environ, **(environment or {}), "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            [str(python), "-m", "benchmarks.fresh", function],
            input=json.dumps(request),
            text=True,
            capture_output=True,
            env=environ,
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


def main() -> None:
    """Be the fresh process."""
    module, _, name = sys.argv[1].partition(":")
    request = json.load(sys.stdin)
    print(json.dumps(getattr(importlib.import_module(module), name)(request)), flush=True)
    # Not every client can take its threads down in time, and nothing is left to be lost.
    os._exit(0)


if __name__ == "__main__":
    main()
