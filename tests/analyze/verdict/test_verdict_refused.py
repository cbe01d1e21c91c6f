"""Pairs about which nothing may be claimed, and pairs that do not count."""

from dataclasses import replace

import numpy as np
import pytest

from kprof.analyze.verdict import judge
from kprof.analyze.verdict.constancy import find_carry_over, find_waves, say_warm_up
from kprof.analyze.verdict.refusal import tick_below_jitter
from kprof.comparison import Metric, Pair
from tests.analyze.verdict.verdict_pairs import (
    MEMORY,
    TIME,
    numbered,
    pair_of,
    pairs_with,
    plan_of,
    verdict_of,
)
from tests.quantities import quantities_in


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
    why = verdict_of(pairs_with(0.5, 5), max_pairs=5).why
    assert quantities_in(why) == ["5", "6"]
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
    claim = verdict_of(spoilt)
    with_all, without = map(float, quantities_in(claim.why.split("8 pairs")[1]))
    # B took ten times as long in those.
    assert with_all > without == round(claim.interval.ratio, 4)


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
    assert quantities_in(claim.why) == ["9", "40", "9"]
    assert "throttled: 9" in claim.why


def test_pairs_that_are_always_in_one_order_make_no_verdict():
    pairs = [replace(pair, is_a_first=True) for pair in pairs_with(0.9)]
    claim = verdict_of(pairs)
    assert claim.verdict == "INVALID"
    assert ("first" in claim.why, quantities_in(claim.why)[:2]) == (True, ["40", "40"])


def test_a_clock_that_stands_still_makes_no_verdict():
    claim = verdict_of([pair_of(1.0, 1.0, n) for n in range(40)])
    assert claim.verdict == "INVALID"
    assert quantities_in(claim.why)[0] == "1 ms"


def test_what_is_counted_may_well_be_the_same_every_time():
    claim = verdict_of([pair_of(1000.0, 800.0, n) for n in range(40)], MEMORY)
    assert (claim.verdict, claim.is_material) == ("FASTER", True)


def test_ticks_larger_than_the_effect_make_no_verdict_where_most_pairs_fall_into_one():
    """B is 1 % slower on a clock of 10 %: nine in ten of its samples read as A's do."""
    pairs = [pair_of(1.0, 1.1 if n % 10 == 0 else 1.0, n) for n in range(40)]
    claim = verdict_of(pairs)
    assert claim.verdict == "INVALID"
    assert "0.1 ms" in quantities_in(claim.why)


@pytest.mark.parametrize(("tick", "is_refused"), [(0.02, True), (0.01, True), (0.0025, False)])
@pytest.mark.parametrize("seed", range(5))
def test_ticks_beyond_half_of_the_effect_make_no_verdict_however_pairs_scatter(
    tick, is_refused, seed
):
    draws = np.random.default_rng(seed).normal(0, max(tick / 2, 0.007), (40, 2))
    read = np.round(np.exp(draws) * [1, 1.0115] / tick) * tick
    claim = verdict_of([pair_of(a, b, n) for n, (a, b) in enumerate(read.tolist())])
    assert (claim.verdict == "INVALID") is is_refused
    assert is_refused is ("too coarse" in claim.why)


def test_ticks_that_noise_evens_out_do_no_harm():
    pairs = [
        replace(p, a=(round(p.a[0] / 0.04) * 0.04,), b=(round(p.b[0] / 0.04) * 0.04,))
        for p in pairs_with(1.02, spread=0.01)
    ]
    assert verdict_of(pairs).verdict == "SLOWER"


def test_a_ratio_that_is_another_in_the_second_half_makes_no_verdict():
    pairs = numbered([*pairs_with(0.97, 20, 0.002), *pairs_with(1.0, 20, 0.002)])
    claim = verdict_of(pairs)
    assert claim.verdict == "INVALID"
    assert quantities_in(claim.why) == ["0.9705", "20", "1.0005", "20"]
    assert "with time" in claim.why


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


