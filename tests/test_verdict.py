"""Verdicts on pairs: what is claimed, when nothing may be, and when there are enough pairs."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kprof.analyze.verdict import is_enough, judge
from kprof.analyze.verdict.fewest import fewest_pairs
from kprof.analyze.verdict.rule import levels_of, look_once
from kprof.comparison import Metric, Pair, Plan

TIME, RATE, MEMORY = Metric("step", "ms"), Metric("rate", "1/s", "higher"), Metric("peak", "B")
MIRROR = {"FASTER": "SLOWER", "SLOWER": "FASTER"}


def plan_of(*metrics, **options):
    """Return a plan for these metrics, for time where there are none."""
    return Plan(metrics or (TIME,), **options)


def pair_of(a, b, number=0, problem=""):
    """Return a pair of one metric, or of several, in an order that looks random."""
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return Pair(a, b, is_a_first=number % 3 != 1, start_ns=number, problem=problem)


def pairs_with(ratio, num_pairs=40, spread=0.005, seed=0):
    """Return pairs in which B takes `ratio` of A's time, each sample with noise."""
    a, b = 10 * np.exp(np.random.default_rng(seed).normal(0, spread, (2, num_pairs)))
    values = zip(a.tolist(), (ratio * b).tolist(), strict=True)
    return [pair_of(x, y, number) for number, (x, y) in enumerate(values)]


def verdict_of(pairs, *metrics, **options):
    """Return the only claim about these pairs."""
    (claim,) = judge(plan_of(*metrics, **options), pairs)
    return claim


def test_a_tenth_less_time_is_faster_and_material():
    claim = verdict_of(pairs_with(0.9))
    assert (claim.verdict, claim.is_material, claim.num_pairs) == ("FASTER", True, 40)
    assert claim.interval.low < 0.9 < claim.interval.high < 0.99
    assert claim.interval.kind == "fixed"
    assert claim.p_value < 1e-6
    assert "lies beyond the 1 % that matters" in claim.why


def test_a_tenth_more_of_a_rate_is_faster_too_and_the_ratio_is_that_of_the_values():
    claim = verdict_of(pairs_with(1.1), RATE)
    assert claim.verdict == "FASTER"
    assert claim.interval.ratio == pytest.approx(1.1, rel=0.005)


def test_nothing_between_them_is_the_same():
    claim = verdict_of(pairs_with(1.0))
    assert claim.verdict == "SAME"
    assert claim.interval.low <= 1 <= claim.interval.high
    assert not claim.is_material


def test_a_difference_too_small_to_matter_is_the_same_and_is_said():
    claim = verdict_of(pairs_with(1.004, spread=0.001))
    assert claim.verdict == "SAME"
    assert claim.interval.low > 1
    assert claim.why == "0.44 % slower, less than the 1 % that matters."


def test_same_beside_an_interval_that_sticks_out_says_why():
    claims = [verdict_of(pairs_with(1.0045, spread=0.0068, seed=s)) for s in range(200)]
    stick_out = [c for c in claims if c.verdict == "SAME" and c.interval.high > 1.01]
    assert stick_out
    assert all("by a test at either end" in claim.why for claim in stick_out)


def test_a_difference_across_the_smallest_effect_is_slower_but_not_material():
    claim = verdict_of(pairs_with(1.01, spread=0.004))
    assert (claim.verdict, claim.is_material) == ("SLOWER", False)
    assert "a part of it lies within" in claim.why


def test_noise_too_large_for_either_answer_is_inconclusive():
    claim = verdict_of(pairs_with(1.0, spread=0.05))
    assert claim.verdict == "INCONCLUSIVE"
    assert claim.interval.low < 1 < claim.interval.high
    assert claim.pairs_needed > 40
    assert "holds both 1 and differences beyond" in claim.why


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


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        (float("nan"), "no finite number"),
        (float("inf"), "no finite number"),
        (0.0, "zero or negative"),
        (-1.0, "zero or negative"),
    ],
)
def test_a_value_that_is_none_makes_no_verdict(spoilt, words):
    pairs = pairs_with(0.5)
    pairs[7] = replace(pairs[7], b=(spoilt,))
    claim = verdict_of(pairs)
    assert (claim.verdict, claim.interval, claim.p_value) == ("INVALID", None, None)
    assert words in claim.why


