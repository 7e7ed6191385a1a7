"""Peak memory of a blocking save and of a restore, beyond the tree itself.

Each runs in a fresh process that resets the kernel's high-water mark (VmHWM) just before the call:
what is reported is the peak during the call minus what was resident before (for a restore: minus
that and the restored tree).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_MB = 300


def _status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _save(uri: str) -> dict[str, float]:
    import ckptio
    from benchmarks.models import fill, transformer_targets

    tree = fill(transformer_targets())
    ckptio.save("memory://warm/up", {"x": tree["layer0"]["attn_kv"]})
    before = _status("VmRSS")
    _reset_peak()
    report = ckptio.save(uri, tree)
    return {
        "leaves": report.leaves,
        "bytes": report.nbytes,
        "seconds": report.seconds,
        "extra": _status("VmHWM") - before,
    }


def _restore(uri: str) -> dict[str, float]:
    import time

    import jax

    import ckptio
    from benchmarks.models import fill, transformer_targets

    like = transformer_targets()
    fill(transformer_targets(layers=1, width=8, hidden=8))  # JAX has done its first things
    before = _status("VmRSS")
    _reset_peak()
    began = time.perf_counter()
    tree = jax.block_until_ready(ckptio.restore(uri, like=like))
    seconds = time.perf_counter() - began
    size = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    )
    return {
        "leaves": len(jax.tree.leaves(tree)),
        "bytes": size,
        "seconds": seconds,
        "extra": _status("VmHWM") - before - size,
    }


def main() -> None:
    """Measure both, print a line each."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    print(f"extra memory, 1.9 GB in 55 leaves on 8 devices (limit {LIMIT_MB} MB)")
    with tempfile.TemporaryDirectory(dir=os.environ.get("CKPTIO_BENCH_DIR")) as directory:
        for verb in ("save", "restore"):
            command = [sys.executable, "-m", "benchmarks.memory", verb, f"{directory}/step-1"]
            out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            found = json.loads(out.stdout)
            extra = found["extra"] / 1e6
            verdict = "ok" if extra <= LIMIT_MB else "OVER THE LIMIT"
            print(
                f"  {verb:8} {extra:6.0f} MB beyond the tree's {found['bytes'] / 1e9:.2f} GB, "
                f"{found['leaves']:.0f} leaves, {found['seconds']:.2f} s: {verdict}"
            )


if __name__ == "__main__":
    print(json.dumps({"save": _save, "restore": _restore}[sys.argv[1]](sys.argv[2])))
