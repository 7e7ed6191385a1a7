"""Schedules are due when they say."""

from __future__ import annotations

import pytest

import ckptio
from ckptio import every


def due(schedule, steps, seconds=0.0):
    return [step for step in steps if schedule.due(step, seconds)]


def test_multiples_and_lists_of_steps():
    assert due(every.steps(10), range(31)) == [0, 10, 20, 30]
    assert due(every.steps([3, 5, 999]), range(31)) == [3, 5]
    assert due(every.steps(range(2)), range(31)) == [0, 1]


def test_minutes_since_the_last_save():
    schedule = every.minutes(1.5)
    assert not schedule.due(7, 89.9)
    assert schedule.due(7, 90)
    assert schedule.timed


def test_any_of_several_suffices():
    schedule = every.steps(10) | every.steps([1]) | every.minutes(1)
    assert due(schedule, range(12), 0) == [0, 1, 10]
    assert due(schedule, range(12), 60) == [*range(12)]
    assert schedule.timed
    assert not (every.steps(10) | every.steps([1])).timed


def test_a_schedule_of_ones_own_can_be_joined():
    class Powers(every.Schedule):
        def due(self, step, seconds):
            return step.bit_count() == 1

    assert due(Powers() | every.steps([3]), range(10)) == [1, 2, 3, 4, 8]
    with pytest.raises(TypeError):
        every.steps(1) | 3


@pytest.mark.parametrize(
    "make", [lambda: every.steps(0), lambda: every.steps(-5), lambda: every.minutes(0)]
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ckptio.InvalidOptionError):
        make()
