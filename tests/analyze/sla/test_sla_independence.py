"""How many independent answers those of a service count as, whatever is promised of them."""

import numpy as np

from kprof.analyze.sla.evaluate import judge
from kprof.analyze.sla.independence import Marks, count_independent
from kprof.analyze.sla.samples import Sample
from kprof.analyze.sla.target_verdict import judge_times
from kprof.analyze.sla.targets import parse_target
from tests.responses import answer, failure, judged, run_of, service, verdict


def marks(*marked, size=1):
    """Return a run whose answers have so many marked values of so many each."""
    return Marks(np.array(marked, float), np.full(len(marked), float(size)))


def failing(places, num=3000):
    """Return a run of which the requests at these places fail."""
    lost = set(places)
    return service(*(failure(20 * i) if i in lost else answer(sent_ms=20 * i) for i in range(num)))


def with_limit(text, *runs):
    """Return the judgement on a target that counts answers within 100 ms."""
    return judge(runs, [parse_target("ttft_p50<=100ms"), parse_target(text)], None, 0)[1]


def windows(level, within=0.01, num=20, seed=0):
    """Return windows of 20 steps of 100 ms whose level differs by a share, and each step."""
    rng = np.random.default_rng(seed)
    levels = level * rng.standard_normal((num, 1))
    values = 1e8 * np.exp(levels + within * rng.standard_normal((num, 20)))
    return [Sample(run, run) for run in values]


def test_marks_that_come_evenly_count_in_full():
    assert count_independent([marks(*[0, 0, 0, 0, 1] * 100)]) == (500, "")


def test_marks_in_one_spell_count_as_few():
    found = count_independent([marks(*[0] * 400, *[1] * 100)])
    assert (found.num < 10, "clumps" in found.why_fewer) == (True, True)


def test_runs_that_differ_count_as_about_one_answer_each():
    often, seldom = marks(*[1, 1, 1, 0] * 75), marks(*[0, 0, 0, 1] * 75)
    found = count_independent([often, seldom, often, seldom])
    assert found.num <= 4
    assert found.why_fewer == "runs differ"


def test_runs_that_are_alike_count_in_full():
    alike = marks(*[0, 0, 0, 1] * 75)
    assert count_independent([alike] * 4) == (1200, "")


def test_a_run_of_few_answers_does_not_stand_for_a_long_one():
    long, few = marks(*[0, 1] * 500), marks(*[1] * 10)
    assert count_independent([long, few]).num < count_independent([long]).num / 20


def test_samples_too_short_for_blocks_are_compared_with_one_another():
    often, seldom = marks(*[1, 1, 1, 0] * 5), marks(*[0, 0, 0, 1] * 5)
    drifting = [often] * 10 + [seldom] * 10
    assert count_independent(drifting).num < count_independent([often, seldom] * 10).num < 400


def test_values_of_one_answer_count_as_one():
    found = count_independent([marks(*[0, 10] * 50, size=10)])
    assert (found.num, "one answer" in found.why_fewer) == (100, True)


def test_a_long_answer_outweighs_short_ones():
    sizes = np.array([1000.0] + [10.0] * 99)
    # As many as there are of 1000 values, in 1990.
    assert count_independent([Marks(np.zeros(100), sizes)]).num == 2


def test_failures_in_spells_prove_no_miss_that_single_ones_prove():
    singles = failing(range(0, 3000, 60))
    spells = failing([*range(500, 520), *range(1400, 1415), *range(2600, 2615)])
    assert verdict("errors<=1%", singles) == "MISSED"
    assert verdict("errors<=1%", spells) == "NOT PROVEN"


def test_a_short_spell_of_failures_proves_less_than_as_many_single_ones():
    assert verdict("errors<=1%", failing(range(0, 3000, 200))) == "MET"
    found = judged("errors<=1%", failing(range(1000, 1015)))
    assert found.verdict == "NOT PROVEN"
    assert found.num_independent < 500
    assert found.samples_needed > 3000


def test_attainment_is_not_missed_by_a_spell_where_it_is_by_as_many_single_answers():
    spread = run_of(([50] * 9 + [150]) * 50)
    spell = run_of([50] * 450 + [150] * 50)
    assert with_limit("attainment>=94%", spread).num_independent == 500
    assert with_limit("attainment>=95%", spread).verdict == "MISSED"
    assert with_limit("attainment>=95%", spell).verdict == "NOT PROVEN"


def test_attainment_weighs_slow_answers_within_the_limit_that_clump():
    # None breaks the limit, but the slowest 5 % are one spell.
    smooth = run_of([50 + i % 7 for i in range(475)] + [90] * 25)
    assert with_limit("attainment>=95%", smooth).num_independent < 100


def test_a_percentile_of_runs_that_differ_is_not_proven_by_many_answers():
    levels = [run_of([level + i % 3 for i in range(300)]) for level in (80, 90, 95)]
    found = judged("ttft_p50<=100ms", *levels)
    assert (found.verdict, found.why_fewer) == ("NOT PROVEN", "runs differ")
    assert judged("ttft_p50<=100ms", *[levels[0]] * 3).verdict == "MET"


def test_steps_in_windows_that_differ_are_not_taken_for_independent_ones():
    target = parse_target("step_p50<=99.99ms")
    found = [judge_times(target, windows(0.01, seed=seed)).verdict for seed in range(200)]
    assert found.count("MET") + found.count("MISSED") <= 8


def test_windows_that_do_not_differ_mostly_prove_what_holds():
    target = parse_target("step_p50<=100.3ms")
    found = [judge_times(target, windows(0.0, seed=seed)).verdict for seed in range(200)]
    assert found.count("MET") > 180


def test_gaps_of_answers_that_are_slow_in_spells_prove_no_miss():
    fast, slow = [20] * 20, [60] * 20
    rows = [
        answer(50, sent_ms=1000 * i, gaps_ms=slow if 500 <= i < 550 else fast) for i in range(2000)
    ]
    assert verdict("gap_p99<=50ms", service(*rows)) == "NOT PROVEN"


def test_marks_that_count_several_times_clump_as_much_as_if_they_count_once():
    rng = np.random.default_rng(2)
    sizes = rng.integers(1, 9, 600).astype(float)
    marked = sizes * np.repeat(rng.random(30) < 0.3, 20)
    once, often = (count_independent([Marks(n * marked, n * sizes)]) for n in (1, 8))
    assert once == often
    assert once.num < 100
