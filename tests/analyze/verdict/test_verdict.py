"""What is claimed about pairs: faster, slower, the same, or nothing yet."""

import math
from dataclasses import replace
from itertools import product
from statistics import NormalDist

import numpy as np
import pytest
from scipy.stats import beta

from kprof.analyze.verdict import judge
from kprof.analyze.verdict.judge import pairs_needed
from kprof.analyze.verdict.mean import chance_of_more, look_at_mean
from kprof.analyze.verdict.ranks import interval, walsh_averages
from kprof.analyze.verdict.rule import levels_of, look_once
from kprof.comparison import Metric, Plan
from tests.analyze.verdict.verdict_pairs import (
    MEMORY,
    RATE,
    TIME,
    pair_of,
    pairs_with,
    plan_of,
    verdict_of,
)
from tests.quantities import quantities_in


def test_a_tenth_less_time_is_faster_and_material():
    claim = verdict_of(pairs_with(0.9))
    assert (claim.verdict, claim.is_material, claim.num_pairs) == ("FASTER", True, 40)
    assert claim.interval.low < 0.9 < claim.interval.high < 0.99
    assert claim.interval.kind == "fixed"
    assert claim.p_value < 1e-6


def test_a_tenth_more_of_a_rate_is_faster_too_and_the_ratio_is_that_of_the_values():
    claim = verdict_of(pairs_with(1.1), RATE)
    assert claim.verdict == "FASTER"
    assert claim.interval.ratio == pytest.approx(1.1, rel=0.005)


def test_as_many_pairs_as_may_be_planned_can_be_judged():
    pairs = [replace(p, is_a_first=n % 2 == 0) for n, p in enumerate(pairs_with(1.0, 1000))]
    claim = verdict_of(pairs, max_pairs=1000, stops_early=False)
    assert (claim.verdict, claim.num_pairs) == ("SAME", 1000)


def test_nothing_between_them_is_the_same():
    claim = verdict_of(pairs_with(1.0))
    assert claim.verdict == "SAME"
    assert claim.interval.low <= 1 <= claim.interval.high
    assert not claim.is_material


def test_a_difference_too_small_to_matter_is_the_same_and_is_said():
    claim = verdict_of(pairs_with(1.004, spread=0.001))
    assert claim.verdict == "SAME"
    assert claim.interval.low > 1
    assert quantities_in(claim.why)[:2] == ["0.44 %", "1 %"]
    assert claim.why.split(",")[0].endswith("slower")


def test_a_verdict_of_few_samples_says_which_stalls_they_may_miss():
    short = verdict_of(pairs_with(0.9))
    long = verdict_of([replace(one, num_windows=5) for one in pairs_with(0.9)])
    assert short.verdict == long.verdict == "FASTER"
    # 0.89 to the power of 40 is 1 %.
    assert quantities_in(short.why)[-2:] == ["11 %", "40"]
    assert "samples" not in long.why


def test_same_beside_an_interval_that_sticks_out_says_why():
    claims = [verdict_of(pairs_with(1.0045, spread=0.0068, seed=s)) for s in range(200)]
    stick_out = [c for c in claims if c.verdict == "SAME" and c.interval.high > 1.01]
    assert stick_out
    assert all("either end" in claim.why for claim in stick_out)


def test_a_difference_across_the_smallest_effect_is_slower_but_not_material():
    claim = verdict_of(pairs_with(1.01, spread=0.004))
    assert (claim.verdict, claim.is_material) == ("SLOWER", False)
    assert 1 < claim.interval.low < 1.01 < claim.interval.high


def test_noise_too_large_for_either_answer_is_inconclusive():
    claim = verdict_of(pairs_with(1.0, spread=0.05))
    assert claim.verdict == "INCONCLUSIVE"
    assert claim.interval.low < 1 < 1.01 < claim.interval.high
    assert claim.pairs_needed > 40


