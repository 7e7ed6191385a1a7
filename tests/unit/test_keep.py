"""Policies keep what they say, whatever order the rest goes in."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptio
from ckptio import keep

START = datetime(2026, 1, 1, tzinfo=UTC)


def saved(losses, hours=None):
    """Steps 0, 10, 20, … with these losses, None for none, committed at these hours."""
    hours = hours or range(len(losses))
    facts = {
        10 * i: keep.Facts(
            START + timedelta(hours=hour), {} if loss is None else {"loss": loss, "accuracy": -loss}
        )
        for i, (loss, hour) in enumerate(zip(losses, hours, strict=True))
    }
    return [keep.SavedStep(step, facts.__getitem__) for step in facts]


def kept(policy, steps):
    return sorted(policy.kept(steps))


def test_latest_keeps_the_newest():
    steps = saved([None] * 5)
    assert kept(keep.latest(2), steps) == [30, 40]
    assert kept(keep.latest(9), steps) == [0, 10, 20, 30, 40]
    assert kept(keep.latest(1), []) == []


def test_all_and_only():
    steps = saved([3.0, 1.0, 2.0])
    assert kept(keep.all(), steps) == [0, 10, 20]
    assert kept(keep.only(lambda s: s.metrics["loss"] > 1.5), steps) == [0, 20]
    assert kept(keep.only(lambda s: s.step == 10), steps) == [10]


def test_every_so_many_steps():
    assert kept(keep.every(steps=20), saved([None] * 6)) == [0, 20, 40]


def test_every_so_many_hours_counts_from_the_last_one_kept():
    steps = saved([None] * 7, hours=[0, 0.5, 1.1, 1.9, 2.1, 2.2, 9])
    assert kept(keep.every(hours=1), steps) == [0, 20, 40, 60]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.floats(0.1, 20), st.randoms())
def test_what_every_keeps_once_it_keeps_when_others_are_gone(hours, wanted, rng: random.Random):
    steps = saved([None] * len(hours), sorted(hours))
    first = keep.every(hours=wanted).kept(steps)
    rest = [s for s in steps if s.step in first or rng.random() < 0.5]
    assert keep.every(hours=wanted).kept(rest) == first


def test_best_takes_low_or_high_and_of_equals_the_newer():
    steps = saved([3.0, 1.0, 2.0, 1.0, None])
    assert kept(keep.best(1, "loss"), steps) == [30]
    assert kept(keep.best(2, "loss"), steps) == [10, 30]
    assert kept(keep.best(1, "loss", mode="max"), steps) == [0]
    assert kept(keep.best(1, "accuracy", mode="max"), steps) == [30]
    assert kept(keep.best(3, "missing"), steps) == []


def test_nan_is_never_best_and_infinity_is_ranked():
    steps = saved([nan, inf, 5.0, -inf, nan])
    assert kept(keep.best(5, "loss"), steps) == [10, 20, 30]
    assert kept(keep.best(1, "loss"), steps) == [30]
    assert kept(keep.best(1, "loss", mode="max"), steps) == [10]


def test_policies_are_joined():
    steps = saved([1.0, 3.0, 2.0, 4.0, 5.0, 6.0])
    policy = keep.latest(1) | keep.every(steps=30) | keep.best(1, "loss")
    assert kept(policy, steps) == [0, 30, 50]
    assert policy.reads_facts
    assert not (keep.latest(1) | keep.every(steps=30)).reads_facts


def test_a_policy_of_ones_own_can_be_joined():
    class Odd(keep.Policy):
        def kept(self, steps):
            return {s.step for s in steps if s.step % 20}

    assert kept(Odd() | keep.latest(1), saved([None] * 5)) == [10, 30, 40]
    with pytest.raises(TypeError):
        keep.latest(1) | 3


def test_looking_at_numbers_reads_no_facts():
    def read(step):
        raise AssertionError(step)

    steps = [keep.SavedStep(step, read) for step in range(10)]
    assert kept(keep.latest(1) | keep.every(steps=5) | keep.all(), steps) == [*range(10)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: keep.latest(0),
        lambda: keep.every(steps=0),
        lambda: keep.every(hours=-1),
        lambda: keep.every(),
        lambda: keep.every(steps=1, hours=1),
        lambda: keep.best(0, "loss"),
        lambda: keep.best(1, "loss", mode="least"),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ckptio.InvalidOptionError):
        make()