def test_a_gain_that_becomes_a_loss_after_12_pairs_makes_no_verdict():
    pairs = numbered([*pairs_with(0.96, 12), *pairs_with(1.04, 28, seed=1)])
    assert verdict_of(pairs).verdict == "INVALID"


def test_a_b_that_warms_up_late_makes_no_verdict():
    pairs = numbered([*pairs_with(1.3, 14), *pairs_with(0.95, 26, seed=1)])
    assert verdict_of(pairs).verdict == "INVALID"


def test_a_sample_that_is_slower_after_b_makes_no_verdict():
    rng = np.random.default_rng(2)
    pairs, is_after_b = [], False
    for number in range(60):
        is_a_first, values = bool(rng.random() < 0.5), {}
        for arm in "AB" if is_a_first else "BA":
            values[arm] = 10 * np.exp(rng.normal(0, 0.003)) * (1.03 if is_after_b else 1)
            is_after_b = arm == "B"
        pairs.append(Pair((values["A"],), (values["B"],), is_a_first, number))
    claim = verdict_of(pairs, max_pairs=60)
    assert (claim.verdict, "after B takes" in claim.why) == ("INVALID", True)


@pytest.mark.parametrize("tick", [0.01, 0.02])
def test_a_clock_whose_ticks_have_jitter_makes_no_verdict(tick):
    rng = np.random.default_rng(4)
    draws = np.exp(rng.normal(0, tick, (40, 2))) * [1, 1.005]
    read = np.round(draws / tick) * tick + rng.normal(0, tick / 20, (40, 2))
    claim = verdict_of([pair_of(a, b, n) for n, (a, b) in enumerate(read.tolist())])
    assert (claim.verdict, "too coarse" in claim.why) == ("INVALID", True)


def exact_pairs_in_ns():
    """Return pairs of which the values alone show no ticks, B at 1.005 of A; medians of 1e7 ns."""
    return [
        replace(p, a=(1e6 * p.a[0],), b=(1e6 * p.b[0],)) for p in pairs_with(1.005, spread=0.00003)
    ]


@pytest.mark.parametrize(
    ("resolution_ns", "verdict"),
    [(None, "SAME"), (100.0, "SAME"), (49_000.0, "SAME"), (51_000.0, "INCONCLUSIVE")],
)
def test_a_clock_known_to_be_coarser_than_half_of_the_margin_decides_nothing(
    resolution_ns, verdict
):
    plan = plan_of(Metric("step", "ns"), smallest_effect=0.01)
    (claim,) = judge(plan, exact_pairs_in_ns(), resolution_ns=resolution_ns)
    assert claim.verdict == verdict


def test_the_resolution_of_a_clock_says_nothing_of_what_is_no_time():
    plan = plan_of(Metric("energy", "J"))
    (claim,) = judge(plan, exact_pairs_in_ns(), resolution_ns=1e6)
    assert claim.verdict == "SAME"


def test_a_workload_that_repeats_itself_to_a_ten_thousandth_has_no_ticks():
    assert verdict_of(pairs_with(1.05, spread=0.00003)).verdict == "SLOWER"
    assert verdict_of(pairs_with(1.0, spread=0.00003)).verdict == "SAME"


def test_two_states_of_a_machine_that_change_once_are_no_ticks():
    pairs = pairs_with(1.0, spread=0.0005)
    later = [replace(p, a=(1.02 * p.a[0],), b=(1.02 * p.b[0],)) for p in pairs[20:]]
    assert verdict_of([*pairs[:20], *later]).verdict == "SAME"


def test_a_claim_of_one_metric_that_cannot_be_judged_leaves_the_other():
    pairs = [replace(p, a=(*p.a, float("nan")), b=(*p.b, 1.0)) for p in pairs_with(0.9)]
    time, energy = judge(plan_of(TIME, Metric("energy", "J")), pairs)
    assert (time.verdict, energy.verdict) == ("FASTER", "INVALID")


