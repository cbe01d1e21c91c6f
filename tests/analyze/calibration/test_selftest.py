"""`kprof selftest --simulate`: the error rates of the very rule that judges, on known noise."""

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy.stats import binomtest
from scipy.stats import t as student_t

from kprof.analyze.calibration.error_rates import Rate, quantile, targets_of_simulation
from kprof.analyze.calibration.simulate import (
    NOISES,
    TOO_FEW,
    arms_of,
    drift,
    heavy,
    independent,
    random_order,
    rhythm,
    samples_of,
    shown,
    simulate,
    spikes,
    step,
    wander,
)
from kprof.analyze.calibration.tally import (
    Known,
    least_found,
    look_at_all,
    stops_of,
    tally,
    when_stopped,
    with_all_pairs,
)
from kprof.analyze.verdict import is_enough, judge, rule
from kprof.analyze.verdict.rule import levels_of, look_once
from kprof.comparison import Metric, Pair, Plan
from kprof.report.calibration import (
    badge_of,
    describe,
    most_false,
    result_of_calibration,
    sections_of_calibration,
)
from kprof.report.section import Table
from tests.commands.test_cli import kprof
from tests.quantities import quantities_in

NUMBER, DAY = 400, "2026-11-20"
PLAN = Plan((Metric("time", "ms"),))
BY_NAME = {noise.name: noise for noise in NOISES}


@pytest.fixture(scope="module")
def calibration():
    return simulate(NUMBER, 40, 0, DAY)


@pytest.fixture(scope="module")
def sixty():
    return simulate(60, 40, 0, DAY)


@pytest.fixture
def scenarios(sixty):
    return {scenario.name: scenario for scenario in sixty.scenarios}


def differences(name, effect, number=30, seed=1):
    """Return log ratios of simulated comparisons of one noise."""
    rng = np.random.default_rng(seed)
    made = BY_NAME[name].make((number, 80), rng)
    a, b = samples_of(made, random_order(number, 40, rng), effect, BY_NAME[name])
    return b - a


def known_of(effect, truth, found):
    """Return comparisons of these log ratios, in which A always takes 1."""
    orders = np.broadcast_to(np.arange(found.shape[1]) % 3 != 1, found.shape)
    return Known(effect, truth, np.zeros_like(found), found, orders)


def pairs_of(row):
    """Return one simulated comparison as pairs, its A always 1."""
    return [
        Pair((1.0,), (float(ratio),), is_a_first=number % 3 != 1, start_ns=number)
        for number, ratio in enumerate(np.exp(row))
    ]


