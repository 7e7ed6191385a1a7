"""What a block of code costs: seconds, CPU seconds, memory; and the spread of repetitions."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
HASTE = "CKPTIO_BENCH_HASTE"
"""Set in the environment of a smoke test, whose figures nobody reads."""
HARNESS = "CKPTIO_BENCH_HARNESS"
"""In the environment of a fresh process: the file descriptor on which it says that it is ready."""


@dataclass
class Cost:
    """What was measured; filled when the block ends.

    Attributes
    ----------
    seconds : float
        By the clock.
    cpu_seconds : float
        Of all threads of this process, in user and kernel mode.
    resident_before, peak : int
        Bytes: before the block, and at the most during it.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    resident_before: int = 0
    peak: int = 0

    def as_json(self, result: int = 0) -> dict[str, float]:
        """Return it with the extra memory: the peak, less what was there and the result's bytes."""
        return {**asdict(self), "extra": self.peak - self.resident_before - result}


@contextmanager
def metered() -> Iterator[Cost]:
    """Measure a block."""
    cost = Cost(resident_before=resident())
    _CLEAR.write_text("5")  # the kernel's high-water mark begins anew
    cpu, began = time.process_time(), time.perf_counter()
    yield cost
    cost.seconds = time.perf_counter() - began
    cost.cpu_seconds = time.process_time() - cpu
    cost.peak = _status("VmHWM")


def settle() -> None:
    """Give back what is free: it would be counted as there before, and hide what is used next.

    The harness, told that all is ready, gives up the memory that it held (see `reserve`).
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    if HARNESS in os.environ:
        fd = int(os.environ[HARNESS])
        os.write(fd, b"r")
        os.read(fd, 1)


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


@dataclass(frozen=True)
class Spread:
    """Repetitions of one figure: the median, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        if self.low == self.high:
            return format(self.median, spec)
        return f"{self.median:{spec}} ({self.low:{spec}}–{self.high:{spec}})"
