"""Hook specifications, and how a URI finds its driver.

Drivers come in through one door, the built-in ones too: an entry point in the group
``ckptio.backends`` whose name is the URI scheme (``s3``, or ``s3+obstore`` for a second driver of
that store) and whose object implements `HookSpecs.ckptio_open_backend`. Only the driver that a URI
needs is imported. Plugins that observe or wrap come from the group ``ckptio.plugins``, or are
registered with ``plugin_manager().register(...)``.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pluggy

from ckptio.backend import Backend
from ckptio.errors import (
    CkptioError,
    DriverConflictError,
    DriverUnavailableError,
    InvalidURIError,
    UnknownSchemeError,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "Location",
    "driver_entry_points",
    "hookimpl",
    "notify",
    "open_backend",
    "plugin_manager",
]

hookspec = pluggy.HookspecMarker("ckptio")
hookimpl = pluggy.HookimplMarker("ckptio")

_log = logging.getLogger("ckptio")
_loading = threading.Lock()
_drivers: dict[str, object] = {}

GENERIC = "fsspec"
"""The driver that is asked for a scheme which no entry point has."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.-]*(?:\+[A-Za-z0-9.-]+)?)://")
_DAMAGED = re.compile(r"([A-Za-z][A-Za-z0-9.+-]+):/(?!/)")


class HookSpecs:
    """Every hook of ckptio."""

    @hookspec(firstresult=True)
    def ckptio_open_backend(
        self, uri: str, scheme: str, storage_options: Mapping[str, Any]
    ) -> Backend | None:
        """Return a backend rooted at `uri`, or None to leave it to another plugin."""

    @hookspec
    def ckptio_wrap_backend(self, backend: Backend) -> Backend | None:
        """Return a backend to use in place of `backend`, or None; wrappers nest."""

    @hookspec
    def ckptio_save_started(self, uri: str, attempt: str) -> None:
        """Hear that an attempt at saving has begun."""

    @hookspec
    def ckptio_save_committed(self, uri: str, report: object) -> None:
        """Hear that a checkpoint exists from now on; `report` is its `SaveReport`."""

    @hookspec
    def ckptio_save_failed(self, uri: str, error: BaseException) -> None:
        """Hear that an attempt at saving was abandoned."""

    @hookspec
    def ckptio_restore_finished(self, uri: str, report: object) -> None:
        """Hear that a restore is complete; `report` is its `RestoreReport`."""


@dataclass(frozen=True, slots=True)
class Location:
    """A URI taken apart.

    Attributes
    ----------
    uri : str
        As the driver gets it: with a scheme, without the driver's name.
    scheme : str
        In lower case; ``file`` for a plain path.
    driver : str
        The name of the entry point that serves it.
    """

    uri: str
    scheme: str
    driver: str

    @classmethod
    def parse(cls, uri: str | os.PathLike[str]) -> Location:
        """Take a URI or a path apart.

        Raises
        ------
        InvalidURIError
            If it is empty, or a URI that lost a slash in ``pathlib`` or ``os.path``.
        """
        text = os.fspath(uri)
        if not isinstance(text, str) or not text:
            raise InvalidURIError(f"not a URI or path: {uri!r}")
        if match := _SCHEME.match(text):
            full = match[1].lower()
            scheme, _, driver = full.partition("+")
            if not driver and (driver := _preferred_drivers().get(scheme, "")):
                full = f"{scheme}+{driver}"
            return cls(f"{scheme}://{text[match.end() :]}", scheme, full)
        if match := _DAMAGED.match(text):
            raise InvalidURIError(
                f"{text!r} looks like a URI that lost a slash (os.path and pathlib do that); "
                f"pass {match[1]}://… as a string, or ./{text} for a local path"
            )
        # abspath, so that a later chdir does not move the checkpoint.
        return cls(os.path.abspath(os.path.expanduser(text)), "file", "file")


def _preferred_drivers() -> dict[str, str]:
    """Read CKPTIO_DRIVERS, for instance ``s3=obstore,gs=obstore``."""
    text = os.environ.get("CKPTIO_DRIVERS", "")
    pairs = (item.partition("=") for item in text.split(",") if item.strip())
    return {scheme.strip().lower(): driver.strip().lower() for scheme, _, driver in pairs}


