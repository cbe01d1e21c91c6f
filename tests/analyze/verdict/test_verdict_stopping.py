"""When there are enough pairs, and what is claimed where fewer than planned were taken."""

from dataclasses import replace

import numpy as np
import pytest

from kprof.analyze.verdict import is_enough, judge
from kprof.analyze.verdict.judge import fewest_pairs
from kprof.comparison import Metric, Pair, Plan
from tests.analyze.verdict.verdict_pairs import (
    RATE,
    TIME,
    numbered,
    pairs_with,
    plan_of,
    verdict_of,
)
from tests.quantities import quantities_in


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


def test_a_run_cut_so_short_that_the_sequence_has_no_ends_says_so():
    claim = verdict_of(pairs_with(0.9, 7))
    assert (claim.verdict, claim.interval) == ("INCONCLUSIVE", None)
    assert quantities_in(claim.why) == ["7", "7", "40"]


def test_there_are_enough_pairs_for_a_loss_once_a_change_in_time_could_be_seen():
    plan, pairs = plan_of(), pairs_with(1.1)
    assert not is_enough(plan, pairs[:23])
    assert is_enough(plan, pairs[:24])
    assert verdict_of(pairs[:24]).verdict == "SLOWER"


@pytest.mark.parametrize(("ratio", "verdict"), [(0.9, "FASTER"), (1.0, "SAME")])
def test_there_are_enough_pairs_for_b_once_rare_stalls_could_be_seen(ratio, verdict):
    plan, pairs = plan_of(max_pairs=160), pairs_with(ratio, 160, spread=0.002)
    assert not is_enough(plan, pairs[:99])
    assert is_enough(plan, pairs[:100])
    assert verdict_of(pairs[:100], max_pairs=160).verdict == verdict


def test_windows_of_a_process_count_as_samples_of_b():
    pairs = [replace(pair, num_windows=5) for pair in pairs_with(0.9)]
    assert is_enough(plan_of(), pairs[:24])


def test_a_plan_without_early_stops_takes_all_its_pairs():
    plan, pairs = plan_of(stops_early=False), pairs_with(0.5)
    assert not is_enough(plan, pairs[:39])
    assert is_enough(plan, pairs)


def test_one_open_metric_keeps_the_others_going():
    pairs = [
        replace(p, a=(*p.a, w.a[0]), b=(*p.b, w.b[0]))
        for p, w in zip(pairs_with(2.0), pairs_with(1.005, spread=0.03, seed=1), strict=True)
    ]
    assert is_enough(plan_of(), pairs[:24])
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


def test_a_metric_that_gets_no_verdict_does_not_delay_the_others():
    plan = replace(plan_of(), metrics=(TIME, RATE))
    whole = [replace(pair, a=pair.a * 2, b=pair.b * 2) for pair in pairs_with(2.0)]
    spoilt = [replace(whole[0], b=(*whole[0].b[:1], float("nan"))), *whole[1:24]]
    assert is_enough(plan, spoilt)
    assert [claim.verdict for claim in judge(plan, spoilt)] == ["SLOWER", "INVALID"]


@pytest.mark.parametrize(
    ("num_metrics", "most", "fewest"), [(1, 160, 24), (1, 40, 24), (2, 20, 20)]
)
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
