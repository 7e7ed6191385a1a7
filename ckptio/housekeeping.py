"""What a run needs done behind the training's back: old steps deleted, dead attempts collected.

Nothing here delays the training, or fails it: what goes wrong is logged and tried again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ckptio.checkpoint import collect_garbage
from ckptio.errors import NotFoundError
from ckptio.keep import Policy
from ckptio.steps import Run

__all__ = ["Housekeeping"]

_log = logging.getLogger("ckptio")

LONGEST_COLLECTION = 10.0
"""Seconds for which `Housekeeping.close` waits for a collection of garbage."""
LONGEST_HURRY = 2.0
"""Seconds for which it waits for what is under way when the process has to leave."""


class Housekeeping:
    """One thread that applies a policy after each commit; another, at the start, for garbage.

    Parameters
    ----------
    run : Run
    policy : Policy, optional
        What to keep; without one nothing is deleted.
    """

    def __init__(self, run: Run, policy: Policy | None) -> None:
        self._run = run
        self._policy = policy
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._hurry = False
        self._worker: threading.Thread | None = None
        self._collector: threading.Thread | None = None

    def collect_garbage(self) -> None:
        """Begin to remove what dead attempts left anywhere in the run."""
        self._collector = _start("ckptio-garbage", self._collect)

    def after(self, step: int, committed: Callable[[], bool]) -> None:
        """Apply the policy once a step was committed.

        Parameters
        ----------
        step : int
            Is kept, whatever the policy says: who goes back to an older step wants what is saved
            from there.
        committed : callable
            Waits for the commit; false if it failed.
        """
        if self._worker is None:
            self._worker = _start("ckptio-housekeeping", self._work)
        self._jobs.put(lambda: self._apply(step, committed))

    def wait(self) -> None:
        """Return when everything that was asked for is done."""
        self._jobs.join()

    def close(self, *, hurry: bool = False) -> None:
        """Finish what was begun.

        Parameters
        ----------
        hurry : bool
            Leave what is not done to a later run.
        """
        self._hurry = hurry
        if self._worker is not None:
            self._jobs.put(None)
            # Even in a hurry, a thread gets the time to end by itself: one that the interpreter's
            # exit cuts off inside an extension module may abort the process.
            self._worker.join(LONGEST_HURRY if hurry else None)
            self._worker = None
        if self._collector is not None:
            self._collector.join(LONGEST_HURRY if hurry else LONGEST_COLLECTION)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.warning("old steps of %s were left alone", self._run.uri, exc_info=True)
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _apply(self, saved: int, committed: Callable[[], bool]) -> None:
        if not committed() or self._hurry:
            return
        doomed = self._run.half_deleted()
        if self._policy is not None:
            steps = self._run.steps()
            known = self._run.saved_steps(steps, with_facts=self._policy.reads_facts)
            kept = self._policy.kept(known) | {saved, *steps[-1:]}
            doomed += [old.step for old in known if old.step not in kept]
        for step in dict.fromkeys(doomed):
            if self._hurry:
                return
            self._delete(step)

    def _delete(self, step: int) -> None:
        try:
            self._run.delete(step)
            _log.info("deleted %s", self._run.step_uri(step))
        except NotFoundError:
            pass  # somebody else did
        except Exception:
            _log.warning(
                "%s could not be deleted; it is tried again after the next save",
                self._run.step_uri(step),
                exc_info=True,
            )

    def _collect(self) -> None:
        uri, options = self._run.uri, self._run.storage_options
        try:
            count = collect_garbage(uri, storage_options=options)
        except Exception:
            _log.warning("the garbage of %s was not collected", uri, exc_info=True)
        else:
            if count:
                _log.info("removed %d objects that dead attempts had left below %s", count, uri)


def _start(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
