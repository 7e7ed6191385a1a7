"""Notice of preemption: SIGTERM, or JAX's preemption sync point where several processes train.

A single process notes SIGTERM by a handler of its own, which calls the one that was there before.
Where `jax.distributed` runs, JAX itself catches SIGTERM, tells all processes, and has them agree
on the step at which to save.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

from ckptio.errors import InvalidOptionError

__all__ = ["Preemption"]

_log = logging.getLogger("ckptio")

EXIT_CODE = 128 + signal.SIGTERM
"""What a process that SIGTERM ends is reported with by a shell."""


class Preemption:
    """Listens for a notice until it is closed.

    Parameters
    ----------
    alone : bool
        Whether this process is the only one.

    Raises
    ------
    InvalidOptionError
        If a handler is needed and this is not the main thread.
    """

    def __init__(self, *, alone: bool) -> None:
        self._noticed = False  # not an Event: a handler must not wait for a lock
        self._answered = False
        self._point: tuple[int, bool] | None = None
        self._previous: Any = None
        self._installed = False
        self._alone = alone
        if alone:
            if threading.current_thread() is not threading.main_thread():
                raise InvalidOptionError(
                    "preemption=True handles SIGTERM, which only the main thread can: make the "
                    "CheckpointManager there, or pass preemption=False"
                )
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def reached(self, step: int) -> bool:
        """Whether to save at this step and leave; the same on all processes.

        With several processes, to be called at every step; more than once for one is fine.
        """
        if self._alone:
            return self._noticed
        if self._point is None or self._point[0] != step:
            self._point = step, _reached_sync_point(step)
        return self._point[1]

    def leave(self) -> None:
        """End this process as SIGTERM would have, but unwinding, so that everything is closed."""
        self._answered = True
        raise SystemExit(EXIT_CODE)

    def close(self, *, pass_on: bool) -> None:
        """Put the previous handler back.

        Parameters
        ----------
        pass_on : bool
            Let a notice that nobody acted on end the process after all.
        """
        if not self._installed:
            return
        self._installed = False
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            # None stands for a handler that was not installed from Python, and cannot be put back.
            previous = signal.SIG_DFL if self._previous is None else self._previous
            signal.signal(signal.SIGTERM, previous)
            unanswered = self._noticed and not self._answered
            if pass_on and unanswered and previous == signal.SIG_DFL:
                os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._noticed = True
        if callable(self._previous):
            self._previous(number, frame)


def _reached_sync_point(step: int) -> bool:
    from jax.experimental import multihost_utils

    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError as error:
        raise InvalidOptionError(
            "preemption=True needs JAX's preemption service where several processes train: set "
            "jax_enable_preemption_service before jax.distributed.initialize, or pass "
            f"preemption=False ({error})"
        ) from error
