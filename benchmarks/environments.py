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
_TORCH_NEEDS = {"dcp_s3": "s3torchconnector[dcp]==1.5.0"}
_NEEDS = {"orbax": "orbax.checkpoint", "tensorstore": "tensorstore", "safetensors": "safetensors"}


class PeerUnavailableError(Exception):
    """The peer cannot be had here; the message says why."""


def python_of(kind: str, module: str) -> Path:
    """Return the interpreter for a kind of peer, made first if it has to be."""
    if kind == "torch":
        needed = _TORCH_NEEDS.get(module)
        return _torch(needed) if needed else _torch()
    needed = _NEEDS.get(module, "ckptio")
    try:
        found = importlib.util.find_spec(needed)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise PeerUnavailableError(f"{module} is not installed: pip install -e '.[bench]'")
    return Path(sys.executable)


@cache
def _torch(*more: str) -> Path:
    """Return the interpreter of PyTorch's environment, with these packages too."""
    place = ROOT / ".venv-bench-torch"
    if not place.parent.joinpath("pyproject.toml").exists():
        place = Path(tempfile.gettempdir(), "ckptio-bench-torch")
    python = place / "bin/python"
    try:
        if not python.exists():
            print(f"making a virtual environment with {TORCH}", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        for needed in (TORCH, *more):
            done = place / f"{needed}.installed"
            if not done.exists():
                _install(python, needed)
                done.touch()
    except (subprocess.SubprocessError, OSError) as error:
        raise PeerUnavailableError(f"PyTorch's environment: {error}") from error
    return python


def _install(python: Path, needed: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # PyTorch is named each time, so that nothing else brings in another build of it.
    command += [*dict.fromkeys((TORCH, needed)), "numpy"]
    # What PYTHONPATH adds would count as installed.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # The wheel may be at hand already; PyTorch's own index is asked only where it is not.
    for source in ((), ("--extra-index-url", INDEX)):
        done = subprocess.run(
            [*command, *source],
            check=bool(source),
            capture_output=True,
            timeout=1200,
            env=environ,
        )
        if not done.returncode:
            return
