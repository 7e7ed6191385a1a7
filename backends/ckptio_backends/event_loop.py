"""Calling asynchronous clients from the contract's synchronous methods.

All drivers share fsspec's event loop, a thread of its own, so callers may be any thread, one that
runs another loop included. fsspec starts a fresh loop after a fork; clients belong to the process
that made them and are made anew by a child.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import fsspec.asyn

__all__ = ["PerProcess", "event_loop", "run", "start"]

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the shared loop and wait for it; never call this on that loop."""
    return start(coroutine).result()


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the shared loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop())


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the shared loop."""
    loop: asyncio.AbstractEventLoop = fsspec.asyn.get_loop()
    return loop


class PerProcess(Generic[T]):
    """Something that must not be shared with a forked child: made when first asked for.

    Parameters
    ----------
    make : callable
        Makes it; called once in each process that asks.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: T | None = None
        _all.add(self)

    def _leave_to_the_parent(self) -> None:
        """In a forked child: forget what was inherited, without ever destroying it.

        Destroying an inherited connection would take its socket out of the epoll set that the
        child shares with its parent, whose requests would then never be answered. What only a
        module kept alive would be destroyed at the child's exit: hence the reference for ever.
        """
        # The lock may have been held by a thread that the fork left behind.
        self._lock = threading.Lock()
        if self._made is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._made))
            self._made = None

    def get(self) -> T:
        """Return this process's own."""
        if (made := self._made) is not None:
            return made
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def take(self) -> T | None:
        """Return this process's own, if it was ever made, and forget it: the caller closes it."""
        with self._lock:
            made, self._made = self._made, None
        return made


_all: weakref.WeakSet[PerProcess[Any]] = weakref.WeakSet()


def _forked() -> None:
    for each in list(_all):
        each._leave_to_the_parent()


os.register_at_fork(after_in_child=_forked)
