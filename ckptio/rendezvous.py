"""What processes that save, or share reads, tell each other; how a failure reaches them all.

Each process casts one vote in each phase. Process 0 collects the votes and posts the verdict: good
once all are good, bad as soon as one is, when a process gives no sign of life any more, or when
time is up, and then it names who. A thread of every process waits for the verdict while the process
works, so that a bad one ends its work at once. No device takes part.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptio.errors import (
    AlreadyExistsError,
    CkptioError,
    DeadlineExceededError,
    ProcessFailedError,
)
from ckptio.operation import Operation
from ckptio.processes import ProcessGroup

__all__ = ["DEADLINE", "Rendezvous"]

DEADLINE = 1800.0
"""Seconds that several processes may take together if the user names no limit: no hang, ever."""

_POLL = 0.05
_SLOWEST_POLL = 1.0
_BEAT = 2.0  # seconds between the signs of life of each process
_SILENCE = 60.0  # seconds without one after which a process counts as dead
_GRACE = 5.0  # seconds after the deadline in which process 0 still tells who was late

_numbers = itertools.count(1)


class Rendezvous:
    """One meeting of processes, for one save or restore; all make theirs in the same order.

    Parameters
    ----------
    group : ProcessGroup
    operation : Operation
        Given up when the verdict of a phase is bad.
    """

    def __init__(self, group: ProcessGroup, operation: Operation) -> None:
        self.group = group
        self._operation = operation
        self._number = next(_numbers) if group.count > 1 else 0
        self._prefix = f"ckptio/{self._number}"

    def decide(self, topic: str, make: Callable[[], str]) -> str:
        """Return what `make` returns in process 0; its failure there is everyone's.

        Raises
        ------
        ProcessFailedError
            If process 0 failed, or does not answer in time.
        """
        if self.group.count == 1:
            return make()
        key = f"{self._prefix}/{topic}"
        if self.group.index == 0:
            try:
                value = make()
            except BaseException as error:
                self.group.post(key, json.dumps({"error": _describe(error)}))
                raise
            self.group.post(key, json.dumps({"value": value}))
            return value
        answer = json.loads(self._wait(key))
        if "error" in answer:
            raise _error_of(0, answer["error"])
        return str(answer["value"])

    def refuse(self, error: BaseException) -> None:
        """Tell the others that this process will not come: it failed before the first phase."""
        if self.group.count == 1:
            return
        if self.group.index == 0:
            self.group.post(f"{self._prefix}/plan", json.dumps({"error": _describe(error)}))
        else:
            vote = json.dumps({"error": _describe(error)})
            self.group.post(f"{self._prefix}/prepare/votes/{self.group.index}", vote)

    @contextmanager
    def phase(self, topic: str) -> Iterator[None]:
        """Do one's part in the block; leave it once all processes did theirs.

        Raises
        ------
        ProcessFailedError, DeadlineExceededError
            If another process failed, is dead, or did not finish in time; it is named.
        """
        if self.group.count == 1:
            yield
            return
        watcher = _Watcher(self.group, f"{self._prefix}/{topic}", self._operation)
        watcher.start()
        try:
            yield
        except BaseException as error:
            watcher.cast(_describe(error))
            watcher.close()
            raise
        watcher.cast(None)
        watcher.result()

    def close(self) -> None:
        """Forget what was posted for the save before this one: everybody has read it."""
        if self.group.count > 1 and self.group.index == 0:
            self.group.forget(f"ckptio/{self._number - 1}")

    def _wait(self, key: str) -> str:
        while True:
            remaining = self._operation.remaining()
            seconds = DEADLINE if remaining is None else remaining + _GRACE
            answer = self.group.wait(key, seconds)
            if answer is not None:
                return answer
            raise self._operation.too_late("process 0 does not answer")


class _Watcher(threading.Thread):
    """Collects the votes of a phase (in process 0), or waits for the verdict (elsewhere)."""

    def __init__(self, group: ProcessGroup, key: str, operation: Operation) -> None:
        super().__init__(name="ckptio-watcher", daemon=True)
        self._group = group
        self._key = key
        self._operation = operation
        self._verdict: CkptioError | None = None
        self._closing = threading.Event()

    def cast(self, failure: str | None) -> None:
        """Tell how this process fared."""
        vote = json.dumps({"error": failure})
        self._group.post(f"{self._key}/votes/{self._group.index}", vote)

    def result(self) -> None:
        """Wait for the verdict; raise it if it is bad."""
        self.join()
        if self._verdict is not None:
            raise self._verdict

    def close(self) -> None:
        """Do not wait any longer than telling the others takes."""
        if self._group.index == 0:
            self.join()
        self._closing.set()

    def run(self) -> None:
        """Find the verdict, and give the operation up if it is bad."""
        try:
            self._verdict = self._collect() if self._group.index == 0 else self._listen()
        except CkptioError as error:
            self._verdict = error
        if self._verdict is not None:
            self._operation.give_up(self._verdict)

    def _collect(self) -> CkptioError | None:
        verdict = self._count_votes()
        text = None if verdict is None else str(verdict)
        late = isinstance(verdict, DeadlineExceededError)
        self._group.post(f"{self._key}/verdict", json.dumps({"error": text, "late": late}))
        return verdict

    def _count_votes(self) -> CkptioError | None:
        pause = _POLL
        heard: dict[int, tuple[str, float]] = {}
        while True:
            posted = self._group.posted(f"{self._key}/votes")
            votes = {int(process): json.loads(vote) for process, vote in posted.items()}
            for process, vote in sorted(votes.items()):
                if vote["error"] is not None:
                    return _error_of(process, vote["error"])
            missing = [i for i in range(self._group.count) if i not in votes]
            if not missing:
                return None
            if gone := [i for i in self._silent(heard) if i in missing]:
                return ProcessFailedError(
                    f"{_processes(gone)} gave no sign of life for {_SILENCE:g} s while "
                    f"{self._operation.doing}: dead, or stopped"
                )
            if self._operation.remaining() == 0:
                return self._operation.too_late(f"{_processes(missing)} did not finish")
            self._closing.wait(pause)
            pause = min(pause * 1.2, _SLOWEST_POLL)

    def _silent(self, heard: dict[int, tuple[str, float]]) -> list[int]:
        """Return the processes that were heard of, and then no more."""
        now = time.monotonic()
        for process, beat in self._group.posted(f"{self._key}/beats").items():
            if heard.get(int(process), ("", 0.0))[0] != beat:
                heard[int(process)] = beat, now
        return [process for process, (_, when) in heard.items() if now - when > _SILENCE]

    def _listen(self) -> CkptioError | None:
        remaining = self._operation.remaining()
        left = DEADLINE if remaining is None else remaining + _GRACE
        for beat in itertools.count():
            if left <= 0 or self._closing.is_set():
                break
            beats = f"{self._key}/beats/{self._group.index}"
            self._group.post(beats, str(beat), again=True)
            # In slices, so that a process that failed by itself need not wait for the whole.
            answer = self._group.wait(f"{self._key}/verdict", min(left, _BEAT))
            if answer is not None:
                verdict = json.loads(answer)
                if verdict["error"] is None:
                    return None
                kind = DeadlineExceededError if verdict["late"] else ProcessFailedError
                return kind(verdict["error"])
            left -= _BEAT
        return self._operation.too_late("process 0 does not answer")


def _processes(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
    return f"process {shown}" if len(numbers) == 1 else f"processes {shown}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _error_of(process: int, description: str) -> CkptioError:
    """Return the error for another process's failure: of the same kind where that is everyone's."""
    name, _, text = description.partition(": ")
    for kind in (AlreadyExistsError, DeadlineExceededError):
        if name == kind.__name__:
            return kind(f"process {process}: {text}")
    return ProcessFailedError(f"process {process} failed: {description}")
