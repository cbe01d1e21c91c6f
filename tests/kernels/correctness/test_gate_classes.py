"""The class that the gate's levels make together, and what may be asked of it."""

import pytest

from kprof.kernels.correctness import GateReport, Level, Measure, check
from kprof.kernels.correctness.check import GateError
from kprof.kernels.correctness.levels import (
    BEHAVIOURAL,
    BIT_EXACT,
    LEVELS,
    NUMERICAL,
    REJECT,
    TASK,
    TRAINING,
    judge,
    not_run,
)
from tests.kernels.correctness.doubling import DOUBLED


def report_of(states, *, is_bit_exact=False, changes_precision=False):
    levels = tuple(
        Level(n, states.get(n, "not run"), "", is_bit_exact=is_bit_exact and n == "L1")
        for n in LEVELS
    )
    return GateReport("swap", levels, tuple(states), changes_precision)


def passed(*names):
    return dict.fromkeys(names, "passed")


@pytest.mark.parametrize(
    ("states", "reached"),
    [
        (passed("L0", "L1", "L2"), NUMERICAL),
        (passed("L0", "L1"), None),
        (passed("L0", "L3", "L4"), BEHAVIOURAL),
        (passed("L0", "L5"), TASK),
        (passed("L1", "L2", "L3", "L4", "L5"), None),
        (passed("L0", "L2", "L3", "L4") | {"L1": "failed"}, BEHAVIOURAL),
        (passed("L0", "L1", "L2") | {"L3": "failed"}, REJECT),
        (passed("L0", "L1", "L2", "L5") | {"L3": "failed"}, TASK),
        (passed("L0", "L1", "L2", "L3", "L4") | {"L5": "failed"}, REJECT),
        (passed("L1", "L2", "L3", "L4", "L5") | {"L0": "failed"}, REJECT),
        (passed("L0", "L1", "L2") | {"L6": "failed"}, REJECT),
        (passed("L0", "L3") | {"L4": "undecided"}, None),
        (passed("L0", "L1", "L2") | {"L6": "undecided"}, None),
        (passed("L0", "L1", "L2", "L5") | {"L6": "undecided"}, None),
        (passed("L0", "L1", "L2") | {"L5": "undecided"}, None),
        (passed("L0", "L3", "L4") | {"L1": "undecided"}, BEHAVIOURAL),
        (passed("L0", "L5") | {"L1": "failed", "L6": "undecided"}, None),
        (passed("L0") | {"L1": "failed", "L5": "undecided"}, None),
        (passed("L0") | {"L1": "failed", "L6": "undecided"}, None),
        (passed("L0", "L6"), TRAINING),
        (passed("L0", "L1", "L6"), TRAINING),
        (passed("L0", "L5", "L6"), TASK),
        (passed("L0", "L6") | {"L1": "failed", "L3": "failed"}, TRAINING),
        (passed("L0", "L6") | {"L5": "failed"}, REJECT),
        (passed("L1", "L6"), None),
    ],
)
def test_a_class_is_reached_by_its_levels_and_kept_back_by_weaker_ones(states, reached):
    assert report_of(states).reached == reached


def test_bit_exact_needs_every_bit_and_no_precision_changed():
    states = passed("L0", "L1", "L5")
    assert report_of(states, is_bit_exact=True).reached == BIT_EXACT
    assert report_of(states, is_bit_exact=True, changes_precision=True).reached == TASK


def test_a_change_of_precision_is_never_more_than_task_equivalent():
    assert report_of(passed(*LEVELS), changes_precision=True).reached == TASK
    assert report_of(passed("L0", "L1", "L2", "L3", "L4"), changes_precision=True).reached is None
    assert report_of(passed("L0", "L1", "L2", "L6"), changes_precision=True).reached == TRAINING


def test_a_level_run_apart_counts_where_the_report_has_not_run_it():
    level = Level("L6", "passed", "elsewhere")
    assert report_of(passed("L0", "L1")).with_level(level).reached == TRAINING
    failed = report_of(passed("L0") | {"L6": "failed"})
    assert failed.with_level(level)["L6"].state == "failed"


def test_a_level_that_was_asked_for_and_not_run_does_not_pass():
    report = check(DOUBLED, ("L0", "L2"))
    assert (report["L0"].state, report["L2"].state) == ("passed", "not run")
    assert not report.passed


def test_the_report_says_what_the_next_class_needs():
    assert report_of(passed("L0", "L1")).missing == ("L2",)
    assert report_of(passed("L0", "L5")).missing == ("L1", "L2")
    assert report_of(passed("L0") | {"L1": "failed"}).missing == ("L5",)
    assert report_of(passed("L0", "L1", "L2")).missing == ()
    assert report_of(passed("L0", "L1", "L2") | {"L6": "undecided"}).missing == ("L6",)


def test_levels_that_a_report_does_not_have_were_not_run():
    levels = tuple(Level(name, "passed", "") for name in ("L0", "L1"))
    report = GateReport("swap", levels, ("L0", "L1"))
    assert (report.reached, report.missing) == (None, ("L2",))


def test_a_number_that_is_none_breaks_every_threshold():
    assert judge("L3", [Measure("x", float("nan"), 1.0, None)], "").state == "failed"
    assert (
        judge("L3", [Measure("x", float("nan"), 1.0, None, better="higher")], "").state == "failed"
    )


def test_a_level_that_was_not_run_says_why():
    level = check(DOUBLED, ("L5",))["L5"]
    assert (level.state, "no model" in level.why) == ("not run", True)
    given = not_run("L5", "no task")
    assert (given.state, given.why) == ("not run", "no task")


def test_an_unknown_level_is_an_error():
    with pytest.raises(GateError, match="unknown levels: L7"):
        check(DOUBLED, ("L7",))


def test_there_must_be_something_to_check():
    with pytest.raises(GateError, match="nothing to check"):
        check()
