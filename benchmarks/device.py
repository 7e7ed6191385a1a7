"""The device's limit: its best use on this machine, measured again beside every round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import limits
from benchmarks.fresh import run_fresh
from benchmarks.limits import Way
from benchmarks.machine import forget

MIB = 1 << 20
QUICK = dict.fromkeys(limits.WAYS, (Way(True, 4, 4 * MIB), Way(False, 4, 4 * MIB)))
"""Enough for a smoke test."""


class Device:
    """The disk below a directory.

    Attributes
    ----------
    ways : dict
        How it is written and read best, by verb.
    rates : dict
        Bytes a second then.
    """

    def __init__(self, directory: Path, *, quick: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "limit"
        self.ways: dict[str, Way] = {}
        self.rates: dict[str, float] = {}
        nbytes = 64 * MIB if quick else 1024 * MIB
        ways: Mapping[str, Sequence[Way]] = QUICK if quick else limits.WAYS
        for verb, way, taken in limits.best_ways(
            lambda verb, way: float(self._use(verb, nbytes, way)["seconds"]), ways
        ):
            self.ways[verb], self.rates[verb] = way, nbytes / taken
        self._file.unlink()

    def __str__(self) -> str:
        return "; ".join(
            f"{verb} {self.rates[verb] / 1e9:.2f} GB/s with {way}"
            for verb, way in self.ways.items()
        )

    def measure(self, sizes: Mapping[str, int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the cost of writing and reading so many bytes: ``"save"`` and ``"restore"``."""
        try:
            for verb, size in sizes.items():
                yield verb, self._sized(verb, size)
        finally:
            self._file.unlink(missing_ok=True)

    def _sized(self, verb: str, size: int) -> Mapping[str, Any]:
        way = self.ways[verb]
        blocks = -(-size // way.block)
        if blocks == 1:  # a tiny workload: in one piece as small as it is, in whole pages
            way = Way(way.direct, 1, -(-size // 4096) * 4096)
        nbytes = blocks * way.block
        if verb == "restore":  # what is read has to be there first
            self._use("save", nbytes, Way(way.direct, 8, way.block))
        found = self._use(verb, nbytes, way)
        return {**found, "seconds": found["seconds"] * size / nbytes}

    def _use(self, verb: str, nbytes: int, way: Way) -> dict[str, Any]:
        if verb == "restore":
            forget([self._file])
        request = {"what": verb, "path": str(self._file), "nbytes": nbytes}
        request["way"] = limits.as_json(way)
        return run_fresh("benchmarks.limits:measure", request, memory=2 * nbytes)
