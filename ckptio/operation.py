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
        self._reason: BaseException | None = None
        self._giving_up = threading.Lock()
        self._sealed = False
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        """Return the seconds that are left, None if there is no end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def too_late(self, why: object = "") -> DeadlineExceededError:
        """Return the error that says what was being done when time was up."""
        reason = f": {why}" if why else ""
        return DeadlineExceededError(f"not done within {self._seconds:g} s: {self.doing}{reason}")

    def give_up(self, reason: BaseException) -> None:
        """Let every thread of the operation end; the first reason is the one that counts."""
        with self._giving_up:
            self._reason = self._reason or reason
        self.given_up.set()

    def seal(self) -> None:
        """Pass the point of no return, unless the operation was given up: raise the reason then."""
        with self._giving_up:
            if self._reason is None:
                self._sealed = True
                return
        raise self._reason

    def cancel(self, reason: BaseException) -> bool:
        """Give up for the user's sake; return False if the point of no return is passed."""
        with self._giving_up:
            if self._sealed:
                return False
            self._reason = self._reason or reason
        self.given_up.set()
        return True

    def check(self) -> None:
        """Raise the reason if the operation was given up."""
        if self._reason is not None:
            raise self._reason
