"""The interpreters of the peers: this one, and PyTorch's, in a virtual environment of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from benchmarks.fresh import ROOT

TORCH = "torch==2.13.0+cpu"
INDEX = "https://download.pytorch.org/whl/cpu"
_NEEDS = {"orbax": "orbax.checkpoint", "tensorstore": "tensorstore", "safetensors": "safetensors"}


class PeerUnavailableError(Exception):
    """The peer cannot be had here; the message says why."""


def python_of(kind: str, module: str) -> Path:
    """Return the interpreter for a kind of peer, made first if it has to be."""
    if kind == "torch":
        return _torch()
    needed = _NEEDS.get(module, "ckptio")
    try:
        found = importlib.util.find_spec(needed)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise PeerUnavailableError(f"{module} is not installed: pip install -e '.[bench]'")
    return Path(sys.executable)


@cache
def _torch() -> Path:
    place = ROOT / ".venv-bench-torch"
    if not place.parent.joinpath("pyproject.toml").exists():
        place = Path(tempfile.gettempdir(), "ckptio-bench-torch")
    python, done = place / "bin/python", place / TORCH
    if done.exists():
        return python
    print(f"making a virtual environment with {TORCH}", flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # What PYTHONPATH adds would count as installed.
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # Where wheels are at hand already, an index that cannot be reached must not take minutes.
        command = [*install, TORCH, "numpy", "--extra-index-url", INDEX, "--retries", "0"]
        subprocess.run(command, check=True, capture_output=True, timeout=1200, env=environ)
    except (subprocess.SubprocessError, OSError) as error:
        raise PeerUnavailableError(f"{TORCH} could not be installed: {error}") from error
    done.touch()
    return python
