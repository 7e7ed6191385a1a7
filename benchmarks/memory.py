"""Peak memory of a blocking save and of a restore, beyond the tree itself, against the promise.

Each runs in a fresh process that resets the kernel's high-water mark (VmHWM) just before the call:
what is reported is the peak during the call minus what was resident before (for a restore: minus
that and the restored tree).
"""

from __future__ import annotations

from benchmarks import targets
from benchmarks.fresh import run_fresh
from benchmarks.trial import ENVIRONMENT, Trial
from benchmarks.workloads import workload

LIMIT_MB = 300


def main() -> None:
    """Measure both, print a line each."""
    load = workload("a")
    print(
        f"extra memory, {load.nbytes / 1e9:.1f} GB in {len(load.leaves)} leaves on 8 devices "
        f"(limit {LIMIT_MB} MB)"
    )
    with targets.local() as target:
        for verb in ("save", "restore"):
            trial = Trial(load.letter, False, "ckptio", verb, target.below("step-1"))
            found = run_fresh("benchmarks.trial:measure", trial.as_json(), environment=ENVIRONMENT)
            extra = found["extra"] / 1e6
            verdict = "ok" if extra <= LIMIT_MB else "OVER THE LIMIT"
            print(f"  {verb:8} {extra:6.0f} MB, {found['seconds']:.2f} s: {verdict}")


if __name__ == "__main__":
    main()
