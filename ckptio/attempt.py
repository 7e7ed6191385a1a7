"""One attempt at saving: prepared in the caller's thread, written and published in any.

The steps are the same for one process and for many; `rendezvous` is where they meet.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain, zip_longest
from typing import Any

import msgspec
import xxhash

from ckptio import collector, commit, hooks, tree
from ckptio.arrays import ArrayView
from ckptio.backend import Backend, ObjectInfo
from ckptio.chunk_table import ChunkTable, ObjectEntry
from ckptio.errors import (
    CkptioError,
    DeadlineExceededError,
    InvalidOptionError,
    ProcessFailedError,
)
from ckptio.leaves import SavedLeaf, describe
from ckptio.manifest import Manifest
from ckptio.operation import Operation
from ckptio.options import SaveOptions
from ckptio.parts import Part
from ckptio.progress import bar
from ckptio.rendezvous import Rendezvous
from ckptio.retry import RetryingBackend
from ckptio.save_plan import ChunkPlan, ObjectPlan, assign, plan_objects
from ckptio.transfer import Transfer
from ckptio.writer import ObjectWriter

__all__ = ["Attempt", "Prepared", "prepare"]

_log = logging.getLogger("ckptio")

_COPIERS = 4
"""Threads that copy arrays of the host's: as few as saturate the memory of most machines."""


@dataclass(frozen=True)
class Prepared:
    """What is to be saved, looked at and found good."""

    structure: tree.Structure
    leaves: Sequence[SavedLeaf]
    metadata: Mapping[str, Any]

    def table(self) -> list[str]:
        """Return a line for each leaf, for processes to compare."""
        return [msgspec.json.encode(leaf.entry).decode() for leaf in self.leaves]


def prepare(pytree: object, metadata: Mapping[str, Any] | None) -> Prepared:
    """Take a tree apart and look at every leaf.

    Raises
    ------
    UnsupportedLeafError, InvalidOptionError
        If something cannot be saved.
    """
    checked = dict(metadata or {})
    try:
        if json.loads(json.dumps(checked, allow_nan=False)) != checked:
            raise ValueError("it does not come back from JSON as it went in")
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(f"metadata must be what JSON can hold: {error}") from error
    with collector.paused():
        structure, named = tree.flatten(pytree)
        return Prepared(structure, describe(named), checked)


