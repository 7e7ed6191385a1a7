"""Calling asynchronous clients from the contract's synchronous methods.

All drivers share fsspec's event loop, a thread of its own, so callers may be any thread, one that
runs another loop included. fsspec starts a fresh loop after a fork; clients belong to the process
that made them and are made anew by a child.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import fsspec.asyn

__all__ = ["PerProcess", "run"]

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the shared loop and wait for it; never call this on that loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, fsspec.asyn.get_loop()).result()


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
        self._made: tuple[int, T] | None = None

    def get(self) -> T:
        """Return this process's own."""
        made = self._made
        if made is not None and made[0] == os.getpid():
            return made[1]
        if made is not None:
            # The lock may have been held by a thread that the fork left behind.
            self._lock = threading.Lock()
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                self._made = os.getpid(), self._make()
            return self._made[1]

    def take(self) -> T | None:
        """Return this process's own, if it was ever made, and forget it: the caller closes it."""
        made, self._made = self._made, None
        return made[1] if made is not None and made[0] == os.getpid() else None
