"""How long a slow spell may last, and how much of a load "met" then takes."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest

from kprof.analyze.sla.independence import Independent, Spells
from kprof.analyze.sla.percentiles import least_samples
from kprof.analyze.sla.targets import read_targets
from kprof.commands.sla import json_of, judge_responses
from kprof.errors import KprofError
from tests.commands.test_cli import kprof
from tests.commands.test_sla_command import AIPERF
from tests.quantities import quantities_in
from tests.responses import answer, judged, run_of, service, verdict


def steady(seconds, *, per_s=10, ttft_ms=50):
    """Return a run of equally fast answers, evenly sent for so long."""
    rows = [answer(ttft_ms, sent_ms=1000 * i / per_s) for i in range(int(seconds * per_s))]
    return service(*rows)


@pytest.mark.parametrize(("seconds", "expected"), [(90, "NOT PROVEN"), (101, "MET")])
def test_a_load_shorter_than_ten_spells_proves_nothing_met(seconds, expected):
    assert verdict("ttft_p50<=200ms", steady(seconds), spell_s=10) == expected
    assert verdict("requests>=2req/s", steady(seconds), spell_s=10) == expected


@pytest.mark.parametrize(
    ("target", "spells"),
    [("ttft_p95<=200ms", 90), ("attainment>=95%", 90), ("errors<=5%", 90), ("ttft_p90<=1s", 44)],
)
def test_a_share_is_met_by_as_many_spells_as_independent_samples_would_prove_it(target, spells):
    targets = [target, "ttft_p50<=200ms"]
    for length, expected in ((spells - 1, "NOT PROVEN"), (spells + 1, "MET")):
        (found, _) = judge_responses(
            [steady(length)], read_targets(targets), spell_s=1
        ).assessment.judgements
        assert found.verdict == expected


def quiet_share(kept, num_spells):
    """Return in how many loads of so many spells a service has no slow moment, as share of one.

    It keeps the limit for this share of the time. Its spells are the longest and come by chance,
    so the time to the next one is exponential: kept / (1 - kept) spells on average.
    """
    return kept * math.exp(-num_spells * (1 - kept) / kept)


@pytest.mark.parametrize("kept", ["0.9", "0.95", "0.99", "0.999"])
def test_no_rule_needs_a_tenth_less_of_a_load_without_more_than_1_percent_false_met(kept):
    # A load without a slow moment looks like that of a flawless service.
    least = least_samples(Fraction(kept))
    assert quiet_share(float(kept), least) <= 0.01 < quiet_share(float(kept), 0.9 * least)


def test_ten_spells_show_no_slow_moment_of_most_services_that_break_a_p95():
    assert quiet_share(0.95, 10) == pytest.approx(0.561, abs=0.001)


def test_a_rate_is_as_low_as_spells_that_stop_the_service_may_leave_it():
    found = judged("requests>=5req/s", steady(101), spell_s=10)
    assert found.low == pytest.approx(10 * 0.01 ** (1 / 10), rel=0.02)
    assert judged("requests>=5req/s", steady(101)).low > 9.9


def test_a_load_that_is_too_short_says_how_long_it_has_to_be():
    assert judged("ttft_p95<=200ms", steady(101), spell_s=10).load_s_needed == 900
    assert judged("ttft_p50<=200ms", steady(90), spell_s=10).load_s_needed == 100


@pytest.mark.parametrize(
    ("target", "least"),
    [("ttft_p50<=200ms", "100 s"), ("ttft_p95<=200ms", "900 s"), ("errors<=1%", "4,590 s")],
)
def test_the_reason_of_a_short_load_is_the_length_that_its_target_takes(target, least):
    assert f"it takes {least} at least" in judged(target, steady(50), spell_s=10).why


def test_a_miss_needs_no_spell():
    assert verdict("ttft_p95<=40ms", steady(30), spell_s=10) == "MISSED"


def test_an_hour_of_silence_adds_no_spell():
    rows = [*steady(9).rows, answer(50, sent_ms=3_600_000)]
    assert verdict("ttft_p50<=200ms", service(*rows), spell_s=10) == "NOT PROVEN"


def test_runs_at_the_same_time_saw_the_same_spells():
    halves = service(*steady(90).rows[::2]), service(*steady(90).rows[1::2])
    assert verdict("ttft_p50<=200ms", *halves, spell_s=10) == "NOT PROVEN"
    later = service(*(answer(50, sent_ms=200_000 + 100 * i) for i in range(900)))
    assert verdict("ttft_p50<=200ms", steady(90), later, spell_s=10) == "MET"


def test_where_the_times_of_sending_are_not_recorded_nothing_is_met():
    assert verdict("ttft_p50<=200ms", run_of([50] * 0, sent_ms=0), spell_s=0) == "NOT MEASURED"
    assert verdict("ttft_p50<=200ms", service(*[answer(50)] * 500), spell_s=0.1) == "NOT PROVEN"


def test_the_assumption_stands_in_the_verdict(capsys):
    found = judge_responses([steady(101)], read_targets(["ttft_p50<=200ms"]))
    told = json.loads(json_of(found))
    assert told["spell_s"] == 10
    assert quantities_in(told["targets"][0]["why"])[-1] == "10 s"


def test_a_short_load_ends_with_3_and_with_0_where_no_spell_is_assumed(capsys):
    words = ("sla", AIPERF, "--target", "ttft_p25<=5s")
    assert kprof(*words) == 3
    assert kprof(*words, "--spell", "0") == 0


@pytest.mark.parametrize("spell", ["-1", "nan", "inf"])
def test_a_spell_that_is_no_time_is_refused(spell, capsys):
    assert kprof("sla", AIPERF, "--target", "ttft_p25<=5s", "--spell", spell) == 2


def test_a_spell_that_is_no_time_is_refused_in_process():
    with pytest.raises(KprofError, match="not nan"):
        judge_responses([steady(9)], read_targets(["ttft_p50<=1s"]), spell_s=float("nan"))


@pytest.mark.parametrize(("load_s", "is_too_short"), [(99.9, True), (100.0, False)])
def test_ten_spells_are_long_enough(load_s, is_too_short):
    assert Spells(10.0, load_s, 9).is_too_short is is_too_short


def test_no_more_answers_count_than_spells():
    spells = Spells(10.0, 200.0, 20)
    assert spells.limit(Independent(20, "so it was")) == Independent(20, "so it was")
    assert spells.limit(Independent(21)).num == 20
    assert Spells(10.0, 5.0, 0).limit(Independent(3)).num == 1


def test_a_longer_spell_never_proves_more():
    rng = np.random.default_rng(3)
    run = run_of(rng.gamma(4, 10, 5000))
    order = {"MET": 0, "NOT PROVEN": 1}
    found = [verdict("ttft_p90<=90ms", run, spell_s=s) for s in (0, 0.1, 0.5, 1, 2, 5, 20)]
    assert [order[each] for each in found] == sorted(order[each] for each in found)
    assert found[0] == "MET"
    assert found[-1] == "NOT PROVEN"