def stopped(pairs):
    """Return the pairs up to where sampling would have ended."""
    return next(pairs[:n] for n in range(6, 41) if is_enough(PLAN, pairs[:n]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["independent", "all together", "heavy tails"])
@pytest.mark.parametrize("effect", [0.0, 0.01])
def test_what_is_calibrated_is_what_judges(name, effect):
    """Each comparison judged alone, pair by pair, comes out as it does among all at once."""
    found = differences(name, effect)
    none = known_of(0.0, 0.0, differences(name, 0.0, 2))
    known = [none, known_of(0.01, np.log1p(effect), found)]
    fixed, early = tally(known, levels_of(PLAN))
    alone = [judge(PLAN, pairs_of(row))[0].verdict for row in found]
    assert fixed.same_at["0.01"].count == alone.count("SAME")
    assert fixed.power["0.01"].count == alone.count("SLOWER")
    ended = [stopped(pairs_of(row)) for row in found]
    claims = [judge(PLAN, pairs)[0].verdict for pairs in ended]
    assert early.same_at["0.01"].count == claims.count("SAME")
    assert early.power["0.01"].count == claims.count("SLOWER")
    assert early.pairs["0.01"] == pytest.approx(np.mean([len(pairs) for pairs in ended]))


def test_what_is_stopped_early_leaves_the_rates_of_whole_plans_alone():
    found = known_of(0.0, 0.0, differences("spikes", 0.02, 60))
    levels = levels_of(PLAN)
    whole = with_all_pairs(found, levels)
    before = [flags.copy() for flags in vars(whole.verdict).values()]
    early = when_stopped(found, levels, whole)
    assert (early.stops < 40).any()
    for flags, kept in zip(vars(whole.verdict).values(), before, strict=True):
        np.testing.assert_array_equal(flags, kept)


def test_the_interval_at_the_stop_is_the_one_that_is_counted():
    made, truth = differences("spikes", 0.01, 60), float(np.log1p(0.01))
    at_stop = [judge(PLAN, stopped(pairs_of(row)))[0].interval for row in made]
    # A comparison that is refused has no interval.
    intervals = [interval for interval in at_stop if interval]
    found = made[[interval is not None for interval in at_stop]]
    none = known_of(0.0, 0.0, found[:1])
    _, early = tally([none, known_of(0.01, truth, found)], levels_of(PLAN))
    _, alone = tally([none], levels_of(PLAN))
    assert len(intervals) > 50
    covered = sum(interval.low <= 1.01 <= interval.high for interval in intervals)
    assert early.coverage.count - alone.coverage.count == covered


def test_a_claim_that_is_material_is_counted_where_there_is_no_difference():
    """Ratios of 1.015 that are called no difference: as many are material as `judge` says."""
    found = differences("heavy tails", 0.01) + np.log(1.005)
    fixed, early = tally([known_of(0.0, 0.0, found)], levels_of(PLAN))
    claims = [judge(PLAN, pairs_of(row))[0] for row in found]
    at_stop = [judge(PLAN, stopped(pairs_of(row)))[0] for row in found]
    assert 0 < sum(claim.is_material for claim in claims) < len(claims)
    assert fixed.false_material.count == sum(claim.is_material for claim in claims)
    assert early.false_material.count == sum(claim.is_material for claim in at_stop)


@pytest.mark.slow
def test_random_pairs_keep_to_their_error_under_every_noise(calibration):
    worst = max(s.fixed.false_positive.share for s in calibration.scenarios)
    # 4 % allowed: as many of 400 only once in a thousand, in any of nine noises.
    assert worst <= quantile(1 - 1e-4, NUMBER, 0.04)
    assert 0.93 <= result_of_calibration(calibration)["coverage"] <= 0.98


@pytest.mark.slow
def test_stopping_early_keeps_to_it_too_and_saves_pairs(calibration):
    for scenario in calibration.scenarios:
        assert scenario.early.false_positive.share <= quantile(1 - 1e-4, NUMBER, 0.05)
        assert scenario.early.coverage.share >= quantile(1e-4, 4 * NUMBER, 0.95)
        assert scenario.early.pairs["0.02"] <= 34


def test_the_same_seed_gives_the_same_rates_and_another_others():
    first, again, other = (simulate(4, 8, seed, DAY) for seed in (0, 0, 1))
    assert replace(again, took_s=0.0) == replace(first, took_s=0.0)
    assert other.scenarios != first.scenarios


def test_an_effect_is_that_of_b_whatever_the_order():
    quiet = np.zeros((1, 8))
    for order in (np.array([[True, False] * 2]), np.array([[False, True] * 2])):
        a, b = samples_of(quiet, order, 0.02, BY_NAME["independent"])
        np.testing.assert_allclose(b - a, np.log1p(0.02))


def test_a_coarse_clock_shows_whole_ticks():
    found = differences("coarse clock", 0.0, 3)
    assert len(np.unique(found.round(9))) < 0.9 * found.size


def test_a_rate_has_the_exact_binomial_interval():
    for count, of in ((0, 59), (3, 400), (400, 400)):
        exact = binomtest(count, of).proportion_ci(0.95, "exact")
        assert Rate(count, of).interval == pytest.approx((exact.low, exact.high))


def test_of_400_comparisons_27_may_be_false():
    assert quantile(0.95, 400, 0.05) == 27 / 400


def test_comparisons_judged_some_at_a_time_come_out_as_all_at_once(monkeypatch):
    found = differences("spikes", 0.0, 50)
    whole = look_once(found, levels_of(PLAN))
    monkeypatch.setattr("kprof.analyze.calibration.tally.MOST_AVERAGES", 7 * 820)
    for name, part in vars(look_at_all(found, levels_of(PLAN))).items():
        np.testing.assert_array_equal(part, getattr(whole, name))


def test_the_least_difference_found_is_found_in_four_of_five():
    found = differences("independent", 0.0, 500)
    levels = levels_of(PLAN)
    least = least_found(found, levels)
    fixed, _ = tally(
        [known_of(0.0, 0.0, found), known_of(0.004, 0.0, found + np.log1p(least))], levels
    )
    assert fixed.power["0.004"].count + fixed.same_at["0.004"].count >= 400
    assert 0.003 < least < 0.007


def test_the_result_has_the_worst_rates_on_top(sixty):
    result = result_of_calibration(sixty)
    rates = [s["fixed"]["false_positive"]["rate"] for s in result["scenarios"]]
    assert result["false_positive_rate"] == max(rates)
    assert result["power"].keys() == {"0.01", "0.02", "0.05"}
    assert result["power"]["0.02"] == min(
        s["fixed"]["power"]["0.02"]["rate"] for s in result["scenarios"]
    )
    assert result["wrong_direction"] == 0
    first = result["scenarios"][0]["fixed"]["false_positive"]
    assert first["low"] < first["rate"] < first["high"]


def test_every_table_stands_in_a_terminal_of_80_columns(sixty, capsys):
    from rich.console import Console

    from kprof.report.terminal import print_summary

    print_summary("self-test", sections_of_calibration(sixty), Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "whole", "field", "met", "missed"),
    [
        ("false positives", "fixed", "false_positive", 5, 6),
        ("false FASTER or SLOWER", "fixed", "false_verdict", 5, 6),
        ("false and material", "fixed", "false_material", 1, 2),
        ("coverage, least", "fixed", "coverage", 93, 92),
        ("coverage, most", "fixed", "coverage", 97, 98),
        ("wrong direction", "fixed", "wrong_direction", 0, 1),
        ("SAME where it is", "fixed", "same", 90, 89),
        ("false positives, stopping", "early", "false_positive", 5, 6),
        ("coverage, stopping", "early", "coverage", 95, 94),
    ],
)
def test_a_target_is_met_at_its_figure_and_missed_one_in_a_hundred_beyond(
    sixty, name, whole, field, met, missed
):
    def is_met(count):
        (scenario, *_) = sixty.scenarios
        judged = replace(getattr(scenario, whole), **{field: Rate(count, 100)})
        targets = targets_of_simulation([replace(scenario, **{whole: judged})], 0.01)
        (target,) = [one for one in targets if one.name == name]
        return target.is_met

    assert (is_met(met), is_met(missed)) == (True, False)


