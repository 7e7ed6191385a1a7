"""When to save: small schedules, joined by ``|``; any of them suffices.

    every.steps(100) | every.minutes(15) | every.steps([1, 10])

A schedule is a pure function of the step and of the time since the last save; it has no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from ckptio.errors import InvalidOptionError

__all__ = ["Schedule", "minutes", "steps"]


class Schedule(ABC):
    """Decides at which steps to save.

    Attributes
    ----------
    timed : bool
        Whether it looks at the time, on which several processes must first agree.
    """

    timed: bool = False

    @abstractmethod
    def due(self, step: int, seconds: float) -> bool:
        """Whether to save at a step.

        Parameters
        ----------
        step : int
        seconds : float
            Since the last save, or since the training began.
        """

    def __or__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        return _AnyOf(self, other)


def steps(n: int | Iterable[int]) -> Schedule:
    """Save at each multiple of `n`, 0 included, or at the steps listed.

    Examples
    --------
    >>> from ckptio import every
    >>> schedule = every.steps(100) | every.steps([1, 10])
    >>> [step for step in range(250) if schedule.due(step, seconds=0.0)]
    [0, 1, 10, 100, 200]
    """
    if not isinstance(n, int):
        return _Listed(frozenset(n))
    if n < 1:
        raise InvalidOptionError(f"every.steps needs a positive number of steps, not {n!r}")
    return _Multiples(n)


def minutes(m: float) -> Schedule:
    """Save when the last save was begun at least `m` minutes ago."""
    if not m > 0:
        raise InvalidOptionError(f"every.minutes needs a positive number of minutes, not {m!r}")
    return _Minutes(m)


@dataclass(frozen=True)
class _Multiples(Schedule):
    n: int

    def due(self, step: int, seconds: float) -> bool:
        return step % self.n == 0


@dataclass(frozen=True)
class _Listed(Schedule):
    steps: frozenset[int]

    def due(self, step: int, seconds: float) -> bool:
        return step in self.steps


@dataclass(frozen=True)
class _Minutes(Schedule):
    minutes: float
    timed = True

    def due(self, step: int, seconds: float) -> bool:
        return seconds >= 60 * self.minutes


class _AnyOf(Schedule):
    def __init__(self, *schedules: Schedule) -> None:
        self.schedules = schedules
        self.timed = any(schedule.timed for schedule in schedules)

    def due(self, step: int, seconds: float) -> bool:
        return any(schedule.due(step, seconds) for schedule in self.schedules)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.schedules))