@cache
def plugin_manager() -> pluggy.PluginManager:
    """Return this process's plugin manager, made at the first call.

    A plugin that cannot be loaded is logged and left out, so that a broken observer never stands
    between a user and a checkpoint.
    """
    manager = pluggy.PluginManager("ckptio")
    manager.add_hookspecs(HookSpecs)
    for entry_point in _entry_points("ckptio.plugins"):
        try:
            manager.register(entry_point.load(), name=entry_point.name)
        except Exception:
            _log.exception("plugin %r could not be loaded and is left out", entry_point.value)
    return manager


@cache
def driver_entry_points() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the installed drivers by scheme; more than one of a scheme is a conflict."""
    found: dict[str, dict[str, EntryPoint]] = defaultdict(dict)
    for entry_point in _entry_points("ckptio.backends"):
        found[entry_point.name.lower()].setdefault(_distribution(entry_point), entry_point)
    return {scheme: tuple(by_name.values()) for scheme, by_name in found.items()}


def _entry_points(group: str) -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # a quarter of what importing ckptio would cost

    return entry_points(group=group)


def _distribution(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist else "an unknown distribution"


def _load_driver(name: str) -> object | None:
    """Import and register the driver called `name`; return its plugin, None if there is none."""
    with _loading:
        if name in _drivers:
            return _drivers[name]
        candidates = driver_entry_points().get(name, ())
        if not candidates:
            return None
        if len(candidates) > 1:
            claims = " and ".join(sorted(f"{_distribution(c)} ({c.value})" for c in candidates))
            raise DriverConflictError(
                f"{name}:// is claimed by {claims}: uninstall one, or register under another name"
            )
        try:
            driver: object = candidates[0].load()
        except ImportError as error:
            if isinstance(error, DriverUnavailableError):
                raise
            raise DriverUnavailableError(
                f"the driver for {name}:// ({candidates[0].value}, from "
                f"{_distribution(candidates[0])}) cannot be imported: {error}"
            ) from error
        if not plugin_manager().is_registered(driver):  # one driver may serve several schemes
            plugin_manager().register(driver, name=f"driver:{name}")
        _drivers[name] = driver
        return driver


def open_backend(
    uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Backend:
    """Open the backend that a URI selects.

    Parameters
    ----------
    uri : str or os.PathLike
        ``scheme://…``, ``scheme+driver://…``, or a plain path, which is local.
    storage_options : mapping, optional
        Handed to the driver.

    Raises
    ------
    UnknownSchemeError
        If no driver claims the scheme.
    DriverUnavailableError, DriverConflictError, InvalidURIError
        As their docstrings say.
    """
    location = Location.parse(uri)
    driver = _load_driver(location.driver)
    backend = _ask(driver, location, storage_options)
    if backend is None and driver is None and location.driver == location.scheme:
        backend = _ask(_load_driver(GENERIC), location, storage_options)
    if not isinstance(backend, Backend):
        raise UnknownSchemeError(
            f"no driver for {location.driver}:// (in {os.fspath(uri)!r}); installed: "
            + ", ".join(sorted(driver_entry_points()))
        )
    return _wrap(backend)


def _ask(
    driver: object | None, location: Location, storage_options: Mapping[str, Any] | None
) -> Backend | None:
    """Ask one driver, and plugins that were registered by hand, for a backend."""
    others = [other for other in _drivers.values() if other is not driver]
    hook = plugin_manager().subset_hook_caller("ckptio_open_backend", others)
    backend: Backend | None = hook(
        uri=location.uri, scheme=location.scheme, storage_options=dict(storage_options or {})
    )
    return backend


def _wrap(backend: Backend) -> Backend:
    manager = plugin_manager()
    for impl in manager.hook.ckptio_wrap_backend.get_hookimpls():
        arguments = {"backend": backend} if "backend" in impl.argnames else {}
        wrapped = impl.function(**arguments)
        if wrapped is not None:
            if not isinstance(wrapped, Backend):
                raise CkptioError(f"plugin {impl.plugin_name!r} wrapped a backend in {wrapped!r}")
            backend = wrapped
    return backend


def notify(hook: str, **arguments: object) -> None:
    """Tell the observers; what goes wrong there is logged and changes no outcome."""
    for impl in getattr(plugin_manager().hook, hook).get_hookimpls():
        try:
            impl.function(**{name: arguments[name] for name in impl.argnames})
        except Exception:
            _log.exception("plugin %r failed in %s", impl.plugin_name, hook)
