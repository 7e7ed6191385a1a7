"""A model of 405 billion parameters on 16,384 devices: planned, encoded, decoded, on one core.

Llama-3.1-405B's shapes (126 layers, width 16,384, 53,248 in the MLP, 8 key-value heads, 128,256
tokens; https://arxiv.org/abs/2407.21783), in float32, with Adam's two moments: 4.9 TB. No device is
needed: plans are functions of layouts, and layouts of a mesh and a specification.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import prod
from typing import Any, TypeVar

import numpy as np

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
LIMITS = {"manifest": 100e6, "encode": 5.0, "decode": 5.0, "restore plan": 2.0}

T = TypeVar("T")
Mesh = dict[str, int]


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


def timed(what: str, call: Callable[[], T], limit: float | None = None) -> T:
    """Call, and print the seconds."""
    began = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - began
    bound = f" (limit {limit:g} s{'' if seconds <= limit else ', EXCEEDED'})" if limit else ""
    print(f"  {what:44} {seconds:7.2f} s{bound}", flush=True)
    return result


def main() -> None:
    """Simulate a save on one mesh, and one process's restore onto another."""
    for mesh, other in [
        ({"data": 8, "fsdp": 256, "tensor": 8}, {"fsdp": 512, "tensor": 4}),
        ({"fsdp": 2048, "tensor": 8}, {"fsdp": 128, "tensor": 8}),
    ]:
        simulate(mesh, other)


def simulate(mesh: Mesh, other: Mesh) -> None:
    """Simulate one pair of meshes."""
    processes = prod(mesh.values()) // DEVICES_PER_PROCESS
    devices = prod(mesh.values())
    print(f"405B parameters with Adam, {mesh}: {devices:,} devices, {processes:,} processes")
    leaves = timed("layouts", lambda: leaf_plans(mesh))

    def objects_of(process: int) -> list[Any]:
        return plan_objects(
            leaves, assign(leaves, process), prefix=f"data/x/p{process:05d}",
            object_size=512 << 20, metadata={},
        )  # fmt: skip

    timed("one process's save plan", lambda: objects_of(processes // 2))

    def part_of(process: int) -> Part:
        objects = objects_of(process)
        entries = tuple(ObjectEntry(plan.key, plan.size) for plan in objects)
        rng = np.random.default_rng(process)
        checksums = tuple(rng.integers(0, 2**64, e.blocks, np.uint64) for e in entries)
        return Part(entries, _chunk_table(leaves, objects), checksums)

    parts = timed(
        "all processes' save plans, one by one", lambda: [*map(part_of, range(processes))]
    )
    joined = timed("process 0 joins the parts", lambda: Part.joined(parts))

    tree: dict[str, Any] = {}
    manifest = Manifest(
        attempt="0" * 16,
        created=datetime.now(UTC),
        metadata={},
        structure={"dict": tree | {leaf.path: i for i, leaf in enumerate(leaves)}},
        leaves=tuple(LeafEntry(p.path, "jax", "float32", p.shape) for p in leaves),
        objects=joined.objects,
        chunks=joined.chunks,
        checksums=joined.checksums,
    )
    data = timed("encode the manifest", manifest.encode, LIMITS["encode"])
    megabytes, limit = len(data) / 1e6, LIMITS["manifest"] / 1e6
    over = "" if megabytes <= limit else ", EXCEEDED"
    print(
        f"  {'the manifest':44} {megabytes:7.1f} MB (limit {limit:g} MB{over}); "
        f"{manifest.chunks.offsets.size:,} chunks in {len(manifest.objects):,} objects, "
        f"{sum(e.size for e in manifest.objects) / 1e12:.2f} TB"
    )
    found = timed("decode and check it", lambda: manifests.decode(data, "here"), LIMITS["decode"])
    wanted = leaf_plans(other)
    middle = prod(other.values()) // DEVICES_PER_PROCESS // 2

    def restore_plan() -> list[Any]:
        wants = [
            Want(number, box)
            for number, leaf in enumerate(wanted)
            for box, holders in leaf.layout
            if middle in holders
        ]
        return plan_reads(found, wants, align=4 << 20, gap=1 << 20, size=16 << 20)

    reads = timed(f"one process's restore plan onto {other}", restore_plan, LIMITS["restore plan"])
    nbytes = sum(read.stop - read.start for read in reads)
    print(f"  {len(reads):,} reads, {nbytes / 1e9:.1f} GB\n")


if __name__ == "__main__":
    main()
