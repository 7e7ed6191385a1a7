"""`RunReader`: the steps of a run, what they were saved with, and restoring them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ckptio import keep as keeping
from ckptio import processes
from ckptio.agreement import Agreement
from ckptio.checkpoint import Checkpoint
from ckptio.checkpoint import open as open_checkpoint
from ckptio.errors import CkptioError, InvalidOptionError, NotFoundError
from ckptio.keep import Mode, Policy
from ckptio.leaf import Leaf
from ckptio.metrics import facts_of
from ckptio.options import RestoreOptions
from ckptio.restoring import restore
from ckptio.stateful import restore_in_place
from ckptio.steps import Run, StepNames, checked_step

if TYPE_CHECKING:
    from jax.sharding import Sharding

__all__ = ["RunReader"]

_log = logging.getLogger("ckptio")

_MISSING: Any = object()


class _How(TypedDict, total=False):
    """The arguments of `ckptio.restore` that are passed on."""

    only: str | Iterable[str] | None
    sharding: Sharding | Callable[[Leaf], Sharding | None] | None
    strict: bool
    cast: bool
    verify: bool


class RunReader:
    """What a manager can do without saving; its arguments are documented there."""

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        keep: Policy | None,
        step_format: str,
        options: RestoreOptions | None,
        storage_options: Mapping[str, Any] | None,
        progress: bool,
    ) -> None:
        self._agreement = Agreement(processes.current())
        self._alone = self._agreement.group.count == 1
        self._run = Run(uri, StepNames(step_format), facts_of, storage_options)
        self.uri = self._run.uri
        self._judged = keeping.find_best(keep) if keep is not None else None
        self._restore_options = options
        self._storage_options = storage_options
        self._progress = progress
        self._closed = False

    def restore(self, step: int, like: Any = None, **how: Unpack[_How]) -> Any:
        """Restore a step; arguments are those of `ckptio.restore`.

        Stateful objects in `like` are given their states, after everything was read.

        Raises
        ------
        NotFoundError
            If there is no such step.
        """
        self._settled()
        uri = self.step_uri(checked_step(step))

        def read(target: Any) -> Any:
            return restore(
                uri,
                target,
                options=self._restore_options,
                storage_options=self._storage_options,
                progress=self._progress,
                **how,
            )

        def opened() -> Checkpoint:
            return open_checkpoint(uri, storage_options=self._storage_options)

        return read(None) if like is None else restore_in_place(read, opened, like, how.get("only"))

    def restore_latest(
        self, like: Any = None, *, default: Any = _MISSING, **how: Unpack[_How]
    ) -> tuple[Any, int]:
        """Restore the newest committed step; return the state and the step.

        Newer steps that are not committed are skipped, and the log says so. A committed step that
        is damaged is an error: it is up to you to choose an older one.

        Parameters
        ----------
        like : pytree, optional
            As for `ckptio.restore`.
        default : tuple, optional
            Returned if there is no committed step: ``(state, 0)``.

        Raises
        ------
        NotFoundError
            If there is no committed step, and no default.
        CorruptionError
            If the newest committed step is damaged.
        """
        self._settled()
        while True:
            step, torn = self._agreement.decide(self._run.latest)
            for other in torn:
                _log.warning("skipped %s: it was never committed", self.step_uri(other))
            if step is None:
                if default is _MISSING:
                    raise NotFoundError(f"there is no committed step in {self.uri}")
                return default  # type: ignore[no-any-return]  # the caller's own
            try:
                return self.restore(step, like, **how), step
            except NotFoundError:
                if not self._alone or self._run.is_committed(step):
                    raise
                _log.warning("%s was deleted in the meantime", self.step_uri(step))

    def restore_best(
        self,
        like: Any = None,
        *,
        metric: str | None = None,
        mode: Mode | None = None,
        default: Any = _MISSING,
        **how: Unpack[_How],
    ) -> tuple[Any, int]:
        """Restore the best step, see `best_step`; return the state and the step.

        Raises
        ------
        NotFoundError
            If no step has that metric, and there is no default.
        """
        self._settled()
        step = self._agreement.decide(lambda: self.best_step(metric, mode))
        if step is not None:
            return self.restore(step, like, **how), step
        if default is _MISSING:
            raise NotFoundError(f"no step in {self.uri} has the metric asked for")
        return default  # type: ignore[no-any-return]  # the caller's own

    def steps(self) -> list[int]:
        """Return all committed steps, in ascending order.

        Each one is looked up once at the most, in parallel; never again once it is committed.
        """
        self._check_open()
        return self._run.steps()

    def latest_step(self) -> int | None:
        """Return the newest committed step, None if there is none."""
        self._check_open()
        return self._run.latest()[0]

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """Return the committed step whose metric is best; of equals, the newest.

        Parameters
        ----------
        metric : str, optional
            By default that of the first `keep.best` in the manager's `keep`.
        mode : {"min", "max"}, optional
            Which is best; by default as in `keep.best`, else ``"min"``.
        """
        self._check_open()
        judged = self._judged
        if metric is None:
            if judged is None:
                raise InvalidOptionError("best by which metric? Pass metric=, or a keep.best")
            metric = judged.metric
        if mode is None:
            mode = judged.mode if judged is not None and judged.metric == metric else "min"
        known = self._run.saved_steps(self._run.steps(), with_facts=True)
        return next(iter(keeping.rank(known, metric, keeping.checked_mode(mode))), None)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics that a committed step was saved with.

        Raises
        ------
        NotFoundError
            If there is no such step.
        """
        self._check_open()
        return dict(self._run.facts(checked_step(step)).metrics)

    def step_uri(self, step: int) -> str:
        """Return the URI of a step's checkpoint, for `ckptio.open` and the like."""
        return self._run.step_uri(step)

    def _settled(self) -> None:
        """Return once nothing that this manager began is half done."""
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise CkptioError(f"the manager of {self.uri} is closed")
