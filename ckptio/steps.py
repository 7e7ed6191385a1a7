"""A run: the directory of its steps. Which ones exist, what their manifests say, deleting them.

A step exists exactly when its manifest does. Names are read strictly, by inverting the format: a
name that does not format back to itself is foreign, and nothing here ever touches it.
"""

from __future__ import annotations

import logging
import operator
import os
import string
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckptio import commit, hooks
from ckptio.backend import Backend, check_key
from ckptio.errors import CkptioError, InvalidOptionError, NotFoundError
from ckptio.keep import Facts, SavedStep
from ckptio.manifest import MANIFEST, Manifest
from ckptio.manifest import decode as decode_manifest
from ckptio.operation import Operation
from ckptio.retry import RetryingBackend
from ckptio.transfer import Transfer

__all__ = ["Run", "StepNames"]

_log = logging.getLogger("ckptio")

_BASES = {"x": 16, "X": 16, "o": 8, "b": 2}
_PROBES = (0, 1, 7, 42, 999, 10**8, 10**8 + 1, 2**40)


class StepNames:
    """How a step's directory is called, and which step a directory's name is.

    Parameters
    ----------
    template : str
        A format string with the one field `step`.

    Examples
    --------
    >>> names = StepNames("step-{step:08d}")
    >>> names.name(7), names.step("step-00000007"), names.step("step-7")
    ('step-00000007', 7, None)
    """

    def __init__(self, template: str) -> None:
        self.template = template
        try:
            parts = [*string.Formatter().parse(template)]
            (at,) = [i for i, part in enumerate(parts) if part[1] is not None]
            if parts[at][1] != "step":
                raise ValueError(f"the field {parts[at][1]!r} is not 'step'")
            self._base = _BASES.get((parts[at][2] or "")[-1:], 10)
            # An escaped brace makes a literal part of its own.
            self._before = "".join(part[0] for part in parts[: at + 1])
            self._after = "".join(part[0] for part in parts[at + 1 :])
            for probe in _PROBES:
                name = self.name(probe)
                if "/" in check_key(name) or self.step(name) != probe:
                    raise ValueError(f"step {probe} cannot be told from {name!r}")
        except (ValueError, IndexError, KeyError, CkptioError) as error:
            raise InvalidOptionError(
                f"step_format must be one path segment with the field {{step}}, as in "
                f"'step-{{step:08d}}', not {template!r}: {error}"
            ) from error

    def name(self, step: int) -> str:
        """Return the name of a step's directory."""
        return self.template.format(step=step)

    def step(self, name: str) -> int | None:
        """Return the step of that name, None if it is foreign."""
        end = len(name) - len(self._after)
        try:
            step = int(name[len(self._before) : end], self._base)
        except ValueError:
            return None
        return step if step >= 0 and self.name(step) == name else None


def checked_step(step: object) -> int:
    """Return a step as an int; NumPy's and JAX's integers are steps too."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # what is none raises
    except TypeError as error:
        raise InvalidOptionError(f"a step is an integer, not {step!r}") from error
    if number < 0:
        raise InvalidOptionError(f"a step is not negative: {number}")
    return number


def _absolute(uri: str | os.PathLike[str]) -> str:
    """Return a URI that names can be joined to, with its driver's name if it has one."""
    scheme, separator, rest = os.fspath(uri).partition("://")
    if separator:
        return f"{scheme}://{rest.rstrip('/')}"
    # Made absolute once, for a later chdir must not move the run.
    return hooks.Location.parse(uri).uri.rstrip("/")


