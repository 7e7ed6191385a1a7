"""What ``import ckptio`` costs beyond NumPy, each time in a fresh process."""

from __future__ import annotations

import statistics
import subprocess
import sys

LIMIT_MS = 100
_CODE = """
import time, numpy
began = time.perf_counter()
import ckptio
print((time.perf_counter() - began) * 1000)
"""


def main(runs: int = 15) -> None:
    """Measure, print a line."""
    command = [sys.executable, "-c", _CODE]
    times = [
        float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(runs)
    ]
    print(
        f"import ckptio, beyond NumPy (limit {LIMIT_MS} ms)\n"
        f"  median {statistics.median(times):.0f} ms, {min(times):.0f} to {max(times):.0f} ms in "
        f"{runs} fresh processes"
    )


if __name__ == "__main__":
    main()