def test_so_many_more_pairs_as_are_said_to_be_needed_mostly_decide():
    verdicts = []
    for seed in range(60):
        pairs = pairs_with(1.006, num_pairs=20, spread=0.012, seed=seed)
        claim = verdict_of(pairs, max_pairs=20)
        if claim.verdict == "INCONCLUSIVE" and claim.pairs_needed:
            more = 20 + claim.pairs_needed
            longer = pairs_with(claim.interval.ratio, more, 0.012, seed=1_000 + seed)
            verdicts.append(verdict_of(longer, max_pairs=more).verdict)
    assert len(verdicts) >= 20
    decided = sum(verdict != "INCONCLUSIVE" for verdict in verdicts)
    assert 0.65 * len(verdicts) <= decided


def test_pairs_that_all_say_the_same_but_for_noise_of_nothing_need_no_forecast():
    claim = verdict_of([pair_of(2.0, 2.0, n) for n in range(40)], MEMORY)
    assert (claim.verdict, claim.pairs_needed) == ("SAME", None)


def test_same_is_wrong_no_more_often_than_its_error_where_the_difference_just_matters():
    """Over all signs of ten sizes: four in a hundred are allowed, and nearly used."""
    levels = levels_of(plan_of(max_pairs=10))
    signs = np.array(list(product([-1, 1], repeat=10)))
    sizes = levels.margin * np.linspace(0.05, 0.3, 10) ** 1.1
    wrong = look_once(levels.margin + signs * sizes, levels).is_alike.mean()
    assert 0.03 < wrong <= 0.04


def test_two_metrics_share_the_error_between_them():
    plan = plan_of(TIME, MEMORY)
    pairs = [replace(p, a=(*p.a, 5.0), b=(*p.b, 4.0)) for p in pairs_with(1.03)]
    time, memory = judge(plan, pairs)
    assert (time.verdict, memory.verdict) == ("SLOWER", "FASTER")
    assert time.interval.level == memory.interval.level == 0.975
    alone = verdict_of(pairs_with(1.03)).interval
    assert time.interval.low < alone.low and alone.high < time.interval.high


def test_p_of_several_metrics_is_corrected_by_holm():
    """Alone they are 1.25 times Wilcoxon's, for the looks before; the smallest counts twice."""
    clear, weak = pairs_with(1.03, 10), pairs_with(1.004, 10, seed=4)
    alone = [verdict_of(p, max_pairs=10).p_value for p in (clear, weak)]
    assert alone[0] == pytest.approx(1.25 * 2 / 2**10)
    both = [replace(c, a=c.a + w.a, b=c.b + w.b) for c, w in zip(clear, weak, strict=True)]
    together = [c.p_value for c in judge(plan_of(TIME, RATE, max_pairs=10), both)]
    assert together == pytest.approx([2 * alone[0], max(alone[1], 2 * alone[0])])


def test_b_that_is_faster_in_the_median_and_slower_in_the_mean_is_not_faster():
    pairs = [
        replace(pair, b=(pair.b[0] * (1.6 if number % 10 == 3 else 1.0),))
        for number, pair in enumerate(pairs_with(0.98, 80, spread=0.002))
    ]
    claim = verdict_of(pairs, max_pairs=80)
    assert claim.verdict == "INCONCLUSIVE"
    assert claim.interval.high < 1 < claim.mean.ratio


@pytest.mark.parametrize(("pairs", "stalls", "size"), [(160, 1, 0.8), (162, 2, 0.8), (42, 1, 0.4)])
def test_the_error_of_a_mean_with_equal_stalls_is_that_of_their_share(pairs, stalls, size):
    """B is 2 % faster but for its stalls: its mean is 1 % slower at this share of them."""
    b = np.where(np.arange(pairs) < stalls, 0.98 + size, 0.98)
    found = float(chance_of_more(np.ones(pairs), b, float(np.log(1.01))))
    assert found == pytest.approx(beta.sf(0.03 / size, stalls + 1, pairs - stalls), rel=0.02)


@pytest.mark.parametrize(("stalls", "is_proven"), [(0, True), (1, False), (8, False)])
def test_one_stall_of_b_alone_leaves_room_for_more_and_none_does_not(stalls, is_proven):
    rng = np.random.default_rng(0)
    a, b = np.exp(rng.normal(0, 0.005, (2, 160)))
    b *= np.where(np.arange(160) < stalls, 1.8, 0.98)
    look = look_at_mean(np.stack([a, b]), 0.05, float(np.log(1.01)), 160, is_fixed=True)
    assert (bool(look.is_no_more), bool(look.mirrored().is_no_less)) == (is_proven, is_proven)


