"""A model of 405 billion parameters on 16,384 devices: planned, encoded, decoded, on one core.

Llama-3.1-405B's shapes (126 layers, width 16,384, 53,248 in the MLP, 8 key-value heads, 128,256
tokens; https://arxiv.org/abs/2407.21783), in float32, with Adam's two moments: 4.9 TB. No device is
needed: plans are functions of layouts, and layouts of a mesh and a specification. What a save and a
restore would do is done once to get there; what somebody would wait for is then timed a few times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.fresh import run_fresh
from benchmarks.meter import metered, settle
from benchmarks.results import Figure, Results, Section
from ckptio import arrays, dtypes
from ckptio import manifest as manifests
from ckptio.attempt import _chunk_table
from ckptio.boxes import Box
from ckptio.chunk_table import ObjectEntry
from ckptio.manifest import LeafEntry, Manifest
from ckptio.parts import Part
from ckptio.restore_plan import Want, plan_reads
from ckptio.save_plan import LeafPlan, assign, plan_objects

DEVICES_PER_PROCESS = 8
MANIFEST_LIMIT = 100e6
SAVE, JOIN, ENCODE, DECODE, RESTORE = (
    "one process's save plan",
    "process 0 joins the parts",
    "the manifest is encoded",
    "it is decoded and checked",
    "one process's restore plan",
)
BOUNDS = {ENCODE: 5.0, DECODE: 5.0, RESTORE: 2.0}
"""Seconds that these may take."""
REPEAT = 3
EXPECTED = 150.0
"""Seconds of the whole, roughly."""

Mesh = dict[str, int]


@dataclass(frozen=True)
class Case:
    """Saved on one mesh, restored on another."""

    mesh: Mesh
    other: Mesh

    @property
    def title(self) -> str:
        return f"{_drawn(self.mesh)}, restored on {_drawn(self.other)}"


def _drawn(mesh: Mesh) -> str:
    return " × ".join(f"{size:,} {axis}" for axis, size in mesh.items())


CASES = (
    Case({"data": 8, "fsdp": 256, "tensor": 8}, {"fsdp": 512, "tensor": 4}),
    Case({"fsdp": 2048, "tensor": 8}, {"fsdp": 128, "tensor": 8}),
)
SMALL = Case({"data": 2, "fsdp": 8, "tensor": 2}, {"fsdp": 4, "tensor": 4})
"""For a smoke test; the model is the same."""


def shapes() -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Return each parameter's shape, and which mesh axis divides which dimension."""
    width, hidden, kv, vocabulary = 16_384, 53_248, 1_024, 128_256
    layer = {
        "attention/q": ((width, width), ("fsdp", "tensor")),
        "attention/k": ((width, kv), ("fsdp", "tensor")),
        "attention/v": ((width, kv), ("fsdp", "tensor")),
        "attention/out": ((width, width), ("tensor", "fsdp")),
        "attention/norm": ((width,), (None,)),
        "mlp/gate": ((width, hidden), ("fsdp", "tensor")),
        "mlp/up": ((width, hidden), ("fsdp", "tensor")),
        "mlp/down": ((hidden, width), ("tensor", "fsdp")),
        "mlp/norm": ((width,), (None,)),
    }
    found: dict[str, Any] = {
        f"layers/{i}/{name}": leaf for i in range(126) for name, leaf in layer.items()
    }
    found["embedding"] = ((vocabulary, width), ("tensor", "fsdp"))
    found["head"] = ((width, vocabulary), ("fsdp", "tensor"))
    found["norm"] = ((width,), (None,))
    return {
        f"{part}/{name}": leaf for part in ("params", "mu", "nu") for name, leaf in found.items()
    }


