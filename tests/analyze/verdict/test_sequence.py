"""The confidence sequence: that it holds at every look at once, and what it is a bet on."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kprof.analyze.verdict.sequence import (
    CLIP,
    Course,
    bets,
    interval,
    scales,
    threshold,
)

DIFFERENCES = st.lists(st.floats(-0.1, 0.1, allow_nan=False), min_size=10, max_size=30)


def course_of(differences, max_pairs=40):
    """Return the course of one comparison, or of several."""
    return Course.of(np.array(differences, dtype=float), max_pairs)


def test_the_capital_is_a_fair_game_under_every_size_of_the_differences():
    """Over all signs the mean of the last capital is what it was at first, exactly 1."""
    sizes = np.array([0.3, 0.01, 2.0, 0.5, 0.1, 7.0, 0.02, 0.4])
    signs = np.array(list(product([-1, 1], repeat=len(sizes))))
    differences = signs * sizes
    course = Course(differences, scales(differences), (0.6, 1.2))
    clipped = np.sign(differences) * CLIP
    np.divide(differences, course.scale, out=clipped, where=course.scale > 0)
    odds = [2 / (1 + np.exp(-2 * bet * np.clip(clipped, -CLIP, CLIP))) for bet in (0.6, 1.2)]
    capital = np.cumprod(odds, axis=-1).mean(axis=0)
    np.testing.assert_allclose(capital.mean(axis=0), 1.0, rtol=1e-12)
    best = np.maximum.accumulate(capital, axis=-1)
    np.testing.assert_allclose(np.exp(course.evidence_above(0.0)), best, rtol=1e-9)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5])
def test_over_all_signs_the_truth_is_ever_left_out_at_most_as_often_as_allowed(alpha):
    sizes = np.linspace(0.5, 2, 14)
    signs = np.array(list(product([-1, 1], repeat=len(sizes))))
    course = course_of(signs * sizes)
    above, below = course.evidence_above(0.0)[:, -1], course.evidence_below(0.0)[:, -1]
    assert (np.maximum(above, below) >= threshold(alpha)).mean() <= alpha


def test_a_course_scales_a_difference_by_the_spread_of_those_before_it():
    # The distances from the median: 1 and 1 of (0, 2), then 2, 0 and 2 of (0, 2, 4).
    course = course_of([0.0, 2.0, 4.0, 9.0])
    np.testing.assert_allclose(course.scale, [0, 0, 1 / 0.6745, 2 / 0.6745])


def test_a_scale_knows_nothing_of_what_it_scales_or_of_what_follows():
    differences = np.random.default_rng(0).normal(0, 1, 12)
    changed = differences.copy()
    changed[5:] = 100.0
    np.testing.assert_array_equal(scales(differences)[:6], scales(changed)[:6])


def test_a_scale_is_the_same_for_either_sign_and_about_any_middle():
    differences = np.random.default_rng(1).normal(0, 1, 12)
    np.testing.assert_allclose(scales(-differences), scales(differences))
    np.testing.assert_allclose(scales(differences + 3), scales(differences))


@settings(max_examples=50)
@given(DIFFERENCES, st.floats(-0.1, 0.1), st.floats(-0.1, 0.1))
@example([0.0, 0.0, 0.0625, 0.0625, 5e-324, 0.0625, 0.0, 0.0, 0.0, 0.0], 0.0, 0.0)
def test_evidence_never_rises_with_the_shift_it_speaks_against(differences, one, other):
    course = course_of(differences)
    low, high = sorted([one, other])
    assert (course.evidence_above(low) >= course.evidence_above(high) - 1e-12).all()


@settings(max_examples=30)
@given(DIFFERENCES)
def test_the_interval_ends_where_the_evidence_is_enough(differences):
    course = course_of(differences)
    low, _ = interval(course, 0.1)
    if np.isfinite(low):
        assert course.evidence_above(low)[-1] >= threshold(0.1)
        assert course.evidence_above(low + 1e-9)[-1] < threshold(0.1)


@settings(max_examples=30)
@given(DIFFERENCES)
def test_the_interval_of_a_lower_level_lies_within_that_of_a_higher(differences):
    course = course_of(differences)
    wide, narrow = interval(course, 0.01), interval(course, 0.1)
    assert wide[0] <= narrow[0] and narrow[1] <= wide[1]


@settings(max_examples=30)
@given(DIFFERENCES)
def test_swapping_a_and_b_mirrors_the_interval(differences):
    low, high = interval(course_of(differences), 0.1)
    mirrored = interval(course_of([-x for x in differences]), 0.1)
    assert mirrored == (-high, -low)


def test_what_was_left_out_once_stays_out():
    rng = np.random.default_rng(3)
    differences = rng.normal(0.02, 0.01, 40)
    ends = [interval(course_of(differences[:n]), 0.05) for n in range(8, 41)]
    lows, highs = np.array(ends).T
    assert (np.diff(lows) >= -1e-9).all() and (np.diff(highs) <= 1e-9).all()


def test_few_pairs_leave_the_interval_open():
    assert interval(course_of([0.1, 0.11, 0.12, 0.13]), 0.05) == (-np.inf, np.inf)


def test_a_clear_difference_needs_nine_pairs_at_one_percent():
    differences = 0.05 + 0.001 * np.random.default_rng(0).normal(size=20)
    evidence = course_of(differences).evidence_above(0.0)
    assert int(np.argmax(evidence >= threshold(0.01))) + 1 == 9


def test_drift_within_a_pair_never_makes_a_difference_beyond_the_rate():
    """Each second sample is 3 % slower than the first, and slower still as the run goes on."""
    rng = np.random.default_rng(7)
    is_a_first = rng.random((3_000, 40)) < 0.5
    size = 0.03 + np.linspace(0, 0.02, 40) + 0.001 * rng.normal(size=(3_000, 40))
    course = course_of(np.where(is_a_first, size, -size))
    above, below = course.evidence_above(0.0)[:, -1], course.evidence_below(0.0)[:, -1]
    # 1 % allowed: so many of 3,000 only once in a thousand runs.
    assert (np.maximum(above, below) >= threshold(0.01)).sum() <= 48


def test_longer_plans_stake_less():
    assert bets(160) == tuple(bet / 2 for bet in bets(40))
