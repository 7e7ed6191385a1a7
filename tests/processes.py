"""Running a scenario in several real processes of `jax.distributed`, on CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers.process import free_ports

_MAIN = Path(__file__).with_name("scenarios.py")


@dataclass
class Outcome:
    """How one process ended.

    Attributes
    ----------
    code : int
        Its exit status; negative is the signal that killed it.
    result : object
        What the scenario returned, or ``{"error": type, "message": text}``.
    stderr : str
    """

    code: int
    result: Any
    stderr: str


def run(
    scenario: str,
    count: int,
    *,
    devices: int = 2,
    seconds: float = 60,
    stalled: int | None = None,
    **arguments: Any,
) -> list[Outcome]:
    """Run a function of scenarios.py in so many processes at once, and wait for all.

    Each process has `devices` virtual devices. No process outlives the time; one that is `stalled`
    on purpose is killed when the others are done.
    """
    (port,) = free_ports(1)
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(_MAIN.parent),
    }
    told = json.dumps(arguments)
    started = [
        subprocess.Popen(
            [sys.executable, str(_MAIN), str(port), str(count), str(i), scenario, told],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    outcomes: dict[int, Outcome] = {}
    # Process 0 goes late: the others cannot live without it. One that hangs on purpose goes last.
    order = [i for i in reversed(range(count)) if i != stalled]
    try:
        for i in order:
            out, err = started[i].communicate(timeout=seconds)
            outcomes[i] = _outcome(started[i], out, err)
        if stalled is not None:
            started[stalled].kill()
            outcomes[stalled] = _outcome(started[stalled], *started[stalled].communicate())
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return [outcomes[i] for i in range(count)]


def _outcome(process: subprocess.Popen[str], out: str, err: str) -> Outcome:
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    result = json.loads(lines[-1].removeprefix("RESULT ")) if lines else None
    return Outcome(process.returncode, result, err[-4000:])
