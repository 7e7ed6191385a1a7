"""The processes of a program: one, or those that ``jax.distributed`` joined.

The only module that knows JAX's coordination service, which has no public face. What it needs of it
is a table of strings that every process can write to, read and wait for.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from ckptio.errors import CkptioError

__all__ = ["JaxProcesses", "ProcessGroup", "SingleProcess", "current"]


class ProcessGroup(ABC):
    """Processes that save together, or restore and share their reads.

    Attributes
    ----------
    index, count : int
        This process, and how many there are.
    """

    index: int
    count: int

    @abstractmethod
    def post(self, key: str, value: str, *, again: bool = False) -> None:
        """Write an entry that all processes can see, once, or again and again."""

    @abstractmethod
    def wait(self, key: str, seconds: float) -> str | None:
        """Return an entry once there is one; None if there is none within the time."""

    @abstractmethod
    def posted(self, prefix: str) -> Mapping[str, str]:
        """Return the entries below a prefix, by the rest of their keys."""

    @abstractmethod
    def forget(self, prefix: str) -> None:
        """Delete the entries below a prefix."""


class SingleProcess(ProcessGroup):
    """A program of one process, which has nobody to talk to."""

    index = 0
    count = 1

    def post(self, key: str, value: str, *, again: bool = False) -> None:
        """Tell nobody."""

    def wait(self, key: str, seconds: float) -> str | None:
        """Hear nothing."""
        return None

    def posted(self, prefix: str) -> Mapping[str, str]:
        """Hear nothing."""
        return {}

    def forget(self, prefix: str) -> None:
        """Forget nothing."""


class JaxProcesses(ProcessGroup):
    """The processes of a multi-controller JAX program, through its coordination service."""

    def __init__(self, client: Any, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self._client = client

    def post(self, key: str, value: str, *, again: bool = False) -> None:
        """Write an entry that all processes can see."""
        with self._errors(key):
            self._client.key_value_set(key, value, allow_overwrite=again)

    def wait(self, key: str, seconds: float) -> str | None:
        """Return an entry once there is one."""
        try:
            return str(self._client.blocking_key_value_get(key, max(1, int(seconds * 1000))))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise self._gone(key, error) from error

    def posted(self, prefix: str) -> Mapping[str, str]:
        """Return the entries below a prefix."""
        with self._errors(prefix):
            found = self._client.key_value_dir_get(f"{prefix}/")
        return {key.rpartition(f"{prefix}/")[2]: value for key, value in found}

    def forget(self, prefix: str) -> None:
        """Delete the entries below a prefix."""
        with self._errors(prefix):
            self._client.key_value_delete(f"{prefix}/")

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._gone(key, error) from error

    def _gone(self, key: str, error: Exception) -> CkptioError:
        first = str(error).splitlines()[0]
        return CkptioError(
            f"process {self.index}: JAX's coordination service does not answer ({key}): {first}"
        )


def current() -> ProcessGroup:
    """Return the processes that this one belongs to.

    Raises
    ------
    CkptioError
        If JAX runs several processes, but has no coordination service that we know.
    """
    jax = sys.modules.get("jax")
    if jax is None:
        return SingleProcess()
    try:
        from jax._src import distributed

        state: Any = distributed.global_state
        client, count, index = state.client, state.num_processes, state.process_id
        known = client is None or hasattr(client, "key_value_dir_get")
    except (ImportError, AttributeError):
        known = False
    if not known:
        if jax.process_count() == 1:
            return SingleProcess()
        raise CkptioError(
            f"JAX {jax.__version__} has no coordination service that this ckptio knows: saving "
            "from several processes needs another version of either"
        )
    if client is None or not count or count == 1:
        return SingleProcess()
    return JaxProcesses(client, int(index), int(count))
