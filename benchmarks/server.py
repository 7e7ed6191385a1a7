"""A server's limit: the best that plain HTTP gets out of it, measured again beside every round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.clients import clients_of, limit_clients_of
from benchmarks.fresh import run_fresh
from benchmarks.targets import Target
from benchmarks.transfer import Task

MIB = 1 << 20
SIZES = (16 * MIB, 64 * MIB)
QUICK = (1 * MIB,)
"""Enough for a smoke test."""
VERBS = {"write": "save", "read": "restore"}


@dataclass(frozen=True)
class Way:
    """A way to use a server: who asks, and for objects of how many bytes."""

    client: str
    size: int

    def __str__(self) -> str:
        return f"{self.client}, {self.size / MIB:g} MiB each"


class Server:
    """What a server can do.

    Attributes
    ----------
    ways : dict
        How most is written to it and read from it, by verb; empty where plain HTTP is not spoken.
    rates : dict
        Bytes a second then.
    """

    def __init__(self, target: Target, nbytes: int, sizes: Sequence[int]) -> None:
        self.ways: dict[str, Way] = {}
        self.rates: dict[str, float] = {}
        best: dict[str, tuple[float, Way]] = {}
        for way in (Way(c, s) for c, s in product(limit_clients_of(target.uri), sizes)):
            for verb, found in _moved(target, way, way, nbytes):
                rate = found["nbytes"] / found["seconds"]
                best[verb] = max(best.get(verb, (0.0, way)), (rate, way), key=lambda pair: pair[0])
        for verb, (rate, way) in best.items():
            self.ways[verb], self.rates[verb] = way, rate

    def __str__(self) -> str:
        return "; ".join(
            f"{verb} {self.rates[verb] / 1e6:.0f} MB/s with {way}"
            for verb, way in self.ways.items()
        )

    def measure(self, target: Target, nbytes: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the cost of moving so many bytes in the best way."""
        if not self.ways:
            return
        for verb, found in _moved(target, self.ways["save"], self.ways["restore"], nbytes):
            yield verb, {**found, "seconds": found["seconds"] * nbytes / found["nbytes"]}


def _moved(
    target: Target, writing: Way, reading: Way, nbytes: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Write as many objects as there are in so many bytes, and read them."""
    checker = clients_of(target.uri, target.storage_options)[1]
    place = "limit"
    count = max(1, round(nbytes / writing.size))
    try:
        for verb, way in {"write": writing, "read": reading}.items():
            request = Task(
                way.client,
                checker,
                verb,
                target.below(place),
                target.storage_options,
                count,
                writing.size,
                reading.size,
                0,
            )
            found = run_fresh("benchmarks.transfer:measure", request.as_json(), memory=3 * nbytes)
            yield VERBS[verb], {**found, "nbytes": count * writing.size}
    finally:
        target.clear(place)