def test_targets_say_in_which_noise_they_are_worst(sixty):
    (table,) = [p for p in sections_of_calibration(sixty)[0].parts if isinstance(p, Table)]
    rows = {row[0]: row for row in table.rows}
    (saved,) = [row for name, row in rows.items() if name.startswith("pairs saved at 2 %")]
    assert saved[2] == "≥ 15 %"
    assert rows["power at 5 %"][3] == "yes"


def test_the_sentence_for_reports_has_rate_least_difference_and_date(sixty):
    sentence = describe(sixty)
    date, *numbers = re.findall(r"20\d\d-\d\d-\d\d|\d+(?:\.\d+)?(?: %)?", sentence)
    assert (date, numbers[0]) == ("2026-11-20", "60")
    assert f"{100 * sixty.least_found:.2f} %" in numbers


def test_the_rate_on_reports_is_that_of_the_worst_noise_however_few_its_comparisons(sixty):
    many, few = sixty.scenarios[:2]
    many = replace(many, fixed=replace(many.fixed, false_positive=Rate(20, 400)))
    few = replace(few, fixed=replace(few.fixed, false_positive=Rate(6, 100)))
    none = replace(few, fixed=replace(few.fixed, false_positive=Rate(0, 0)))
    found = replace(sixty, scenarios=(many, few, none))
    assert most_false(found) == Rate(6, 100)
    assert " ".join(quantities_in(describe(found))).find("100 6.0 %") > 0
    assert badge_of(found).items[0][1] == "6.0 %"


def test_the_command_prints_the_result_and_exits_with_whether_it_is_met(capsys):
    words = ("--simulate", "--json", "--comparisons", "50", "--seed", "3")
    code = kprof("selftest", *words)
    result = json.loads(capsys.readouterr().out)
    assert code == (0 if result["is_met"] else 1)
    assert (result["num_comparisons"], result["num_pairs"], result["seed"]) == (50, 40, 3)
    assert result["doubts"] == [asdict(TOO_FEW)]


