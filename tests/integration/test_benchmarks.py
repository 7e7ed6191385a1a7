"""The benchmarks run from one command, and leave tables that people and programs can read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_driver_is_measured_against_its_sdk(tmp_path):
    done = subprocess.run(
        [
            *[sys.executable, "-m", "benchmarks", "--out", tmp_path],
            *["stores", "--quick", "--only", "local"],
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {line.rsplit(None, 4)[0] for line in done.stdout.splitlines() if line}
    assert {"ckptio", "files, buffered"} <= rows
    found = json.loads((tmp_path / "stores.json").read_text())
    measured = {(f["client"], f["verb"]) for f in found["figures"] if f["seconds"] > 0}
    assert measured >= {(c, v) for c in ("ckptio", "files, buffered") for v in ("write", "read")}
    assert "| files, buffered |" in (tmp_path / "stores.md").read_text()
    assert max(map(len, done.stdout.splitlines()[2:-1])) <= 80
