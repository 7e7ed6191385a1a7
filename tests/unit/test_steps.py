"""A name is a step exactly when the step has that name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptio
from ckptio.steps import StepNames, checked_step

TEMPLATES = [
    "step-{step:08d}", "{step}", "{step:d}", "ckpt_{step:05}.done", "{step:x}", "a{step:#010x}",
    "{step:_}", "{step:#b}b", "{step:>12}", "{{{step}}}", "1{step:03d}1", "été{step:o}",
    "{step!r}", "{step!s:>1}",
]  # fmt: skip


@given(st.sampled_from(TEMPLATES), st.integers(0, 2**60))
def test_names_and_steps_are_each_others_inverse(template, step):
    names = StepNames(template)
    assert names.step(names.name(step)) == step


@given(st.sampled_from(TEMPLATES), st.text(alphabet="0123456789abxo-_, step{}", max_size=14))
def test_a_name_that_is_read_is_the_name_that_would_be_written(template, name):
    names = StepNames(template)
    step = names.step(name)
    assert step is None or names.name(step) == name


@pytest.mark.parametrize(
    "name",
    [
        "", "step-", "step-7", "step-0000007", "step-000000007", "step-00000007 ",
        "step-00000007.x",
        "Step-00000007", "step-0000000x", "step--0000007", "step-+0000007", "step-0000_007",
        "step-٠٠٠٠٠٠٠٧", "xstep-00000007", "step-00000007.tmp", "step-00000007-1",
    ],
)  # fmt: skip
def test_other_names_are_foreign(name):
    assert StepNames("step-{step:08d}").step(name) is None


def test_a_step_wider_than_its_format_is_read_too():
    assert StepNames("step-{step:02d}").step("step-12345") == 12345


@pytest.mark.parametrize(
    "template",
    [
        "", "step", "{step}/x", "{step}{step}", "{0}", "{}", "{step", "{step:q}", "{other}",
        "{step.real}", "{step[0]}", "{step:.2e}", "{step:c}", "..", "{step:%}", "{step:,}",
        "a/{step}",
    ],
)  # fmt: skip
def test_formats_that_do_not_name_each_step_are_refused(template):
    with pytest.raises(ckptio.InvalidOptionError, match="step_format"):
        StepNames(template)


def test_steps_are_integers_of_any_kind_and_not_negative():
    assert checked_step(np.int32(7)) == 7
    assert type(checked_step(np.int64(7))) is int
    for bad in [-1, 1.0, "1", None]:
        with pytest.raises(ckptio.InvalidOptionError, match="a step is"):
            checked_step(bad)