class Run:
    """The steps below one URI; thread-safe.

    Parameters
    ----------
    uri : str or os.PathLike
    names : StepNames
    facts : callable
        Returns the `Facts` that a manifest holds.
    storage_options : mapping, optional
        For the driver.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        names: StepNames,
        facts: Callable[[Manifest], Facts],
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self.uri = _absolute(uri)
        self.names = names
        self.storage_options = storage_options
        self._read_facts = facts
        self._opened = hooks.open_backend(self.uri or "/", storage_options)
        self._lock = threading.Lock()
        self._committed: set[int] = set()  # never looked up again
        self._facts: dict[int, Facts] = {}
        self._half_deleted: dict[int, str | None] = {}  # with the attempt whose data is left

    def step_uri(self, step: int) -> str:
        """Return the URI of a step's checkpoint, whether or not there is one."""
        return f"{self.uri}/{self.names.name(step)}"

    def steps(self) -> list[int]:
        """Return all committed steps, in ascending order; at most one look-up for each."""
        backend = self._backend("listing the steps of")
        listed = self._listed(backend)
        with self._lock:
            unknown = [step for step in listed if step not in self._committed]
        self._look_up(backend, unknown)
        with self._lock:
            return [step for step in listed if step in self._committed]

    def latest(self) -> tuple[int | None, list[int]]:
        """Return the newest committed step, and the newer ones that are not committed.

        Steps are looked up from the newest down, until the first that is committed.
        """
        backend = self._backend("looking for the newest step of")
        torn: list[int] = []
        for step in reversed(self._listed(backend)):
            with self._lock:
                known = step in self._committed
            if known or self._look_up(backend, [step]):
                return step, torn
            torn.append(step)
        return None, torn

    def is_committed(self, step: int) -> bool:
        """Look one step up, whatever is known of it."""
        self.forget(step)
        return bool(self._look_up(self._backend("looking up a step of"), [step]))

    def remember(self, step: int, facts: Facts) -> None:
        """Take note that a step was committed just now."""
        with self._lock:
            self._committed.add(step)
            self._facts[step] = facts
            self._half_deleted.pop(step, None)

    def forget(self, step: int) -> None:
        """Take note that a step may be gone, or another one than it was."""
        with self._lock:
            self._committed.discard(step)
            self._facts.pop(step, None)

    def facts(self, step: int) -> Facts:
        """Return what a step's manifest says of it; read once.

        Raises
        ------
        NotFoundError
            If there is no such step.
        """
        with self._lock:
            known = self._facts.get(step)
        if known is not None:
            return known
        backend = self._backend("reading the manifest of a step of")
        key = self._key(step)
        try:
            manifest = decode_manifest(backend.read(key), backend.describe(key))
        except NotFoundError as error:
            raise NotFoundError(
                f"there is no checkpoint of step {step} at {self.step_uri(step)}"
            ) from error
        facts = self._read_facts(manifest)
        with self._lock:
            self._committed.add(step)
            return self._facts.setdefault(step, facts)

    def saved_steps(self, steps: Sequence[int], *, with_facts: bool) -> list[SavedStep]:
        """Return what policies look at; steps whose facts cannot be read are left out, and logged.

        Parameters
        ----------
        with_facts : bool
            Read all their facts first, in parallel.
        """
        unreadable: set[int] = set()

        def prefetch(step: int) -> None:
            try:
                self.facts(step)
            except CkptioError as error:
                _log.warning("what step %d was saved with is not known: %s", step, error)
                unreadable.add(step)

        if with_facts:
            with self._lock:
                missing = [step for step in steps if step not in self._facts]
            for _ in self._transfer().map(prefetch, missing):
                pass
        return [SavedStep(step, self.facts) for step in steps if step not in unreadable]

    def delete(self, step: int) -> None:
        """Delete a step: its manifest first, so that half of it is never seen.

        May be repeated after a failure, for which it remembers what is left.

        Raises
        ------
        NotFoundError
            If there is no such step, and nothing left of it.
        """
        uri = self.step_uri(step)
        with hooks.open_backend(uri, self.storage_options) as opened:
            backend = RetryingBackend(opened, Operation(f"deleting {opened.uri}"))
            with self._lock:
                started = step in self._half_deleted
                attempt = self._half_deleted.get(step)
            if not started:
                attempt = commit.attempt_at(backend)
                with self._lock:
                    self._half_deleted[step] = attempt
            self.forget(step)
            try:
                commit.remove(backend)
            except NotFoundError:
                if not started:
                    self._deleted(step)
                    raise
                # An earlier try got as far as the manifest.
                for kind in ("data", "parts") if attempt else ():
                    backend.delete([info.key for info in backend.list(f"{kind}/{attempt}")])
            self._deleted(step)

    def half_deleted(self) -> list[int]:
        """Return the steps whose deletion was begun and failed."""
        with self._lock:
            return [*self._half_deleted]

    def close(self) -> None:
        """Release the store's connections."""
        self._opened.close()

    def _deleted(self, step: int) -> None:
        with self._lock:
            self._half_deleted.pop(step, None)

    def _listed(self, backend: Backend) -> list[int]:
        """Return the steps that have a directory, in ascending order, from one listing."""
        found = set()
        for child in backend.list_children():
            if child.endswith("/") and (step := self.names.step(child[:-1])) is not None:
                found.add(step)
        with self._lock:
            # Somebody else may have deleted some.
            self._committed &= found
            for gone in self._facts.keys() - found:
                del self._facts[gone]
        return sorted(found)

    def _look_up(self, backend: Backend, steps: Iterable[int]) -> list[int]:
        """Ask for the manifests of steps, in parallel; return those that have one."""

        def look(step: int) -> int | None:
            return step if backend.exists(self._key(step)) else None

        found = [step for step in self._transfer().map(look, steps) if step is not None]
        with self._lock:
            self._committed.update(found)
        return found

    def _key(self, step: int) -> str:
        return f"{self.names.name(step)}/{MANIFEST}"

    def _backend(self, doing: str) -> Backend:
        return RetryingBackend(self._opened, Operation(f"{doing} {self.uri}"))

    def _transfer(self) -> Transfer:
        operation = Operation(f"looking at the steps of {self.uri}")
        return Transfer(operation, concurrency=self._opened.limits.concurrency, memory=0)