def test_five_pairs_make_no_verdict_and_six_do():
    assert verdict_of(pairs_with(0.5, 5), max_pairs=5).verdict == "INVALID"
    assert "it takes 6" in verdict_of(pairs_with(0.5, 5), max_pairs=5).why
    assert verdict_of(pairs_with(0.5, 6), max_pairs=6).verdict == "FASTER"


def test_no_pairs_make_no_verdict():
    assert verdict_of([]).verdict == "INVALID"


def test_pairs_with_a_problem_do_not_count():
    pairs = pairs_with(1.0)
    spoilt = [
        replace(p, b=(99.0,), problem="throttled") if n < 5 else p for n, p in enumerate(pairs)
    ]
    claim = verdict_of(spoilt)
    assert (claim.verdict, claim.num_pairs) == ("SAME", 35)


def test_where_pairs_left_out_would_change_the_ratio_both_are_given():
    pairs = pairs_with(1.0)
    spoilt = [
        replace(p, b=(11.0,), problem="throttled") if n < 8 else p for n, p in enumerate(pairs)
    ]
    assert "With the 8 pairs left out, B over A is 1.0" in verdict_of(spoilt).why


def test_where_pairs_left_out_change_nothing_they_are_not_spoken_of():
    pairs = [
        replace(p, problem="throttled" if n < 3 else "") for n, p in enumerate(pairs_with(1.0))
    ]
    assert "left out" not in verdict_of(pairs).why


def test_more_than_a_fifth_left_out_makes_no_verdict():
    pairs = [
        replace(p, problem="throttled" if n < 9 else "") for n, p in enumerate(pairs_with(0.5))
    ]
    claim = verdict_of(pairs)
    assert claim.verdict == "INVALID"
    assert claim.why == "9 of 40 pairs are left out (throttled: 9)."


def test_pairs_that_are_always_in_one_order_make_no_verdict():
    pairs = [replace(pair, is_a_first=True) for pair in pairs_with(0.9)]
    claim = verdict_of(pairs)
    assert claim.verdict == "INVALID"
    assert "A came first in 40 of 40" in claim.why


def test_a_clock_that_stands_still_makes_no_verdict():
    claim = verdict_of([pair_of(1.0, 1.0, n) for n in range(40)])
    assert claim.verdict == "INVALID"
    assert "every value is 1 ms" in claim.why


def test_what_is_counted_may_well_be_the_same_every_time():
    claim = verdict_of([pair_of(1000.0, 800.0, n) for n in range(40)], MEMORY)
    assert (claim.verdict, claim.is_material) == ("FASTER", True)


def test_ticks_larger_than_the_effect_make_no_verdict_where_most_pairs_fall_into_one():
    """B is 1 % slower on a clock of 10 %: nine in ten of its samples read as A's do."""
    pairs = [pair_of(1.0, 1.1 if n % 10 == 0 else 1.0, n) for n in range(40)]
    claim = verdict_of(pairs)
    assert claim.verdict == "INVALID"
    assert "steps of 0.1 ms" in claim.why


def test_ticks_that_noise_evens_out_do_no_harm():
    pairs = [
        replace(p, a=(round(p.a[0] / 0.05) * 0.05,), b=(round(p.b[0] / 0.05) * 0.05,))
        for p in pairs_with(1.02, spread=0.01)
    ]
    assert verdict_of(pairs).verdict == "SLOWER"


def test_a_run_that_was_cut_short_is_judged_by_the_sequence():
    claim = verdict_of(pairs_with(0.9, 20))
    assert (claim.verdict, claim.interval.kind) == ("FASTER", "sequence")


def test_p_of_an_early_stop_is_that_of_the_sequence():
    """Nine clear pairs make the most of both stakes; 2 for two sides, 5 for its share of alpha."""
    odds = [2 / (1 + np.exp(-2 * bet * 1.5)) for bet in (0.6, 1.2)]
    capital = (odds[0] ** 9 + odds[1] ** 9) / 2
    claim = verdict_of(pairs_with(0.5, 9))
    assert claim.p_value == pytest.approx(5 * 2 / capital)
    assert 0.03 < claim.p_value < 0.05


def test_the_estimate_of_an_early_stop_never_lies_outside_its_interval():
    pairs = numbered([*pairs_with(0.9, 12, 0.001), *pairs_with(0.96, 9, 0.001)])
    claim = verdict_of(pairs)
    assert claim.verdict == "FASTER"
    assert claim.interval.high < 0.92
    assert claim.interval.low <= claim.interval.ratio <= claim.interval.high


