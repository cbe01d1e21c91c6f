"""Percentiles by inverted CDF, bounds by order statistics, and how many samples they take."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kprof.analyze.sla.percentiles import bound_share, least_samples, ranks_of, samples_to_pass

P99 = Fraction(99, 100)
QUANTILES = st.sampled_from([Fraction(1, 2), Fraction(9, 10), Fraction(19, 20), P99])


@pytest.mark.parametrize(
    ("percentile", "num"), [("50", 7), ("90", 44), ("95", 90), ("99", 459), ("99.9", 4603)]
)
def test_a_bound_takes_a_least_number_of_samples(percentile, num):
    quantile = Fraction(percentile) / 100
    assert least_samples(quantile) == num
    assert ranks_of(num, quantile).high == num
    assert ranks_of(num - 1, quantile).high is None


def test_the_percentile_is_the_smallest_value_that_so_many_reach():
    assert ranks_of(100, P99).estimate == 99
    assert ranks_of(101, P99).estimate == 100
    assert ranks_of(1, P99).estimate == 1


def test_the_bound_of_p99_of_ten_thousand_is_the_78th_largest():
    assert 10_000 - ranks_of(10_000, P99).high + 1 == 78


@given(st.integers(min_value=1, max_value=20_000), QUANTILES)
def test_the_ranks_are_the_tightest_that_hold_with_99_percent(num, quantile):
    ranks = ranks_of(num, quantile)
    cdf = stats.binom(num, float(quantile)).cdf
    if ranks.high is not None:
        assert cdf(ranks.high - 1) >= 0.99 > cdf(ranks.high - 2)
    else:
        assert cdf(num - 1) < 0.99
    if ranks.low is not None:
        assert cdf(ranks.low - 1) <= 0.01 + 1e-12 < cdf(ranks.low)
    else:
        assert cdf(0) > 0.01


def test_samples_to_pass_grow_with_the_share_that_misses():
    assert samples_to_pass(P99, 0.0) == 459
    assert 459 < samples_to_pass(P99, 0.002) < samples_to_pass(P99, 0.008)


def test_no_number_of_samples_proves_what_is_not_so():
    assert samples_to_pass(P99, 0.01) is None


@settings(max_examples=30)
@given(QUANTILES, st.floats(min_value=0, max_value=0.9))
def test_so_many_samples_do_pass_with_that_share(quantile, part):
    share = part * float(1 - quantile)
    num = samples_to_pass(quantile, share)
    assert num is not None
    kept = num - math.ceil(share * num)
    assert ranks_of(num, quantile).high <= kept


def test_bounds_of_a_share_are_those_of_clopper_and_pearson():
    bounds = bound_share(99, 100)
    assert bounds.low == pytest.approx(0.9355, abs=1e-4)
    assert bounds.high == pytest.approx(0.9999, abs=1e-4)


def test_a_share_of_all_or_none_is_bounded_on_one_side():
    assert bound_share(5, 5).high == 1.0
    assert bound_share(0, 5).low == 0.0
    assert bound_share(0, 459).high == pytest.approx(0.01, abs=1e-4)
