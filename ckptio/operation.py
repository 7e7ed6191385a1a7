"""One operation of a user: what is being done, by when, and whether it was given up."""

from __future__ import annotations

import threading
import time

from ckptio.errors import DeadlineExceededError

__all__ = ["Operation"]


class Operation:
    """A save, a restore, a look-up; its threads and requests share one.

    Parameters
    ----------
    doing : str
        For messages: ``saving to s3://…``.
    seconds : float, optional
        From now, for all of it; by default there is no end.

    Attributes
    ----------
    given_up : threading.Event
        Set when one part failed, so that the others need not go on.
    """

    def __init__(self, doing: str, seconds: float | None = None) -> None:
        self.doing = doing
        self.given_up = threading.Event()
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        """Return the seconds that are left, None if there is no end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def too_late(self, why: object = "") -> DeadlineExceededError:
        """Return the error that says what was being done when time was up."""
        reason = f": {why}" if why else ""
        return DeadlineExceededError(f"not done within {self._seconds:g} s: {self.doing}{reason}")
