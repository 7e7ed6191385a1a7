"""What to keep: small policies over the committed steps of a run, joined by ``|``.

    keep.latest(3) | keep.every(steps=1000) | keep.best(1, "loss")

A policy is a pure function of what is known of the steps. What none of them keeps is deleted by
`CheckpointManager`, which by itself never deletes the newest step, nor the one it saved last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import isnan
from typing import Literal, TypeVar

from ckptio.errors import InvalidOptionError

__all__ = ["Facts", "Mode", "Policy", "SavedStep", "all", "best", "every", "latest", "only"]

Mode = Literal["min", "max"]
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Facts:
    """What the manifest of a step says of it.

    Attributes
    ----------
    created : datetime
        When it was committed.
    metrics : mapping of str to float
        As given to `CheckpointManager.save`.
    """

    created: datetime
    metrics: Mapping[str, float]


class SavedStep:
    """One committed step, as policies see it; its facts are read when they are asked for.

    Attributes
    ----------
    step : int
    """

    def __init__(self, step: int, facts: Callable[[int], Facts]) -> None:
        self.step = step
        self._facts = facts

    @property
    def created(self) -> datetime:
        """When it was committed."""
        return self._facts(self.step).created

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that it was saved with; empty without any."""
        return self._facts(self.step).metrics

    def __repr__(self) -> str:
        return f"SavedStep({self.step})"


class Policy(ABC):
    """Decides which steps are kept.

    Attributes
    ----------
    reads_facts : bool
        Whether it looks at more than the numbers, so that the facts of all steps are worth reading
        at once, in parallel.
    """

    reads_facts: bool = False

    @abstractmethod
    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        """Return the steps to keep, of those given, which are in ascending order."""

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return _AnyOf(self, other)


def all() -> Policy:  # noqa: A001  # keep.all() reads as what it does
    """Keep every step."""
    return _All()


def latest(n: int) -> Policy:
    """Keep the `n` newest steps.

    Examples
    --------
    >>> from ckptio import keep
    >>> sorted(keep.latest(2).kept([keep.SavedStep(step, ...) for step in range(5)]))
    [3, 4]
    """
    return _Latest(_positive("n", n))


def every(*, steps: int | None = None, hours: float | None = None) -> Policy:
    """Keep one step in so many, for good.

    Parameters
    ----------
    steps : int, optional
        Keep the multiples of this.
    hours : float, optional
        Keep the oldest step, then each one that was committed at least this long after the last
        one kept.
    """
    if (steps is None) == (hours is None):
        raise InvalidOptionError("keep.every takes either steps= or hours=")
    if steps is not None:
        return _EverySteps(_positive("steps", steps))
    assert hours is not None
    return _EveryHours(_positive("hours", hours))


def best(n: int, metric: str, mode: Mode = "min") -> Policy:
    """Keep the `n` steps whose metric is lowest, or highest; of equals, the newer.

    Steps without that metric, and those where it is NaN, are not kept by this.
    """
    return Best(_positive("n", n), metric, checked_mode(mode))


def only(predicate: Callable[[SavedStep], bool]) -> Policy:
    """Keep the steps for which a function of a `SavedStep` is true.

    Examples
    --------
    >>> from ckptio import keep
    >>> policy = keep.latest(3) | keep.only(lambda saved: saved.metrics.get("accuracy", 0) > 0.9)
    """
    return _Only(predicate)


def rank(steps: Sequence[SavedStep], metric: str, mode: Mode) -> list[int]:
    """Return the steps that have a metric, the best one first; of equals, the newer one first."""
    sign = 1 if mode == "min" else -1
    values = {saved.step: saved.metrics.get(metric, float("nan")) for saved in steps}
    return sorted(
        (step for step, value in values.items() if not isnan(value)),
        key=lambda step: (sign * values[step], -step),
    )


def checked_mode(mode: str) -> Mode:
    """Return `mode` if it is one."""
    if mode == "min" or mode == "max":
        return mode  # type: ignore[return-value]  # narrowed by comparison
    raise InvalidOptionError(f"mode is 'min' or 'max', not {mode!r}")


def _positive(name: str, value: N) -> N:
    if not value > 0:
        raise InvalidOptionError(f"{name} must be positive, not {value!r}")
    return value


@dataclass(frozen=True)
class _All(Policy):
    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        return {saved.step for saved in steps}


@dataclass(frozen=True)
class _Latest(Policy):
    n: int

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        return {saved.step for saved in steps[-self.n :]}


@dataclass(frozen=True)
class _EverySteps(Policy):
    steps: int

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        return {saved.step for saved in steps if saved.step % self.steps == 0}


@dataclass(frozen=True)
class _EveryHours(Policy):
    hours: float
    reads_facts = True

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        found: set[int] = set()
        last: datetime | None = None
        # From the oldest on, so that what is kept once is kept again when others are gone.
        for saved in steps:
            if last is None or saved.created - last >= timedelta(hours=self.hours):
                found.add(saved.step)
                last = saved.created
        return found


@dataclass(frozen=True)
class Best(Policy):
    """See `best`."""

    n: int
    metric: str
    mode: Mode
    reads_facts = True

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        """Return the best `n`."""
        return {*rank(steps, self.metric, self.mode)[: self.n]}


@dataclass(frozen=True)
class _Only(Policy):
    predicate: Callable[[SavedStep], bool]

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        return {saved.step for saved in steps if self.predicate(saved)}


class _AnyOf(Policy):
    def __init__(self, *policies: Policy) -> None:
        self.policies = policies
        self.reads_facts = any(policy.reads_facts for policy in policies)

    def kept(self, steps: Sequence[SavedStep]) -> set[int]:
        return set().union(*(policy.kept(steps) for policy in self.policies))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


def find_best(policy: Policy) -> Best | None:
    """Return the first `best` in a policy, which says what a run is judged by."""
    if isinstance(policy, Best):
        return policy
    if isinstance(policy, _AnyOf):
        return next(filter(None, map(find_best, policy.policies)), None)
    return None
