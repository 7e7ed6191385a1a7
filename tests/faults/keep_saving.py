"""A program for the kill tests: for each line on its input, fork a child that saves for ever.

Everything is imported before the fork and nothing connected, so that a child is at work at once.
The child's id is printed; killing it is up to the test.
"""

import json
import os
import sys

import numpy as np

import ckptio


def main() -> None:
    """Serve until the input ends."""
    arguments = json.loads(sys.argv[1])
    options = ckptio.SaveOptions(object_size=3 << 20, part_size=1)
    ckptio.save("memory://warm/up", {"w": np.zeros(3)}, options=options)
    with ckptio.open_backend(**arguments):  # imports the driver, and connects nothing
        pass
    for line in sys.stdin:
        first = int(line)
        if child := os.fork():
            print(child, flush=True)
            continue
        for step in range(first, first + 10**6):
            tree = {"w": np.full(1_500_000, float(step)), "step": step}
            ckptio.save(**arguments, tree=tree, overwrite=True, options=options)


if __name__ == "__main__":
    main()
