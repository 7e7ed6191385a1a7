"""Python's garbage collector, kept away while many objects are made that all stay.

Every leaf is described by a few objects, and JAX makes more for each of its shards. None of them
is garbage, but their number lets the collector look through everything that the program has: that
took a quarter of the time of saving, and of restoring, 3,000 small arrays.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused"]

_lock = threading.Lock()
_pauses = 0
_stopped = False


@contextmanager
def paused() -> Iterator[None]:
    """Stop automatic collections in the block, if the program has not stopped them itself.

    For moments only: what other threads throw away meanwhile waits.
    """
    global _pauses, _stopped
    with _lock:
        _pauses += 1
        if _pauses == 1 and gc.isenabled():
            gc.disable()
            _stopped = True
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _stopped:
                gc.enable()
                _stopped = False
