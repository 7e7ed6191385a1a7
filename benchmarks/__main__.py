"""``python -m benchmarks``: measure, print tables, write results. See README.md beside this."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import compare, imports, memory, remote, simulation, stores

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run one benchmark, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are written")
    commands = parser.add_subparsers(dest="command")
    stores.arguments(commands.add_parser("stores", help="each driver against its SDK"))
    compare.arguments(commands.add_parser("workloads", help="ckptio against its peers, locally"))
    remote.arguments(commands.add_parser("remote", help="a whole checkpoint against the SDKs"))
    commands.add_parser("memory", help="peak memory of a save and a restore")
    commands.add_parser("imports", help="what importing ckptio costs")
    commands.add_parser("simulation", help="405 billion parameters, planned without devices")
    options = parser.parse_args()
    if options.command in (None, "imports"):
        imports.main()
    if options.command in (None, "memory"):
        memory.main()
    if options.command in (None, "simulation"):
        simulation.main()
    for name, module in {"stores": stores, "workloads": compare, "remote": remote}.items():
        if options.command is None:
            module.main(commands.choices[name].parse_args([]), options.out)
        elif options.command == name:
            module.main(options, options.out)


if __name__ == "__main__":
    main()
