"""`CheckpointManager`, the training loop's view: when to save, what to keep, where to resume."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from time import monotonic
from types import TracebackType
from typing import Any, Self

from ckptio.errors import AlreadyExistsError, InvalidOptionError
from ckptio.every import Schedule
from ckptio.every import steps as every_steps
from ckptio.housekeeping import Housekeeping
from ckptio.keep import Facts, Policy
from ckptio.metrics import as_floats, metadata_with
from ckptio.options import RestoreOptions, SaveOptions
from ckptio.pending import PendingSave
from ckptio.preemption import Preemption
from ckptio.run_reader import RunReader
from ckptio.saving import SaveReport, save_async
from ckptio.stateful import captured
from ckptio.steps import checked_step

__all__ = ["CheckpointManager"]

_log = logging.getLogger("ckptio")


class CheckpointManager(RunReader):
    """The checkpoints of one run, one for each saved step, below one URI.

    Parameters
    ----------
    uri : str or os.PathLike
        Of the run: ``gs://bucket/run``, or a local path.
    keep : Policy, optional
        Which steps are kept, see `ckptio.keep`; by default all. A step is deleted in the
        background, after a newer one was committed, and never the newest.
    every : Schedule, optional
        At which steps `save` saves, see `ckptio.every`; by default at each one.
    async_ : bool
        Write in the background. At most one save is under way: the next one waits for it.
    step_format : str
        How steps' directories are called. What is called otherwise is foreign, and left alone.
    preemption : bool
        On SIGTERM (of any process, where `jax.distributed` is in use) save at the next step, and
        leave: `save` then raises `SystemExit` once the step is durable. For the main thread.
    collect_garbage : bool
        At the start, remove in the background what attempts that died have left in this run.
    options, restore_options : SaveOptions, RestoreOptions, optional
        Memory, concurrency, sizes, deadline of each save and restore.
    storage_options : mapping, optional
        For the driver, in fsspec's own spelling.
    progress : bool
        Show progress bars.

    Attributes
    ----------
    uri : str

    Notes
    -----
    An error of a background save is raised once, by the next `save`, `wait` or `close`. Objects
    with `state_dict` and `load_state_dict`, or `get_state` and `set_state`, may be leaves of what
    is saved; in `like`, they are restored in place.

    With several processes, all of them make the manager and call `save`, `restore`, `delete` and
    such at the same steps; process 0 chooses, deletes and collects garbage, and what only hosts
    hold is saved as process 0 has it. `steps`, `latest_step`, `best_step` and `metrics` may be
    called by any process alone.

    Examples
    --------
    A step is the number of updates done, so that a run resumes with the next one:

    >>> import ckptio, numpy as np
    >>> from ckptio import every, keep
    >>> from ckptio.manager import CheckpointManager
    >>> state = {"w": np.zeros(3)}
    >>> with CheckpointManager(
    ...     "memory://doc/run", keep=keep.latest(2), every=every.steps(10)
    ... ) as manager:
    ...     state, done = manager.restore_latest(like=state, default=(state, 0))
    ...     for step in range(done + 1, 36):
    ...         state = {"w": state["w"] + 1}
    ...         saved = manager.save(step, state, metrics={"loss": 1 / step})
    >>> with CheckpointManager("memory://doc/run") as manager:
    ...     manager.steps(), manager.metrics(30), manager.restore_latest()
    ([20, 30], {'loss': 0.03333333333333333}, ({'w': array([30., 30., 30.])}, 30))
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        keep: Policy | None = None,
        every: Schedule | None = None,
        async_: bool = True,
        step_format: str = "step-{step:08d}",
        preemption: bool = False,
        collect_garbage: bool = True,
        options: SaveOptions | None = None,
        restore_options: RestoreOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> None:
        if not isinstance(keep, Policy | None) or not isinstance(every, Schedule | None):
            raise InvalidOptionError(
                "keep= is a policy, as in keep.latest(3), and every= a schedule, as in "
                f"every.steps(100), not {keep!r} and {every!r}"
            )
        super().__init__(
            uri,
            keep=keep,
            step_format=step_format,
            options=restore_options,
            storage_options=storage_options,
            progress=progress,
        )
        self._every = every or every_steps(1)
        self._async = async_
        self._options = options
        self._pending: tuple[int, PendingSave[SaveReport]] | None = None
        self._failures: list[BaseException] = []
        self._last_save = monotonic()
        self._decided: tuple[int, bool] | None = None
        self._leaving = False
        try:
            self._preemption = Preemption(alone=self._alone) if preemption else None
        except BaseException:
            self._run.close()
            raise
        first = self._agreement.group.index == 0
        self._housekeeping = Housekeeping(self._run, keep if first else None)
        if collect_garbage and first:
            self._housekeeping.collect_garbage()

    def should_save(self, step: int) -> bool:
        """Whether `save` would save at this step: the schedule says so, or a preemption."""
        step = checked_step(step)
        if self._preempted_at(step):
            return True
        # Decided once for a step, so that the clock gives one answer.
        if self._decided is None or self._decided[0] != step:
            seconds = monotonic() - self._last_save
            if self._every.timed:
                seconds = self._agreement.decide(lambda: seconds)
            self._decided = step, self._every.due(step, seconds)
        return self._decided[1]

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Save a step, if it is one to save; return as soon as the state may change.

        Parameters
        ----------
        step : int
        state : pytree
            As for `ckptio.save`; stateful objects too.
        metrics : mapping of str to number, optional
            For `keep.best`, `best_step` and `metrics`. NumPy's and JAX's scalars are looked at only
            when the step is saved.
        metadata : mapping, optional
            As for `ckptio.save`.
        force : bool
            Save whatever the schedule says, and overwrite the step if it exists.

        Returns
        -------
        bool
            Whether a save was begun (or, if not `async_`, done).

        Raises
        ------
        AlreadyExistsError
            If the step is committed already and `force` is false.
        SystemExit
            After a preemption, once the step is durable.
        CkptioError
            What an earlier save in the background raised, in which case nothing was saved now; or
            what keeps this step from being saved.
        """
        step = checked_step(step)
        self._check_open()
        preempted = self._preempted_at(step)
        # Several processes would hear of a failure at different steps, and part company.
        if self._alone and not preempted:
            self._settle(wait=False)
            self._raise_failures()
        if not force and not self.should_save(step):
            return False
        self._settle(wait=True)
        if preempted:  # this step is to be saved, whatever became of an earlier one
            self._log_failures()
        else:
            self._raise_failures()
        self._begin(step, state, metrics, metadata, force)
        if preempted or not self._async:
            self.wait()
        if preempted:
            self._leave(step)
        return True

    def _begin(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        force: bool,
    ) -> None:
        if step in self._run.half_deleted():
            self._housekeeping.wait()
        if force:
            self._run.forget(step)
        self._last_save = monotonic()
        values = as_floats(metrics)
        try:
            pending = save_async(
                self.step_uri(step),
                captured(state),
                overwrite=force,
                metadata=metadata_with(metadata, step, values),
                options=self._options,
                storage_options=self._storage_options,
                progress=self._progress,
            )
        except AlreadyExistsError:
            if self._preempted_at(step):
                return  # what matters is that it is there
            raise
        self._pending = step, pending
        self._agreement.forget()
        facts = Facts(datetime.now(UTC), values)

        def committed() -> bool:
            if pending.exception() is not None:
                return False
            self._run.remember(step, facts)
            return True

        self._housekeeping.after(step, committed)

    def wait(self) -> None:
        """Return when the save under way is committed; raise what it raised."""
        self._settle(wait=True)
        self._raise_failures()

    def close(self) -> None:
        """Finish saving and deleting, and release the store's connections. Twice is fine.

        Raises
        ------
        CkptioError
            What a save in the background raised and was not yet raised elsewhere.
        """
        self._close(pass_on=True)

    def _close(self, *, pass_on: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._settle(wait=True)
            self._housekeeping.close(hurry=self._leaving)
        finally:
            self._run.close()
            if self._preemption is not None:
                # An error on its way out ends the process too, and says more than a signal.
                self._preemption.close(pass_on=pass_on and not self._failures)
        self._raise_failures()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._close(pass_on=error is None)
        except Exception as failure:
            if error is None:
                raise
            # What ended the training goes on its way, and takes this along.
            _log.exception("while the training ended with %r", error)
            error.add_note(f"and a save of {self.uri} failed: {type(failure).__name__}: {failure}")

    def delete(self, step: int) -> None:
        """Delete a step now, be it the newest; waits for deletions under way.

        Raises
        ------
        NotFoundError
            If there is no such step.
        """
        self._settled()
        self._housekeeping.wait()
        step = checked_step(step)
        self._agreement.decide(lambda: self._run.delete(step))
        self._run.forget(step)

    def __repr__(self) -> str:
        return f"<CheckpointManager {self.uri}>"

    # What became of saves.

    def _settled(self) -> None:
        super()._settled()
        self._settle(wait=True)

    def _settle(self, *, wait: bool) -> None:
        """Take note of how the save under way ended, if it did, or wait until it does."""
        if self._pending is None:
            return
        step, pending = self._pending
        if not wait and not pending.done():
            return
        began = monotonic()
        error = pending.exception()
        if (waited := monotonic() - began) > 1:
            _log.info("waited %.1f s for the save of step %d", waited, step)
        self._pending = None
        if error is not None:
            error.add_note(f"while step {step} of {self.uri} was saved in the background")
            self._failures.append(error)

    def _raise_failures(self) -> None:
        if not self._failures:
            return
        first, *others = self._failures
        self._failures.clear()
        for other in others:
            first.add_note(f"and another save failed: {type(other).__name__}: {other}")
        raise first

    def _log_failures(self) -> None:
        for failure in self._failures:
            _log.error("a save of %s failed: %s", self.uri, failure, exc_info=failure)
        self._failures.clear()

    def _preempted_at(self, step: int) -> bool:
        return self._preemption is not None and self._preemption.reached(step)

    def _leave(self, step: int) -> None:
        assert self._preemption is not None
        self._leaving = True
        _log.warning("preempted: saved %s, leaving", self.step_uri(step))
        self._preemption.leave()
