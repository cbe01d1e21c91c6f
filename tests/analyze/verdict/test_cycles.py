"""A difference that the GPU's clock makes."""

from kprof.analyze.verdict.plausibility import find_power_effect
from kprof.comparison import Metric, Pair, Plan

PLAN = Plan((Metric("step time", "ns"),), smallest_effect=0.01)


def pairs_with(*clocks):
    return [Pair((1.0,), (1.0,), True, 0, clocks_mhz=pair) for pair in clocks]


def test_a_lower_clock_under_b_is_said():
    found = find_power_effect(PLAN, pairs_with(*[(1900.0, 1710.0)] * 6))
    assert "10.0 % lower" in found


def test_clocks_closer_than_the_smallest_effect_explain_nothing():
    assert find_power_effect(PLAN, pairs_with(*[(1900.0, 1890.0)] * 6)) is None


def test_one_odd_reading_is_no_effect():
    assert find_power_effect(PLAN, pairs_with(*[(1900.0, 1900.0)] * 6, (1900.0, 400.0))) is None


def test_where_clocks_are_missing_nothing_is_said():
    assert find_power_effect(PLAN, pairs_with(*[(None, None)] * 6)) is None
    assert find_power_effect(PLAN, pairs_with((1900.0, 1000.0), *[(None, None)] * 6)) is None


def test_pairs_that_do_not_count_do_not_speak():
    bad = Pair((1.0,), (1.0,), True, 0, clocks_mhz=(1900.0, 900.0), problem="heat")
    assert find_power_effect(PLAN, [bad] * 6) is None