def waves(length, num_pairs=80):
    """Return logs that go up and down by 2 %, each state of so many values."""
    return np.where(np.arange(num_pairs) // length % 2, 0.02, -0.02)


def test_a_b_that_goes_to_and_fro_between_states_makes_no_verdict():
    pairs = [
        replace(pair, b=(pair.b[0] * float(np.exp(away)),))
        for pair, away in zip(pairs_with(1.0, 80), waves(15), strict=True)
    ]
    assert verdict_of(pairs, max_pairs=80).verdict == "INVALID"


def test_states_that_a_and_b_share_do_no_harm():
    pairs = [
        replace(p, a=(p.a[0] * float(np.exp(w)),), b=(p.b[0] * float(np.exp(w)),))
        for p, w in zip(pairs_with(1.0, 80), waves(5), strict=True)
    ]
    assert verdict_of(pairs, max_pairs=80).verdict == "SAME"


def test_a_ratio_that_wanders_far_from_one_is_said_and_stays_a_verdict():
    pairs = [
        replace(pair, b=(pair.b[0] * float(np.exp(away)),))
        for pair, away in zip(pairs_with(0.8, 80), waves(7), strict=True)
    ]
    claim = verdict_of(pairs, max_pairs=80)
    assert (claim.verdict, "up and down" in claim.why) == ("FASTER", True)


def test_independent_pairs_are_rarely_alike_and_waves_are():
    rng = np.random.default_rng(5)
    equal = rng.normal(0, 0.01, (2_000, 40))
    assert find_waves(equal, 0.01).is_found.mean() <= 0.005
    assert find_waves(equal / 10 + waves(10, 40), 0.01).turns_verdict.all()


def test_faint_likeness_leaves_a_difference_alone_only_where_it_is_far_from_none():
    """Pairs of which neighbours are a little alike hold less than as many independent ones."""
    rng = np.random.default_rng(8)
    states = np.cumsum(rng.random((2_000, 40)) < 0.2, axis=1) % 2 * 0.05 - 0.025
    wandering = states + rng.normal(0, 0.01, states.shape)
    is_clear = np.abs(np.median(wandering, axis=-1)) >= 0.01
    is_kept = is_clear & ~find_waves(wandering, 0.01).turns_verdict
    assert is_kept.sum() <= 0.35 * is_clear.sum()
    equal = rng.normal(0, 0.01, (2_000, 40))
    for ratio in (0.0, 0.02):
        assert find_waves(equal + ratio, 0.01).turns_verdict.mean() <= 0.005


def processes(ratios, num_pairs=24):
    """Return log ratios of the windows of so many pairs of processes, with noise."""
    noise = np.random.default_rng(6).normal(0, 0.01, (num_pairs, len(ratios)))
    return np.log(ratios) + noise


def test_a_b_that_is_slow_in_the_first_windows_of_each_process_makes_no_verdict():
    assert "was 1.3" in say_warm_up(processes([1.3, 1.3, 1.3, 0.93, 0.93]), 0.01)


@pytest.mark.parametrize("ratios", [[0.9] * 5, [0.8, 0.85, 0.9, 0.9, 0.9], [1.0] * 5])
def test_windows_that_deserve_one_verdict_do_no_harm(ratios):
    assert say_warm_up(processes(ratios), 0.01) == ""


def test_few_processes_or_none_with_all_windows_say_nothing_of_a_warm_up():
    assert say_warm_up(processes([1.3, 0.93], 9), 0.01) == ""
    assert say_warm_up(np.array([]), 0.01) == ""


def test_the_size_of_what_is_carried_over_is_that_of_the_medians():
    # 21 first samples follow B and are 0.1 larger, 20 follow A; all vary by as much.
    after_b, after_a = 0.1 + np.linspace(-0.01, 0.01, 21), np.linspace(-0.01, 0.01, 20)
    larger = np.concatenate([after_b, after_a])
    follows_b, always = np.arange(41) < 21, np.ones(41, dtype=bool)
    found = find_carry_over(-larger, always, follows_b, always, margin=0.01)
    assert found.is_found
    assert found.size == pytest.approx(0.1)


def test_values_in_two_groups_of_equal_size_have_no_tick():
    values = np.array([[1.0, 1, 1, 2, 2, 2]] * 2) * 1e8
    assert tick_below_jitter(values, 1.5e6) == 0
