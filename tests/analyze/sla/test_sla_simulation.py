"""Services whose true percentile is known: how often "met" is said of a limit that is missed."""

from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from kprof.analyze.sla.percentiles import ranks_of
from kprof.analyze.sla.samples import Sample
from kprof.analyze.sla.target_verdict import judge_times
from kprof.analyze.sla.targets import parse_target

REPEATS = 1000
SIGMA = 0.35
# Of so many true errors of 1 % in REPEATS, chance brings more in one of a thousand series.
MOST_FALSE = int(stats.binom(REPEATS, 0.01).ppf(0.999))


def draws(num):
    """Return independent lognormal times around 100 ms, a row for each simulated run."""
    return 1e8 * np.exp(SIGMA * np.random.default_rng(5).standard_normal((REPEATS, num)))


def true_percentile_ms(quantile):
    """Return the true percentile of the service, in ms."""
    return 100 * float(np.exp(SIGMA * stats.norm.ppf(float(quantile))))


def verdicts(percentile, num, factor):
    """Return the verdicts on a limit of so many times the true percentile."""
    limit_ms = factor * true_percentile_ms(Fraction(percentile) / 100)
    target = parse_target(f"ttft_p{percentile}<={limit_ms:.6f}ms")
    return [judge_times(target, [Sample(run, run)]).verdict for run in draws(num)]


@pytest.mark.slow
@pytest.mark.parametrize(("percentile", "num"), [("50", 50), ("95", 200), ("99", 459)])
def test_a_missed_limit_is_called_met_in_at_most_1_percent(percentile, num):
    found = verdicts(percentile, num, factor=0.999999)
    assert found.count("MET") <= MOST_FALSE


@pytest.mark.slow
@pytest.mark.parametrize(("percentile", "num"), [("50", 50), ("95", 200), ("99", 459)])
def test_a_kept_limit_is_called_missed_in_at_most_1_percent(percentile, num):
    found = verdicts(percentile, num, factor=1.000001)
    assert found.count("MISSED") <= MOST_FALSE


def test_comparing_the_percentile_itself_is_wrong_in_half_of_the_runs():
    limit = 1e6 * true_percentile_ms(Fraction(99, 100))
    rank = ranks_of(459, Fraction(99, 100)).estimate
    naive = (np.sort(draws(459))[:, rank - 1] < limit).mean()
    assert naive > 0.5


def test_a_limit_with_room_to_spare_is_proven_met():
    assert verdicts("95", 1000, factor=1.3).count("MET") > 0.9 * REPEATS


def test_a_limit_far_beyond_is_proven_missed():
    assert verdicts("95", 1000, factor=0.7).count("MISSED") > 0.9 * REPEATS


def test_correlated_times_are_not_taken_for_independent_ones():
    generator, state, rows = np.random.default_rng(6), np.zeros(REPEATS), []
    for _ in range(2000):
        state = 0.9 * state + np.sqrt(1 - 0.81) * generator.standard_normal(REPEATS)
        rows.append(state)
    runs = 1e8 * np.exp(SIGMA * np.array(rows).T)
    limit_ns = 1e6 * true_percentile_ms(Fraction(95, 100))
    target = parse_target(f"ttft_p95<={limit_ns / 1e6:.6f}ms")
    bound = ranks_of(2000, Fraction(95, 100)).high
    as_if_independent = (np.sort(runs)[:, bound - 1] < limit_ns).mean()
    found = [judge_times(target, [Sample(run, run)]).verdict for run in runs[:400]]
    assert as_if_independent > 0.15
    assert found.count("MET") / 400 < 0.03


def test_independent_times_mostly_count_in_full():
    target = parse_target("ttft_p95<=1s")
    found = [judge_times(target, [Sample(run, run)]).num_independent for run in draws(500)[:400]]
    assert sum(num < 500 for num in found) / 400 < 0.2
