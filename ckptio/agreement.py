"""Decisions that process 0 makes for all: at which step to save, from which to resume."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from ckptio.errors import ProcessFailedError
from ckptio.processes import ProcessGroup

__all__ = ["Agreement"]

PATIENCE = 1800.0
"""Seconds for which a process waits for process 0, which may be a long compilation behind."""

_numbers = itertools.count(1)


class Agreement:
    """What the processes of one program agree on, all of them asking in the same order.

    Parameters
    ----------
    group : ProcessGroup
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._prefix = f"ckptio-agreement/{next(_numbers) if group.count > 1 else 0}"
        self._asked = 0
        self._forgotten = 0

    def decide(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns in process 0, anything that JSON can hold.

        Raises
        ------
        ProcessFailedError
            If `make` failed in process 0 (which raises its own error), or it does not answer.
        """
        if self.group.count == 1:
            return make()
        key = f"{self._prefix}/{self._asked}/answer"
        self._asked += 1
        if self.group.index == 0:
            try:
                value = make()
            except BaseException as error:
                self.group.post(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
                raise
            self.group.post(key, json.dumps({"value": value}))
            return value
        text = self.group.wait(key, PATIENCE)
        if text is None:
            raise ProcessFailedError(f"process 0 did not answer within {PATIENCE:g} s ({key})")
        answer = json.loads(text)
        if "error" in answer:
            raise ProcessFailedError(f"process 0 failed: {answer['error']}")
        return answer["value"]

    def forget(self) -> None:
        """Take note that all processes have come this far, and read all answers."""
        if self.group.count > 1 and self.group.index == 0:
            for number in range(self._forgotten, self._asked):
                self.group.forget(f"{self._prefix}/{number}")
        self._forgotten = self._asked