def test_same_is_wrong_no_more_often_than_its_error_where_the_difference_just_matters():
    """Over all signs of ten sizes: four in a hundred are allowed, and nearly used."""
    levels = levels_of(plan_of(max_pairs=10))
    signs = np.array(list(product([-1, 1], repeat=10)))
    sizes = levels.margin * np.linspace(0.05, 0.3, 10) ** 1.1
    wrong = look_once(levels.margin + signs * sizes, levels).is_alike.mean()
    assert 0.03 < wrong <= 0.04


def test_a_run_cut_so_short_that_the_sequence_has_no_ends_says_so():
    claim = verdict_of(pairs_with(0.9, 7))
    assert (claim.verdict, claim.interval) == ("INCONCLUSIVE", None)
    assert "7 of the 40 pairs planned were taken" in claim.why


def numbered(pairs):
    """Return the pairs one after the other in time."""
    return [replace(pair, start_ns=number) for number, pair in enumerate(pairs)]


def test_a_ratio_that_is_another_in_the_second_half_makes_no_verdict():
    pairs = numbered([*pairs_with(0.97, 20, 0.002), *pairs_with(1.0, 20, 0.002)])
    claim = verdict_of(pairs)
    assert claim.verdict == "INVALID"
    assert (
        claim.why == "B over A was 0.9705 in the first half of the pairs and 1.0005 in the second."
    )


def test_halves_apart_by_less_than_what_matters_do_no_harm():
    pairs = numbered([*pairs_with(0.97, 20, 0.001), *pairs_with(0.976, 20, 0.001)])
    assert verdict_of(pairs).verdict == "FASTER"


def test_noise_that_grows_is_no_change_of_the_ratio():
    pairs = numbered([*pairs_with(0.97, 20, 0.001), *pairs_with(0.97, 20, 0.02)])
    assert verdict_of(pairs).verdict == "FASTER"


def test_a_sequence_that_has_left_out_every_ratio_makes_no_verdict():
    pairs = [*pairs_with(0.8, 12, 0.002), *pairs_with(1.2, 60, 0.002)]
    claim = verdict_of(numbered(pairs), max_pairs=80)
    assert (claim.verdict, claim.interval) == ("INVALID", None)
    assert "it changed while" in claim.why


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


def test_a_claim_of_one_metric_that_cannot_be_judged_leaves_the_other():
    pairs = [replace(p, a=(*p.a, float("nan")), b=(*p.b, 1.0)) for p in pairs_with(0.9)]
    time, energy = judge(plan_of(TIME, Metric("energy", "J")), pairs)
    assert (time.verdict, energy.verdict) == ("FASTER", "INVALID")


def test_there_are_enough_pairs_once_the_verdict_stands():
    plan, pairs = plan_of(), pairs_with(0.9)
    assert not is_enough(plan, pairs[:8])
    assert is_enough(plan, pairs[:9])
    assert verdict_of(pairs[:9]).verdict == "FASTER"


def test_being_the_same_can_be_enough_too():
    pairs = pairs_with(1.0, spread=0.001)
    assert is_enough(plan_of(), pairs[:14])
    assert verdict_of(pairs[:14]).verdict == "SAME"


def test_a_plan_without_early_stops_takes_all_its_pairs():
    plan, pairs = plan_of(stops_early=False), pairs_with(0.5)
    assert not is_enough(plan, pairs[:39])
    assert is_enough(plan, pairs)


def test_one_open_metric_keeps_the_others_going():
    pairs = [
        replace(p, a=(*p.a, w.a[0]), b=(*p.b, w.b[0]))
        for p, w in zip(pairs_with(0.5), pairs_with(1.005, spread=0.03, seed=1), strict=True)
    ]
    assert is_enough(plan_of(), pairs[:12])
    assert not is_enough(plan_of(TIME, RATE), pairs[:30])


def test_a_workload_that_ended_by_itself_is_judged_like_a_plan_of_that_length():
    plan, pairs = plan_of(max_pairs=160), pairs_with(1.0, spread=0.011)
    (open_,) = judge(plan, pairs)
    (ended,) = judge(plan, pairs, are_all=True)
    assert (open_.verdict, open_.interval.kind) == ("INCONCLUSIVE", "sequence")
    assert (ended.verdict, ended.interval.kind) == ("SAME", "fixed")
    assert ended == judge(plan_of(), pairs)[0]


def test_a_value_that_is_none_is_no_reason_to_stop():
    pairs = [replace(pair, a=(float("nan"),)) for pair in pairs_with(0.5)]
    assert not is_enough(plan_of(), pairs[:20])


