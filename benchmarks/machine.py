"""The machine: what it is, how busy it is, and how its page cache is emptied."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_DROP = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Machine:
    """What has to be known to read the figures, and nothing that names the machine.

    Attributes
    ----------
    cores : int
        That this process may use.
    processor, system, python : str
    memory_gb : float
    load : tuple of float
        Mean number of runnable processes over 1, 5 and 15 minutes when the run began.
    packages : dict
        Versions of what was measured.
    """

    cores: int
    processor: str
    system: str
    python: str
    memory_gb: float
    load: tuple[float, float, float]
    packages: dict[str, str]

    @classmethod
    def here(cls, packages: Iterable[str] = ()) -> Machine:
        found = {}
        for name in packages:
            with suppress(PackageNotFoundError):
                found[name] = version(name)
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return cls(
            cores=len(os.sched_getaffinity(0)),
            processor=_processor(),
            system=f"{platform.system()} {platform.release().split('-')[0]}",
            python=platform.python_version(),
            memory_gb=round(pages * page / 1e9, 1),
            load=os.getloadavg(),
            packages=found,
        )

    def __str__(self) -> str:
        return (
            f"{self.cores} cores ({self.processor}), {self.memory_gb:g} GB, {self.system}, "
            f"Python {self.python}; load average at the start {self.load[0]:.1f}"
        )

    def afterwards(self) -> str:
        """Return the same, with the load by now: the run itself is about 1 of it."""
        return f"{self}, at the end {os.getloadavg()[0]:.1f}"

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Machine:
        """Read what `as_json` returned."""
        return cls(**{field.name: found[field.name] for field in fields(cls)})

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "load_at_the_end": os.getloadavg()}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def forget(paths: Iterable[Path]) -> str:
    """Empty the page cache, of everything if that is permitted, else of these files.

    Directories stand for the files below them. Returns how it was done.
    """
    os.sync()  # only clean pages can be dropped
    with suppress(OSError):
        _DROP.write_text("3")
        return "caches dropped"
    for path in paths:
        for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    return "files dropped from the cache"
