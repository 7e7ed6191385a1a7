"""Memory that is held while nothing is measured, so that every measurement finds the same.

Many a hypervisor takes free memory back, some of it every two seconds, by whole huge pages. The
first touch of what it took costs up to fifteen times as much as of what it left, so a time would
tell what ran before, and how long ago. The harness therefore keeps memory in use, and sets it free
at the moment when a measurement begins: as on a machine whose memory is its own.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.limits import fresh_memory
from benchmarks.meter import HASTE

GIB = 1 << 30
SHARE = 0.4
"""Of the memory that is available; the rest is for making what is measured."""
_AVAILABLE = Path("/proc/meminfo")
_ALLOWED = Path("/sys/fs/cgroup/memory.max")


class Reserve:
    """The memory; nothing at first, and never any in a smoke test."""

    def __init__(self) -> None:
        self._held: memoryview | None = None

    def hold(self, nbytes: int) -> None:
        """Touch so many bytes, or what may be taken, unless they are held: for some seconds."""
        nbytes = 0 if HASTE in os.environ else min(nbytes, _most())
        if nbytes and (self._held is None or self._held.nbytes != nbytes):
            self.release()
            self._held = fresh_memory(nbytes)
            np.frombuffer(self._held, np.uint8)[:: mmap.PAGESIZE] = 1

    def release(self) -> None:
        """Set it free."""
        self._held = None


@cache
def _most() -> int:
    """Return how many bytes may be held: 0 where the system does not say what is available."""
    with suppress(OSError):
        for line in _AVAILABLE.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
                with suppress(OSError, ValueError):  # "max" where nothing is limited
                    available = min(available, int(_ALLOWED.read_text()))
                return int(available * SHARE) // GIB * GIB
    return 0
