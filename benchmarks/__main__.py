"""``python -m benchmarks``: measure, print tables, write results. See README.md beside this."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from benchmarks import agreement, compare, goals, imports, memory, readme, remote, stores
from benchmarks.meter import HASTE

RESULTS = Path(__file__).parent / "results"
QUICK = Path(tempfile.gettempdir(), "ckptio-benchmarks-quick")
MEASURED = {"workloads": compare, "remote": remote, "stores": stores}


def main() -> None:
    """Run one benchmark, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, help=f"where results are written: {RESULTS.name}/")
    parser.add_argument("--quick", action="store_true", help="(no command) all of it, tiny")
    parser.add_argument("--resume", action="store_true", help="(no command) keep what is there")
    parser.add_argument("--rounds", type=int, help="(no command) of everything; else each its own")
    commands = parser.add_subparsers(dest="command")
    texts = {
        "workloads": "ckptio against its peers, on the local disk",
        "remote": "a whole checkpoint against the SDKs, on each store",
        "stores": "each driver against its SDK",
    }
    for name, module in MEASURED.items():
        module.arguments(commands.add_parser(name, help=texts[name]))
    commands.add_parser("memory", help="peak memory of a save and a restore")
    commands.add_parser("imports", help="what importing ckptio costs")
    commands.add_parser("goals", help="what was promised, and what the results say")
    agreement.arguments(commands.add_parser("agree", help="whether two runs' results agree"))
    commands.add_parser("readme", help="put the results into README.md")
    options = parser.parse_args()
    if getattr(options, "quick", False):
        os.environ[HASTE] = "1"
    if options.out is None:  # a smoke test's results are nothing to keep
        options.out = QUICK if getattr(options, "quick", False) else RESULTS
    if options.command in MEASURED:
        MEASURED[options.command].main(options, options.out)
    if options.command in ("workloads", "remote", "goals"):
        goals.write(options.out)
    elif options.command == "memory":
        memory.main()
    elif options.command == "imports":
        imports.main()
    elif options.command == "agree":
        agreement.main(options)
    elif options.command == "readme":
        readme.write(options.out)
    elif options.command is None:
        _everything(options, commands)


def _everything(options: argparse.Namespace, commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]  # argparse offers no public name for it
    began = time.monotonic()
    imports.main()
    given = [f"--{flag}" for flag in ("quick", "resume") if getattr(options, flag)]
    given += ["--rounds", str(options.rounds)] if options.rounds else []
    for name, module in MEASURED.items():
        print(f"\n== {name}", flush=True)
        module.main(commands.choices[name].parse_args(given), options.out)
    goals.write(options.out)
    print(f"\n{(time.monotonic() - began) / 60:.0f} minutes; results are in {options.out}")


if __name__ == "__main__":
    main()
