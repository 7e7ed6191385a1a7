"""The verb `restore`: resolve the target, read, hand each leaf on as soon as it is complete."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ckptio import arrays, collector, hooks, shared_reads
from ckptio.boxes import Box
from ckptio.checkpoint import Checkpoint
from ckptio.checkpoint import open as open_checkpoint
from ckptio.dtypes import Units
from ckptio.leaf import Leaf, present
from ckptio.manifest import LeafEntry
from ckptio.operation import Operation
from ckptio.options import RestoreOptions
from ckptio.processes import SingleProcess, current
from ckptio.progress import track
from ckptio.rendezvous import Rendezvous
from ckptio.restore_plan import Want
from ckptio.source import BoxReader
from ckptio.target import Output, resolve
from ckptio.units import format_bytes, format_pace

if TYPE_CHECKING:
    from jax.sharding import Sharding

__all__ = ["RestoreReport", "restore"]

_log = logging.getLogger("ckptio")


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did; prints as one line.

    Attributes
    ----------
    uri : str
    nbytes : int
        Bytes read from the store.
    leaves : int
        How many came back.
    seconds : float
    """

    uri: str
    nbytes: int
    leaves: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"restored {self.leaves:,} leaves from {self.uri}, {format_bytes(self.nbytes)} read "
            f"in {format_pace(self.nbytes, self.seconds)}"
        )


