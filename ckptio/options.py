"""Options for each direction. Every default is good enough that nobody needs to pass one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from ckptio.errors import InvalidOptionError

__all__ = ["RestoreOptions", "SaveOptions"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    memory: int = 256 * MIB
    concurrency: int | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise InvalidOptionError(f"{field.name} must be positive, not {value!r}")
        if getattr(self, "at_exit", "finish") not in ("finish", "abandon"):
            raise InvalidOptionError(f"at_exit is 'finish' or 'abandon', not {self.at_exit!r}")  # type: ignore[attr-defined]  # of one subclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions(_Options):
    """How to save.

    Attributes
    ----------
    memory : int
        Bytes of buffers at the most; one part is always allowed.
    concurrency : int, optional
        Requests at once; by default what the backend asks for.
    deadline : float, optional
        Seconds for the whole operation.
    object_size : int, optional
        Bytes at which a data object is closed; by default what the backend asks for.
    part_size : int, optional
        Bytes of a part, rounded up to whole blocks of 4 MiB; by default what the backend asks for,
        which may be no parts at all for objects of up to `Limits.put_size`.
    at_exit : {"finish", "abandon"}
        What becomes of a save in the background when the interpreter exits.
    """

    object_size: int | None = None
    part_size: int | None = None
    at_exit: Literal["finish", "abandon"] = "finish"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions(_Options):
    """How to restore.

    Attributes
    ----------
    memory : int
        Bytes of buffers at the most; one read is always allowed.
    concurrency : int, optional
        Requests at once; by default what the backend asks for.
    deadline : float, optional
        Seconds for the whole operation.
    read_size : int, optional
        Bytes of one read at the most; by default what the backend asks for.
    share_reads : bool
        Where several processes need the same bytes of an array, let each read a part, and the
        devices exchange the parts. All processes must then restore together, the same leaves.
        Worth it where the store is slower than the devices' interconnect.
    """

    read_size: int | None = None
    share_reads: bool = False