@pytest.mark.slow
def test_two_thousand_comparisons_meet_every_target(capsys):
    assert kprof("selftest", "--simulate", "--quick", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_comparisons"] == 2_000
    assert result["doubts"] == []
    assert result["false_positive_rate"] <= 0.05
    assert [target["name"] for target in result["targets"] if not target["is_met"]] == []


@pytest.mark.slow
def test_a_rule_that_errs_too_often_is_found_out(monkeypatch, capsys):
    """All of the error to the last look, and twice as much: verdicts come too easily."""
    honest = rule.levels_of(PLAN)
    loose = replace(honest, fixed=0.10)
    monkeypatch.setattr("kprof.analyze.calibration.simulate.levels_of", lambda plan: loose)
    assert kprof("selftest", "--simulate", "--comparisons", "200") == 1
    assert "NO" in capsys.readouterr().out


def test_ten_pairs_have_not_the_power_of_forty(capsys):
    assert kprof("selftest", "--simulate", "--comparisons", "200", "--pairs", "10") == 1
    assert "NO" in capsys.readouterr().out


def drawn(part, num_samples=80):
    """Return 4,000 comparisons of one part of the noise."""
    return part((4_000, num_samples), np.random.default_rng(3))


def test_samples_scatter_by_07_percent_each_for_itself():
    noise = drawn(independent)
    assert noise.std() == pytest.approx(0.007, rel=0.02)
    assert np.corrcoef(noise[:, 0], noise[:, 1])[0, 1] == pytest.approx(0, abs=0.05)


def test_a_drift_is_a_straight_line_by_2_percent_either_way():
    noise = drawn(drift, 5)
    assert sorted(set(noise[:, -1])) == [-0.02, 0.02]
    np.testing.assert_allclose(noise, noise[:, -1:] * [0, 0.25, 0.5, 0.75, 1])


def test_a_wandering_machine_keeps_its_spread_and_98_percent_of_its_state():
    noise = drawn(wander)
    assert noise[:, 0].std() == pytest.approx(0.015, rel=0.05)
    assert noise[:, -1].std() == pytest.approx(0.015, rel=0.05)
    assert np.corrcoef(noise[:, 10], noise[:, 11])[0, 1] == pytest.approx(0.98, abs=0.005)
    assert np.corrcoef(noise[:, 10], noise[:, 40])[0, 1] == pytest.approx(0.98**30, abs=0.05)


def test_a_step_is_3_percent_from_some_sample_on():
    noise = drawn(step, 4)
    begins = {tuple(row) for row in noise.tolist()}
    assert begins == {tuple([0.0] * at + [0.03] * (4 - at)) for at in range(4)}


def test_one_sample_in_twenty_is_late_by_10_percent_on_average():
    noise = drawn(spikes)
    late = noise[noise > 0]
    assert late.size / noise.size == pytest.approx(0.05, rel=0.05)
    assert (late.mean(), late.std()) == pytest.approx((0.1, 0.1), rel=0.05)
    assert noise.min() == 0


def test_a_rhythm_delays_every_fourth_sample_from_any_of_four_on():
    noise = drawn(rhythm, 8)
    assert {tuple(row) for row in noise.tolist()} == {
        tuple(0.015 if i % 4 == phase else 0.0 for i in range(8)) for phase in range(4)
    }


def test_heavy_tails_are_those_of_students_t_of_2():
    noise = drawn(heavy)
    assert np.median(np.abs(noise)) == pytest.approx(0.005 * student_t(2).ppf(0.75), rel=0.02)


def test_a_coarse_clock_shows_whole_ticks_of_the_slowed_time():
    coarse = BY_NAME["coarse clock"]
    ticks = np.exp(shown(np.array([[0.0, 0.0011, 0.0013]]), 0.01, coarse)) / coarse.tick
    np.testing.assert_allclose(ticks, [[404, 404, 405]])


def test_b_is_the_slower_one_whichever_came_first():
    noise, quiet = np.zeros((2, 4)), BY_NAME["independent"]
    order = np.array([[True, False], [False, True]])
    a, b = samples_of(noise, order, 0.05, quiet)
    assert (a.tolist(), b.tolist()) == ([[0, 0]] * 2, [[np.log1p(0.05)] * 2] * 2)
    in_order = np.array([[1.0, 2.0, 3.0, 4.0]])
    a, b = arms_of(in_order, order[:1])
    assert (a.tolist(), b.tolist()) == ([[1, 4]], [[2, 3]])
    a, b = samples_of(in_order, order[:1], 0.0, quiet)
    assert (a.tolist(), b.tolist()) == ([[1, 4]], [[2, 3]])


def test_a_calibrated_comparison_stops_with_the_pair_at_which_it_would_stop_alone():
    """Also where the median pair is slower and rare stalls of A make the mean faster."""
    rng = np.random.default_rng(0)
    stalls = -0.8 * (rng.random((40, 40)) < 0.2)
    stalling = 0.02 + 0.002 * rng.standard_normal((40, 40)) + stalls
    alone = [len(stopped(pairs_of(row))) for row in stalling]
    assert min(alone) < max(alone)
    assert stops_of(known_of(0.01, 0.01, stalling), levels_of(PLAN)).tolist() == alone