def restore(
    uri: str | os.PathLike[str],
    like: Any = None,
    *,
    only: str | Iterable[str] | None = None,
    sharding: Sharding | Callable[[Leaf], Sharding | None] | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    options: RestoreOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Any:
    """Restore a checkpoint, whole or in part, as saved or as a target asks for it.

    Parameters
    ----------
    uri : str or os.PathLike
        Of the checkpoint.
    like : pytree, optional
        The target: the tree that is wanted, with an example at each leaf. `jax.Array` and
        `jax.ShapeDtypeStruct` come back as `jax.Array` on the example's sharding (without one, on
        the default device), NumPy arrays and Python values as such, a `Leaf` as it was saved.
        Without a target, arrays come back in NumPy and no device is needed, except for typed PRNG
        keys, which only JAX can hold.
    only : str or iterable of str, optional
        Globs over leaf paths, ``"params/**"``. Without `like`, the tree is pruned (lists keep
        their length, with None where something went); with it, other leaves stay as in `like`.
    sharding : Sharding, or callable, optional
        For all arrays (scalars are replicated, strings and times stay in NumPy), or a function
        of a `Leaf` that returns one, or None to leave that leaf as it is.
    strict : bool
        Whether target and checkpoint must have the same leaves. If not, what only one of them has
        is left alone.
    cast : bool
        Convert what has another dtype than the target.
    verify : bool
        Check every byte read against its checksum.
    options : RestoreOptions, optional
        Memory, concurrency, deadline, shared reads.
    storage_options : mapping, optional
        For the driver, in fsspec's own spelling.
    progress : bool
        Show a progress bar.

    Raises
    ------
    NotFoundError
        If there is no checkpoint.
    MismatchError
        If target and checkpoint differ; it lists every difference, and nothing was read.
    CorruptionError
        If stored bytes are not what was saved; the message names object, bytes and leaf.
    ProcessFailedError, DeadlineExceededError
        With `RestoreOptions.share_reads`, if another process failed or did not come.

    Examples
    --------
    >>> import ckptio, numpy as np
    >>> _ = ckptio.save("memory://doc/restore", {"w": np.ones(3), "step": 7})
    >>> ckptio.restore("memory://doc/restore")
    {'step': 7, 'w': array([1., 1., 1.])}
    >>> ckptio.restore("memory://doc/restore", only="step")
    {'step': 7}
    """
    began = time.monotonic()
    options = options or RestoreOptions()
    operation = Operation(f"restoring {os.fspath(uri)}", options.deadline)
    meeting = Rendezvous(current() if options.share_reads else SingleProcess(), operation)
    with meeting.phase("read"), open_checkpoint(uri, storage_options=storage_options) as checkpoint:
        entries = checkpoint.manifest.leaves
        with collector.paused():
            target = resolve(
                checkpoint.manifest,
                [*checkpoint.leaves.values()],
                like,
                only=only,
                sharding=sharding,
                strict=strict,
                cast=cast,
                where=checkpoint.uri,
            )
        plan = (
            shared_reads.finer(target.outputs, entries) if options.share_reads else target.outputs
        )
        reader = checkpoint.reader(options, verify=verify)
        restored = _read(reader, checkpoint, plan, progress)
    if options.share_reads:
        shared_reads.agree(meeting, shared_reads.describe(target.outputs, plan, entries))
        restored = shared_reads.exchange(target.outputs, plan, restored)
    meeting.close()
    result = target.build(restored)
    report = RestoreReport(
        checkpoint.uri, checkpoint.bytes_read, len(restored), time.monotonic() - began
    )
    _log.info("%s", report)
    hooks.notify("ckptio_restore_finished", uri=report.uri, report=report)
    return result


def _read(
    reader: BoxReader, checkpoint: Checkpoint, outputs: Sequence[Output], progress: bool
) -> dict[int, Any]:
    """Read all outputs; return them by the numbers of their leaves."""
    entries = checkpoint.manifest.leaves
    wants, outs, owners = [], [], []
    pieces: list[dict[Box, Units]] = []
    for i, output in enumerate(outputs):
        stored = entries[output.leaf].stored
        pieces.append({})
        for box in output.boxes:
            units = arrays.empty(stored.units_shape(box.shape), stored.unit)
            pieces[i][box] = units
            wants.append(Want(output.leaf, box))
            outs.append(units)
            owners.append(i)
    with collector.paused():
        reads = reader.plan(wants)
    # Counted down as reads arrive, so that a leaf is handed on as soon as it is complete.
    feeds = [{owners[piece.want] for piece in read.pieces} for read in reads]
    number = {id(read): i for i, read in enumerate(reads)}
    left = [0] * len(outputs)
    for fed in feeds:
        for i in fed:
            left[i] += 1
    restored: dict[int, Any] = {}

    def finish(numbers: Sequence[int]) -> None:
        complete = [(outputs[i], entries[outputs[i].leaf], pieces[i]) for i in numbers]
        with collector.paused():
            restored.update(_finished(complete))
        for i in numbers:
            pieces[i] = {}

    finish([i for i, count in enumerate(left) if not count])
    reader.check_sizes({read.object for read in reads})

    def steps() -> Iterable[int]:
        for read in reader.run(reads, outs):
            fed = feeds[number[id(read)]]
            for i in fed:
                left[i] -= 1
            finish([i for i in fed if not left[i]])
            yield read.stop - read.start

    total = sum(read.stop - read.start for read in reads)
    for _ in track(steps(), total, "restoring", show=progress):
        pass
    return restored


_Complete = tuple[Output, LeafEntry, Mapping[Box, Units]]


def _finished(complete: Sequence[_Complete]) -> dict[int, Any]:
    """Return the values of leaves whose bytes have all arrived, by the leaves' numbers."""
    found: dict[int, Any] = {}
    whole: list[tuple[int, npt.NDArray[Any], Sharding | None]] = []
    for output, entry, pieces in complete:
        held = {box: _converted(output, entry, units) for box, units in pieces.items()}
        if output.kind != "jax" and (output.kind != "key" or output.sharding is None):
            (array,) = held.values()
            found[output.leaf] = _on_host(output, entry, array)
        elif output.sharding is None or arrays.goes_whole(output.sharding, entry.nbytes):
            (array,) = held.values()
            whole.append((output.leaf, array, output.sharding))
        else:
            found[output.leaf] = arrays.assemble(entry.shape, output.dtype, output.sharding, held)
    placed = arrays.put([(array, sharding) for _, array, sharding in whole]) if whole else ()
    found |= {leaf: array for (leaf, _, _), array in zip(whole, placed, strict=True)}
    for output, entry, _ in complete:
        if output.kind == "key" and output.sharding is not None and entry.implementation:
            found[output.leaf] = arrays.keys(found[output.leaf], entry.implementation)
    return found


def _converted(output: Output, entry: LeafEntry, units: Units) -> npt.NDArray[Any]:
    array = entry.stored.from_units(units)
    return array if array.dtype == output.dtype else array.astype(output.dtype)


def _on_host(output: Output, entry: LeafEntry, array: npt.NDArray[Any]) -> Any:
    """Return the value of a leaf that stays on the host."""
    if output.kind == "numpy_scalar":
        return array[()]
    if output.kind in ("numpy", entry.kind):
        return array if output.kind == "numpy" else present(entry, array)
    convert: Any = {"bool": bool, "int": int, "float": float, "complex": complex}[output.kind]
    return convert(array.item())
