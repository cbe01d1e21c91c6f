"""The signed ranks: exact chances, the interval they give, and that scipy says the same."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import wilcoxon

from kprof.analyze.verdict.ranks import (
    averages_to_leave_out,
    interval,
    null_distribution,
    p_value,
    tail,
    walsh_averages,
)

SPREAD = st.floats(-1, 1, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-6)


def ends(differences, alpha):
    """Return the interval of one comparison as two floats."""
    low, high = interval(walsh_averages(differences), len(differences), alpha)
    return float(low), float(high)


def count_sums(num_pairs):
    """Return how many of all 2^n choices of signs give each sum of positive ranks."""
    signs = np.array(list(product([0, 1], repeat=num_pairs)))
    return np.bincount(signs @ np.arange(1, num_pairs + 1))


@pytest.mark.parametrize("num_pairs", [1, 2, 5, 6, 9, 12])
def test_chances_are_those_of_all_signs_written_out(num_pairs):
    enumerated = np.cumsum(count_sums(num_pairs)) / 2**num_pairs
    np.testing.assert_allclose(null_distribution(num_pairs), enumerated, rtol=1e-12)


@pytest.mark.parametrize("num_pairs", [6, 10, 20, 40])
def test_p_is_that_of_scipy_where_nothing_is_tied(num_pairs):
    rng = np.random.default_rng(num_pairs)
    for shift in (0.0, 0.3, 1.0):
        differences = rng.normal(shift, 1, num_pairs)
        expected = wilcoxon(differences, method="exact").pvalue
        found = p_value(walsh_averages(differences), num_pairs)
        assert float(found) == pytest.approx(expected, rel=1e-9)


def test_six_pairs_of_one_sign_are_rare_enough_and_five_are_not():
    assert float(p_value(walsh_averages(np.arange(1.0, 7.0)), 6)) == pytest.approx(2 / 64)
    assert averages_to_leave_out(6, 0.05) == 0
    assert averages_to_leave_out(5, 0.05) == -1


def test_too_few_pairs_for_the_level_have_no_ends():
    assert ends(np.arange(5.0), 0.05) == (-np.inf, np.inf)


@given(st.lists(SPREAD, min_size=6, max_size=25), st.sampled_from([0.01, 0.04, 0.05, 0.1]))
def test_the_interval_leaves_out_0_exactly_when_p_is_as_small(differences, alpha):
    differences = np.array(differences)
    low, high = ends(differences, alpha)
    is_rare = p_value(walsh_averages(differences), len(differences)) <= alpha
    assert is_rare == (low > 0 or high < 0)


@given(st.lists(SPREAD, min_size=8, max_size=30))
def test_the_interval_of_a_lower_level_lies_within_that_of_a_higher(differences):
    wide = ends(np.array(differences), 0.01)
    narrow = ends(np.array(differences), 0.1)
    assert wide[0] <= narrow[0] <= narrow[1] <= wide[1]


@pytest.mark.parametrize("values", [[-1, 0, 1], [-2, -2, 1, 3], [0, 0, 0, 5]])
def test_with_ties_and_zeros_the_interval_covers_at_least_as_often(values):
    """All signs of tied sizes are equally likely, so coverage can be counted, not estimated."""
    sizes = np.abs(np.array(values * 3, dtype=float))[:9]
    signs = np.array(list(product([-1, 1], repeat=len(sizes))))
    low, high = interval(walsh_averages(signs * sizes), len(sizes), 0.05)
    assert ((low <= 0) & (high >= 0)).mean() >= 0.95


def test_without_ties_the_interval_covers_as_often_as_it_says():
    sizes = np.arange(1.0, 11.0) ** 1.5
    signs = np.array(list(product([-1, 1], repeat=10)))
    low, high = interval(walsh_averages(signs * sizes), 10, 0.05)
    missed = 1 - ((low <= 0) & (high >= 0)).mean()
    assert missed == pytest.approx(2 * null_distribution(10)[averages_to_leave_out(10, 0.05)])
    assert 0.03 < missed <= 0.05


def test_the_normal_of_many_pairs_is_near_their_exact_chances():
    for statistic in (19_000, 20_000, 22_000):
        exact = null_distribution(301)[statistic]
        assert tail(301, np.array([statistic]))[0] == pytest.approx(exact, rel=0.05)


def test_many_pairs_leave_out_as_many_averages_as_their_chance_says():
    outside = averages_to_leave_out(400, 0.05)
    assert 2 * null_distribution(400)[outside] == pytest.approx(0.05, rel=0.01)


def test_averages_are_those_of_every_two_and_of_each_itself():
    assert sorted(walsh_averages(np.array([0.0, 2.0, 6.0]))) == [0, 1, 2, 3, 4, 6]
