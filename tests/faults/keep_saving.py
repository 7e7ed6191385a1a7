"""A program for the kill tests: for each line on its input, fork a child that saves.

Everything is imported before the fork and nothing connected, so that a child is at work at once.
A line is the number of the first step: then the child saves for ever, its id is printed, and
killing it is up to the test. Or it is a step, and ``before`` or ``after`` with a number: the child
saves once, kills itself there at the store's operation of that number, the next one if that
fails, and its exit status is printed.
"""

import json
import os
import signal
import sys

import numpy as np

import ckptio
from ckptio.testing import FaultyBackend


class KillAt:
    """Ends this process at an operation of the stores that it opens, as nothing else can."""

    def __init__(self, moment, number):
        self.scripts = {moment: lambda call: self.strike(call, int(number))}

    def strike(self, call, number):
        if call.index >= number:
            os.kill(os.getpid(), signal.SIGKILL)

    @ckptio.hookimpl
    def ckptio_wrap_backend(self, backend):
        return FaultyBackend(backend, **self.scripts)


def main() -> None:
    """Serve until the input ends."""
    arguments = json.loads(sys.argv[1])
    options = ckptio.SaveOptions(object_size=3 << 20, part_size=1)
    ckptio.save("memory://warm/up", {"w": np.zeros(3)}, options=options)
    with ckptio.open_backend(**arguments):  # imports the driver, and connects nothing
        pass
    for line in sys.stdin:
        first, *moment = line.split()
        if child := os.fork():
            if moment:
                child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(child, flush=True)
            continue
        if moment:
            ckptio.plugin_manager().register(KillAt(*moment))
        for step in range(int(first), int(first) + (1 if moment else 10**6)):
            tree = {"w": np.full(1_500_000, float(step)), "step": step}
            ckptio.save(**arguments, tree=tree, overwrite=True, options=options)
        os._exit(0)


if __name__ == "__main__":
    main()
