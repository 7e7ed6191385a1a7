"""A line for each measurement: what is being measured, and how long the rest may take."""

from __future__ import annotations

import sys
import time

PROCESS = 3.0
"""Seconds that a fresh process needs beside what is measured: imports, a warm-up, a comparison."""
BYTES, LEAVES = 0.5e9, 1000.0
"""What a measurement moves in a second, roughly, the mean of all peers."""


def guess(nbytes: int, leaves: int = 0) -> float:
    """Guess the seconds of one measurement; how far off it is shows as the run goes on."""
    return PROCESS + nbytes / BYTES + leaves / LEAVES


class Progress:
    """How far a run is.

    Parameters
    ----------
    expected : float
        Seconds of all measurements, as guessed.
    """

    def __init__(self, expected: float) -> None:
        self._expected = expected
        self._begun = 0.0
        self._began = time.monotonic()
        print(f"about {expected / 60:.0f} minutes", file=sys.stderr, flush=True)

    def step(self, what: str, expected: float) -> None:
        """Say what begins now."""
        elapsed, left = time.monotonic() - self._began, self._expected - self._begun
        # The guess is taken as it is at first, and corrected by what was seen later.
        pace = (elapsed + 60) / (self._begun + 60)
        minutes = max(0.0, left * pace) / 60
        share = min(1.0, self._begun / self._expected) if self._expected else 1.0
        line = f"[{share:4.0%}, {minutes:.0f} min left] {what}"
        print(line, file=sys.stderr, flush=True)
        self._begun += expected