def test_stalls_of_both_are_no_evidence_against_b():
    rng = np.random.default_rng(0)
    a, b = np.exp(rng.normal(0, 0.005, (2, 160)))
    a[:8] *= 1.8
    b *= 0.98 * np.where(np.arange(160) >= 152, 1.8, 1.0)
    margin = float(np.log(1.01))
    alone = chance_of_more(np.exp(rng.normal(0, 0.005, 160)), b, margin)
    assert chance_of_more(a, b, margin) < 0.01 < alone


def test_a_mean_that_is_no_number_proves_nothing():
    values = np.ones((2, 40))
    values[1, 3] = np.nan
    look = look_at_mean(values, 0.05, 0.01, 40, is_fixed=True)
    assert not look.is_no_more and not look.is_no_less


@pytest.mark.parametrize("is_fixed", [True, False])
def test_what_is_proven_of_the_mean_one_way_is_proven_the_other_way_with_a_and_b_swapped(is_fixed):
    rng = np.random.default_rng(3)
    shifts = np.linspace(-0.03, 0.03, 61)[:, None]
    a, b = (1 + 0.02 * rng.standard_normal((61, 12)) for _ in range(2))
    b = b * np.exp(shifts)
    look = look_at_mean(np.stack([a, b]), 0.05, 0.01, 12, is_fixed=is_fixed)
    other = look_at_mean(np.stack([b, a]), 0.05, 0.01, 12, is_fixed=is_fixed).mirrored()
    for name in ("estimate", "low", "high", "is_no_more", "is_no_less"):
        np.testing.assert_allclose(getattr(look, name), getattr(other, name), rtol=1e-9)
    assert 0 < look.is_no_less.sum() < 61


def forecast(estimate, spread, num_pairs, effect, error):
    """Return how many more pairs an answer takes, by normal quantiles: 80 % of plans have it then.

    Either the interval leaves out no difference, or it fits within what does not matter.
    """
    room, answers = math.log1p(effect) - estimate, []
    apart, alike = NormalDist().inv_cdf(1 - error / 2), NormalDist().inv_cdf(1 - error)
    if estimate > 0:
        answers.append((apart + 0.84162) * spread / estimate)
    if room > 0:
        is_near_none = estimate < math.log1p(effect) / 4
        answers.append((alike + (1.28155 if is_near_none else 0.84162)) * spread / room)
    least = min(answer**2 for answer in answers)
    return None if least > 100 * num_pairs else max(1, math.ceil(least) - num_pairs)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("spread", [0.004, 0.03, 0.06, 0.5])
@pytest.mark.parametrize("estimate", [0.0, 0.002, 0.003, 0.006, 0.0098, 0.012, 0.04])
def test_the_pairs_that_are_needed_are_those_of_the_answer_that_comes_first(estimate, spread, sign):
    num_pairs, effect = 40, 0.01
    normal = [NormalDist().inv_cdf((i + 0.5) / num_pairs) for i in range(num_pairs)]
    values = sign * (estimate + spread * np.array(normal))
    levels = levels_of(Plan((Metric("step", "ns"),), smallest_effect=effect, max_pairs=num_pairs))
    low, high = interval(walsh_averages(values), num_pairs, levels.fixed)
    seen = (high - low) / 2 / NormalDist().inv_cdf(1 - levels.fixed / 2) * math.sqrt(num_pairs)
    expected = forecast(estimate, seen, num_pairs, effect, levels.fixed)
    assert pairs_needed(values, levels) == expected


def test_equal_pairs_tell_nothing_of_how_many_are_needed():
    levels = levels_of(Plan((Metric("step", "ns"),), max_pairs=40))
    assert pairs_needed(np.full(40, 0.005), levels) is None
    assert pairs_needed(np.array([0.0, 0.01, 0.02]), levels) is None