@dataclass
class Attempt:
    """One attempt.

    Attributes
    ----------
    opened : Backend
        Closed when the attempt is over.
    nbytes, written : int
        Bytes of this process's objects, and how many of them are written.
    """

    opened: Backend
    operation: Operation
    rendezvous: Rendezvous
    prepared: Prepared
    options: SaveOptions
    progress: bool = False
    id: str = ""
    replaces: ObjectInfo | None = None
    objects: Sequence[ObjectPlan] = ()
    nbytes: int = 0
    written: int = 0
    backend: RetryingBackend = field(init=False)

    def __post_init__(self) -> None:
        self.backend = RetryingBackend(self.opened, self.operation)

    @property
    def index(self) -> int:
        """The number of this process."""
        return self.rendezvous.group.index

    def start(self, overwrite: bool) -> None:
        """Agree with all processes on the attempt, and on what is saved.

        Raises
        ------
        AlreadyExistsError
            If there is a checkpoint, and it is not to be overwritten.
        """
        plan = json.loads(self.rendezvous.decide("plan", lambda: self._decide(overwrite)))
        self.id = plan["attempt"]
        hooks.notify("ckptio_save_started", uri=self.backend.uri, attempt=self.id)
        try:
            with self.rendezvous.phase("prepare"):
                self._compare(plan)
        except BaseException as error:
            self._abandon(error)
            raise

    def hold(self) -> None:
        """Keep what is saved as it is now; afterwards the caller may change everything."""
        sources = [
            leaf.source
            for leaf in self.prepared.leaves
            if leaf.same_as is None and (self.index == 0 or isinstance(leaf.source, ArrayView))
        ]
        for source in sources:
            source.start_copy()
        copies = [copy for source in sources for copy in source.hold()]
        transfer = Transfer(self.operation, concurrency=_COPIERS, memory=self.options.memory)
        for _ in transfer.map(lambda copy: copy(), copies):
            pass  # each is done

    def _decide(self, overwrite: bool) -> str:
        """In process 0: look what is there, and choose the attempt's id."""
        self.replaces = commit.to_replace(self.backend, overwrite=overwrite)
        plan = {"attempt": commit.new_attempt()}
        if self.rendezvous.group.count > 1:
            table = self.prepared.table()
            plan |= {"uri": self.backend.uri, "digest": _digest(table)}
            self.backend.put(commit.meeting_point(plan["attempt"]), json.dumps(table).encode())
        return json.dumps(plan)

    def _compare(self, plan: Mapping[str, Any]) -> None:
        """Compare what this process brought with what process 0 did."""
        if self.index == 0:  # the only one, where there is one
            return
        me = f"process {self.index}"
        if plan["uri"] != self.backend.uri:
            raise ProcessFailedError(
                f"{me} saves to {self.backend.uri}, process 0 to {plan['uri']}"
            )
        point = commit.meeting_point(self.id)
        if not self.backend.exists(point):
            raise ProcessFailedError(
                f"{me} does not see what process 0 wrote to {self.backend.uri}: is it a directory "
                "of its own on each host? Processes save together to shared storage only"
            )
        ours = self.prepared.table()
        if _digest(ours) != plan["digest"]:
            theirs = json.loads(self.backend.read(point))
            raise ProcessFailedError(
                f"{me} brought another tree: {_first_difference(ours, theirs)}"
            )

    def run(self) -> tuple[int, int]:
        """Write and publish; return the bytes and the number of all processes' objects.

        On failure, what was written is deleted and the backend closed.
        """
        try:
            with self.rendezvous.phase("write"):
                part = self._write()
            totals = self._commit(part)
        except BaseException as error:
            self._abandon(error)
            raise
        self.rendezvous.close()
        return totals

    def _commit(self, part: Part) -> tuple[int, int]:
        try:
            nbytes, objects = json.loads(
                self.rendezvous.decide("commit", lambda: self._publish(part))
            )
        except DeadlineExceededError:
            # Process 0 does not answer, but what it did may be there: storage knows.
            if self.index == 0 or commit.attempt_at(self.backend) != self.id:
                raise
            entries = commit.load(self.backend).objects
            return sum(entry.size for entry in entries), len(entries)
        return nbytes, objects

    def forget(self) -> None:
        """Let go of the arrays, once they are written or will never be."""
        self.prepared = replace(self.prepared, leaves=())

    def fail(self, error: BaseException) -> None:
        """Give up before `run`: tell the others, and clean up."""
        with self.opened, contextlib.suppress(CkptioError):
            try:
                with self.rendezvous.phase("write"):
                    raise error
            finally:
                self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        # What follows is cleaning up: it is tried once, and its failures are logged.
        self.operation.give_up(error)
        if self.index == 0:
            commit.abandon(self.backend, self.id)
        else:
            commit.discard(self.backend, self.id, process=self.index)
        hooks.notify("ckptio_save_failed", uri=self.backend.uri, error=error)

    def _write(self) -> Part:
        """Write this process's objects, and its part if there are others."""
        plans = [leaf.plan for leaf in self.prepared.leaves]
        with collector.paused():
            self.objects = plan_objects(
                plans,
                assign(plans, self.index),
                prefix=commit.data_prefix(self.id, self.index),
                object_size=self.options.object_size or self.backend.limits.object_size,
                metadata={"format": "ckptio", "attempt": self.id},
            )
            table = _chunk_table(plans, self.objects)
        self.nbytes = sum(plan.size for plan in self.objects)
        checksums = self._transfer()
        part = Part(
            tuple(ObjectEntry(plan.key, plan.size) for plan in self.objects),
            table,
            tuple(checksums),
        )
        if self.index:
            self.backend.put(commit.part_key(self.id, self.index), part.encode(self.id, self.index))
        return part

    def _transfer(self) -> list[Any]:
        """Write the data objects; return the checksums of each one's blocks."""
        leaves = self.prepared.leaves

        def source(chunk: ChunkPlan) -> Any:
            return leaves[chunk.leaf].source.read(chunk.box)

        plans = [leaf.plan for leaf in leaves]
        transfer = Transfer.of_data(self.operation, self.backend.limits, self.options)
        writers = [
            ObjectWriter(self.backend, plan, plans, source, self.options.part_size, transfer.turn)
            for plan in self.objects
        ]
        buffer_size = max((w.buffer_size for w in writers), default=0)
        tasks = chain.from_iterable(writer.tasks() for writer in writers)
        try:
            with bar(self.nbytes, "saving", show=self.progress) as update:
                for nbytes in transfer.run(tasks, buffer_size):
                    self.written += nbytes
                    update(nbytes)
        except BaseException:
            for writer in writers:
                try:
                    writer.abort()
                except CkptioError as error:
                    _log.warning("an upload was left behind at %s: %s", self.backend.uri, error)
            raise
        return [writer.checksums for writer in writers]

    def _publish(self, own: Part) -> str:
        """In process 0: put the manifest together and create it."""
        joined = Part.joined([own, *self._others()])
        leaves = self.prepared.leaves
        owners = [i if leaf.same_as is None else leaf.same_as for i, leaf in enumerate(leaves)]
        manifest = Manifest(
            attempt=self.id,
            created=datetime.now(UTC),
            metadata=self.prepared.metadata,
            structure=self.prepared.structure,
            leaves=tuple(leaf.entry for leaf in leaves),
            objects=joined.objects,
            chunks=joined.chunks.sharing(owners),
            checksums=joined.checksums,
        )
        replaced = commit.attempt_at(self.backend) if self.replaces is not None else None
        self.operation.seal()
        commit.publish(self.backend, manifest, self.replaces)
        # From here on the new checkpoint exists: nothing that goes wrong may undo it.
        if replaced is not None:
            commit.discard(self.backend, replaced)
        if self.rendezvous.group.count > 1:
            commit.discard_parts(self.backend, self.id)
        return json.dumps([sum(entry.size for entry in joined.objects), len(joined.objects)])

    def _others(self) -> list[Part]:
        """Read the other processes' parts, in their order."""
        count = self.rendezvous.group.count
        if count == 1:
            return []
        transfer = Transfer(
            self.operation, concurrency=self.backend.limits.concurrency, memory=self.options.memory
        )

        def read(process: int) -> tuple[int, Part]:
            key = commit.part_key(self.id, process)
            return process, Part.decode(self.backend.read(key), self.backend.describe(key))

        return [part for _, part in sorted(transfer.map(read, range(1, count)), key=lambda p: p[0])]


def _chunk_table(plans: Sequence[Any], objects: Sequence[ObjectPlan]) -> ChunkTable:
    """Return the chunk table of one process's objects."""
    rows: list[list[Any]] = [[] for _ in plans]
    for number, plan in enumerate(objects):
        for chunk in plan.chunks:
            rows[chunk.leaf].append((number, chunk.offset, chunk.box))
    return ChunkTable.build([len(plan.shape) for plan in plans], rows)


def _digest(table: Sequence[str]) -> str:
    return f"{xxhash.xxh3_64_intdigest(json.dumps(table).encode()):016x}"


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    for here, there in zip_longest(ours, theirs, fillvalue="no leaf"):
        if here != there:
            return f"{here} here, {there} in process 0"
    return "their order differs"
