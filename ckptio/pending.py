"""Saves in the background: one thread each, one at a time, and none lost at exit."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ckptio.attempt import Attempt
from ckptio.errors import SaveCancelledError

__all__ = ["PendingSave", "wait_for_others"]

R = TypeVar("R")

_log = logging.getLogger("ckptio")

_EXIT_PATIENCE = 3600.0  # seconds for a save without a deadline, when the interpreter exits
_lock = threading.Lock()
_running: set[PendingSave[Any]] = set()


class PendingSave(Generic[R]):
    """A save in the background.

    Attributes
    ----------
    uri : str
        Where to.
    """

    def __init__(self, attempt: Attempt, finish: Callable[[], R]) -> None:
        self.uri = attempt.opened.uri
        self._attempt = attempt
        self._finish = finish
        self._done = threading.Event()
        self._report: R | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        _at_exit()
        self._thread = threading.Thread(target=self._run, name="ckptio-save", daemon=True)
        with _lock:
            _running.add(self)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._report = self._finish()
        except BaseException as error:
            self._error = error
        finally:
            # The caller may keep this for long; the copies must not stay for as long.
            self._attempt.forget()
            with _lock:
                _running.discard(self)
            self._done.set()

    def done(self) -> bool:
        """Whether it is over, well or badly."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> R:
        """Wait, and return the report; raise what went wrong.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; the save goes on afterwards.

        Raises
        ------
        TimeoutError
            If it is not over in time.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._report  # type: ignore[return-value]  # set where there is no error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return what went wrong, None if nothing did."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"saving to {self.uri} goes on after {timeout:g} s of waiting")
        return self._error

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that this process has written so far, and has to write (0 until it is planned)."""
        return self._attempt.written, self._attempt.nbytes

    def cancel(self) -> bool:
        """Abandon the save; return whether that came in time.

        If so, `result` raises `SaveCancelledError`, and nothing of the save is visible. In a
        program of several processes it fails in all of them.
        """
        if not self._attempt.operation.cancel(
            SaveCancelledError(f"saving to {self.uri} was cancelled")
        ):
            return False
        self._done.wait()
        return isinstance(self._error, SaveCancelledError)

    def __repr__(self) -> str:
        state = "done" if self.done() else "running"
        return f"<PendingSave {self.uri}: {state}>"


def wait_for_others() -> None:
    """Wait until no save is running in the background.

    An observer that saves when it hears of a commit is called by the save itself: it does not wait
    for that one.
    """
    while True:
        with _lock:
            here = threading.current_thread()
            pending = next((save for save in _running if save._thread is not here), None)
        if pending is None:
            return
        pending._done.wait()


_hooked = False


def _at_exit() -> None:
    """Have `_settle` called at exit, before the threads of executors are gone.

    The plain atexit functions run after `concurrent.futures` has shut its executors down, which
    asynchronous clients need to look up names. `threading` has a list of its own for that, which
    `concurrent.futures` uses too; it has no public name.
    """
    global _hooked
    if not _hooked:
        _hooked = True
        register = getattr(threading, "_register_atexit", atexit.register)
        register(_settle)


def _settle() -> None:
    with _lock:
        pending = [*_running]
    for save in pending:
        options, operation = save._attempt.options, save._attempt.operation
        if options.at_exit == "abandon":
            save.cancel()
        elif not save._done.wait(operation.remaining() or _EXIT_PATIENCE):
            _log.error("exiting although saving to %s is not finished", save.uri)