def test_nobody_waits_for_a_metric_that_gets_no_verdict_any_more():
    plan = replace(plan_of(), metrics=(TIME, RATE))
    whole = [replace(pair, a=pair.a * 2, b=pair.b * 2) for pair in pairs_with(0.5)]
    spoilt = [replace(whole[0], b=(*whole[0].b[:1], float("nan"))), *whole[1:20]]
    assert is_enough(plan, spoilt)
    assert [claim.verdict for claim in judge(plan, spoilt)] == ["FASTER", "INVALID"]


RATIOS = st.lists(st.floats(0.8, 1.25), min_size=6, max_size=30)


def paired(ratios):
    """Return pairs of these ratios, with samples of A that drift."""
    return [pair_of(1.0 + n / 100, (1.0 + n / 100) * r, n) for n, r in enumerate(ratios)]


@settings(max_examples=60)
@given(RATIOS, st.sampled_from([0, 10]))
def test_swapping_a_and_b_mirrors_the_verdict(ratios, more):
    plan = plan_of(max_pairs=len(ratios) + more)
    pairs = paired(ratios)
    (claim,) = judge(plan, pairs)
    (mirrored,) = judge(plan, [replace(p, a=p.b, b=p.a) for p in pairs])
    assert mirrored.verdict == MIRROR.get(claim.verdict, claim.verdict)
    assert mirrored.is_material == claim.is_material
    if claim.interval:
        assert mirrored.interval.low == pytest.approx(1 / claim.interval.high)
        assert mirrored.interval.ratio == pytest.approx(1 / claim.interval.ratio)
    else:
        assert mirrored.interval is None


@settings(max_examples=40)
@given(RATIOS, st.sampled_from([2.0**-20, 0.5, 1024.0]))
def test_the_unit_of_the_values_changes_nothing(ratios, factor):
    plan, pairs = plan_of(max_pairs=len(ratios)), paired(ratios)
    scaled = [replace(p, a=(p.a[0] * factor,), b=(p.b[0] * factor,)) for p in pairs]
    (claim,), (other,) = judge(plan, pairs), judge(plan, scaled)
    assert other.verdict == claim.verdict
    assume(claim.interval is not None)
    assert other.interval.low == pytest.approx(claim.interval.low, rel=1e-12)


@settings(max_examples=40)
@given(RATIOS, st.randoms(use_true_random=False))
def test_with_all_pairs_in_their_order_changes_nothing(ratios, random):
    plan, pairs = plan_of(max_pairs=len(ratios)), paired(ratios)
    shuffled = random.sample(pairs, len(pairs))
    assert judge(plan, shuffled) == judge(plan, pairs)


@settings(max_examples=60)
@given(RATIOS, st.sampled_from([0, 15]))
def test_a_verdict_never_contradicts_the_interval_beside_it(ratios, more):
    (claim,) = judge(plan_of(max_pairs=len(ratios) + more), paired(ratios))
    assume(claim.interval is not None)
    low, high = claim.interval.low, claim.interval.high
    assert low <= claim.interval.ratio <= high
    assert claim.verdict != "FASTER" or high < 1
    assert claim.verdict != "SLOWER" or low > 1
    assert claim.verdict != "INCONCLUSIVE" or low <= 1 <= high
    assert claim.verdict != "SAME" or 1 / 1.01 < claim.interval.ratio < 1.01
    assert (claim.p_value <= 0.05) == (low > 1 or high < 1)


@pytest.mark.parametrize(("num_metrics", "most", "fewest"), [(1, 160, 11), (1, 40, 9), (2, 40, 10)])
def test_the_clearest_difference_is_decided_at_the_fewest_pairs_and_not_before(
    num_metrics, most, fewest
):
    metrics = tuple(Metric(f"metric {i}", "ns") for i in range(num_metrics))
    asked = Plan(metrics, max_pairs=most)
    assert fewest_pairs(asked) == fewest
    pairs = [
        Pair((1e6 + i,) * num_metrics, (2e6 + 3 * i,) * num_metrics, i % 2 == 0, i)
        for i in range(fewest)
    ]
    assert is_enough(asked, pairs)
    assert not is_enough(asked, pairs[:-1])


def test_a_plan_without_early_stopping_takes_all_its_pairs():
    assert fewest_pairs(Plan((TIME,), max_pairs=40, stops_early=False)) == 40