def shards(shape: Sequence[int], spec: Sequence[str | None], mesh: Mesh) -> list[tuple[Box, int]]:
    """Return the box of each device, and its process, as a `NamedSharding` would have them."""
    found = []
    for device, position in enumerate(itertools.product(*map(range, mesh.values()))):
        at = dict(zip(mesh, position, strict=True))
        lengths = [n // mesh[a] if a else n for n, a in zip(shape, spec, strict=True)]
        start = [at[a] * n if a else 0 for n, a in zip(lengths, spec, strict=True)]
        found.append((Box(tuple(start), tuple(lengths)), device // DEVICES_PER_PROCESS))
    return found


def leaf_plans(mesh: Mesh) -> list[LeafPlan]:
    """Return the plans' input for a mesh; leaves of one shape share their layout."""
    float32, layouts = dtypes.parse("float32"), {}
    plans = []
    for path, (shape, spec) in shapes().items():
        if (shape, spec) not in layouts:
            layouts[shape, spec] = arrays.held(shards(shape, spec, mesh))
        plans.append(LeafPlan(path, float32, shape, layouts[shape, spec]))
    return plans


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate one case, in a fresh process; return each step's costs, and what was made."""
    case = Case(**request["case"])
    devices = prod(case.mesh.values())
    processes = devices // DEVICES_PER_PROCESS
    leaves = leaf_plans(case.mesh)
    steps: dict[str, list[dict[str, float]]] = {}

    def timed(step: str, call: Callable[[], Any]) -> Any:
        result = None
        for _ in range(request["repeat"]):
            result = None  # one at a time
            settle()
            with metered() as cost:
                result = call()
            steps.setdefault(step, []).append(cost.as_json())
        return result

    timed(SAVE, lambda: _objects(leaves, processes // 2))
    parts = _parts(case.mesh, processes)
    joined = timed(JOIN, lambda: Part.joined(parts))
    manifest = Manifest(
        attempt="0" * 16,
        created=datetime.now(UTC),
        metadata={},
        structure={"dict": {leaf.path: i for i, leaf in enumerate(leaves)}},
        leaves=tuple(LeafEntry(p.path, "jax", "float32", p.shape) for p in leaves),
        objects=joined.objects,
        chunks=joined.chunks,
        checksums=joined.checksums,
    )
    data = timed(ENCODE, manifest.encode)
    found = timed(DECODE, lambda: manifests.decode(data, "here"))
    wanted = leaf_plans(case.other)
    middle = prod(case.other.values()) // DEVICES_PER_PROCESS // 2
    reads = timed(RESTORE, lambda: _reads(found, wanted, middle))
    return {
        "steps": steps,
        "made": {
            "devices": devices,
            "processes": processes,
            "leaves": len(leaves),
            "chunks": int(manifest.chunks.offsets.size),
            "objects": len(manifest.objects),
            "nbytes": sum(entry.size for entry in manifest.objects),
            "manifest": len(data),
            "reads": len(reads),
            "read": sum(read.stop - read.start for read in reads),
        },
    }


def _objects(leaves: Sequence[LeafPlan], process: int) -> list[Any]:
    return plan_objects(
        leaves,
        assign(leaves, process),
        prefix=f"data/x/p{process:05d}",
        object_size=512 << 20,
        metadata={},
    )


def _parts(mesh: Mesh, processes: int) -> list[Part]:
    """Return every process's part; not timed, so on all cores."""
    each = -(-processes // 16)
    ranges = [range(at, min(at + each, processes)) for at in range(0, processes, each)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = pool.map(_parts_of, [mesh] * len(ranges), ranges)
        return [part for parts in found for part in parts]


def _parts_of(mesh: Mesh, processes: range) -> list[Part]:
    leaves = leaf_plans(mesh)
    return [_part(leaves, process) for process in processes]


def _part(leaves: Sequence[LeafPlan], process: int) -> Part:
    objects = _objects(leaves, process)
    entries = tuple(ObjectEntry(plan.key, plan.size) for plan in objects)
    rng = np.random.default_rng(process)
    checksums = tuple(rng.integers(0, 2**64, e.blocks, np.uint64) for e in entries)
    return Part(entries, _chunk_table(leaves, objects), checksums)


def _reads(found: Manifest, wanted: Sequence[LeafPlan], process: int) -> list[Any]:
    wants = [
        Want(number, box)
        for number, leaf in enumerate(wanted)
        for box, holders in leaf.layout
        if process in holders
    ]
    return plan_reads(found, wants, align=4 << 20, gap=1 << 20, size=16 << 20)


def add_to(results: Results, *, quick: bool) -> None:
    """Simulate, and add a section for each case."""
    for number, case in enumerate([SMALL] if quick else CASES, start=1):
        repeat = 1 if quick else REPEAT
        request = {"case": {"mesh": case.mesh, "other": case.other}, "repeat": repeat}
        found = run_fresh("benchmarks.simulation:measure", request)
        key = f"h{number}"
        results.begin(
            Section(
                key,
                f"(h) 405 billion parameters, {case.title}",
                {"plan": 0},
                repeat,
                bounds=BOUNDS,
                note=_note(found["made"]),
            )
        )
        results.figures += [
            Figure.of(key, step, "plan", round_, cost)
            for step, costs in found["steps"].items()
            for round_, cost in enumerate(costs)
        ]


def _note(made: Mapping[str, int]) -> str:
    over = "" if made["manifest"] <= MANIFEST_LIMIT else ", EXCEEDED"
    return (
        f"{made['nbytes'] / 1e12:.2f} TB with Adam's moments, in {made['leaves']:,} leaves on "
        f"{made['devices']:,} devices in {made['processes']:,} processes: {made['chunks']:,} "
        f"chunks in {made['objects']:,} objects. The manifest has {made['manifest'] / 1e6:.1f} MB "
        f"(limit {MANIFEST_LIMIT / 1e6:g} MB{over}). The restore of one process reads "
        f"{made['read'] / 1e9:.1f} GB in {made['reads']:,} reads."
    )
