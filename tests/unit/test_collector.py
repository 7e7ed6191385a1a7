"""Collections are put off for moments, and only those that the program wants."""

from __future__ import annotations

import gc
import threading

import pytest

from ckptio import collector


@pytest.fixture
def switched():
    """A function that turns the collector on or off; it is as before afterwards."""
    before = gc.isenabled()
    yield lambda on: gc.enable() if on else gc.disable()
    gc.enable() if before else gc.disable()


@pytest.mark.parametrize("on", [True, False])
def test_after_a_pause_it_is_as_it_was(on, switched):
    switched(on)
    with collector.paused():
        with pytest.raises(KeyError), collector.paused():
            raise KeyError
        assert not gc.isenabled()
    assert gc.isenabled() == on


def test_pauses_of_several_threads_overlap(switched):
    switched(True)
    inside, leave = threading.Event(), threading.Event()

    def other():
        with collector.paused():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with collector.paused():
        thread.start()
        assert inside.wait(30)
    assert not gc.isenabled(), "the other thread is still at it"
    leave.set()
    thread.join(30)
    assert gc.isenabled()
