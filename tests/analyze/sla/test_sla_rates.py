"""Rates: from the steady state alone, per GPU, with bounds."""

from dataclasses import replace

import numpy as np
import pytest

from kprof.analyze.sla.evaluate import judge
from kprof.analyze.sla.rates import find_window, reach_of
from kprof.analyze.sla.targets import parse_target
from tests.quantities import quantities_in
from tests.responses import MS, answer, judged, run_of, service, verdict


def steady(num=400, tokens=10, every_ms=10):
    """Return requests at a constant pace, answered in 20 ms at once with so many tokens."""
    rows = (answer(20, sent_ms=every_ms * i, tokens=[tokens]) for i in range(num))
    return service(*rows)


def test_the_steady_state_begins_with_an_answer_and_ends_with_the_last_request():
    window = find_window(steady())
    assert (window.start_ns, window.end_ns) == (20 * MS, 3990 * MS)


@pytest.mark.parametrize(
    ("last_ms", "slices"),
    [(119, None), (120, 5), (139, 5), (140, 6), (399, 18), (420, 20), (4000, 20)],
)
def test_the_steady_state_has_five_to_twenty_slices_of_the_median_answers_time(last_ms, slices):
    window = find_window(service(answer(20, sent_ms=0), answer(20, sent_ms=last_ms)))
    assert (window and window.num_slices) == slices


def test_a_windows_slices_are_equally_long():
    window = find_window(service(answer(20, sent_ms=0), answer(20, sent_ms=120)))
    assert (window.edges_ns / MS).tolist() == [20, 40, 60, 80, 100, 120]
    assert window.duration_s == 0.1


def test_a_burst_has_no_steady_state():
    burst = service(*(answer(20 + i, sent_ms=0) for i in range(100)))
    assert find_window(burst) is None
    assert verdict("requests>=1req/s", burst) == "NOT MEASURED"


def test_throughput_is_that_of_the_steady_state():
    assert judged("throughput>=900tok/s", steady()).estimate == pytest.approx(1000, rel=0.01)
    assert verdict("throughput>=900tok/s", steady()) == "MET"
    assert verdict("throughput>=1100tok/s", steady()) == "MISSED"


def test_a_rate_per_gpu_needs_their_number():
    assert verdict("throughput>=400tok/s/gpu", steady()) == "NOT MEASURED"
    assert verdict("throughput>=400tok/s/gpu", steady(), gpus=2) == "MET"
    assert verdict("throughput>=600tok/s/gpu", steady(), gpus=2) == "MISSED"


def test_a_rate_close_to_its_limit_is_not_proven():
    uneven = service(
        *(answer(20, sent_ms=10 * i, tokens=[1 + 18 * (i // 20 % 2)]) for i in range(400))
    )
    assert verdict("throughput>=990tok/s", uneven) == "NOT PROVEN"


def test_tokens_of_failed_requests_are_no_throughput():
    rows = steady().rows
    broken = [replace(row, outcome="failed") for row in rows]
    half = service(*(row if i % 2 else broken[i] for i, row in enumerate(rows)))
    assert judged("throughput>=1tok/s", half).estimate == pytest.approx(500, rel=0.02)
    assert judged("requests>=1req/s", half).estimate == pytest.approx(50, rel=0.02)


def test_throughput_without_token_counts_is_not_measured():
    blind = [replace(row, tokens=None, output_tokens=None) for row in steady().rows]
    assert verdict("throughput>=1tok/s", service(*blind)) == "NOT MEASURED"


def test_goodput_counts_answers_within_the_limits():
    rows = [answer(20 if i % 4 else 90, sent_ms=10 * i) for i in range(400)]
    targets = [parse_target("ttft_p50<=50ms"), parse_target("goodput>=70req/s")]
    goodput = judge([service(*rows)], targets, None, 0)[1]
    assert goodput.estimate == pytest.approx(75, rel=0.02)
    assert goodput.verdict == "MET"


def test_what_came_between_the_first_chunk_and_the_last_widens_the_bounds():
    exact = [answer(20, sent_ms=10 * i, gaps_ms=[10] * 9) for i in range(400)]
    blind = [
        replace(
            row, chunk_ns=row.chunk_ns[[0, -1]], num_chunks=10, has_every_chunk=False, tokens=None
        )
        for row in exact
    ]
    sure = judged("throughput>=1tok/s", service(*exact))
    unsure = judged("throughput>=1tok/s", service(*blind))
    assert unsure.low < sure.low
    assert unsure.high > sure.high
    assert unsure.estimate == pytest.approx(sure.estimate, rel=0.02)


def test_rates_of_runs_are_shown_apart():
    found = judged("requests>=1req/s", steady(), steady(every_ms=20))
    assert found.by_run == pytest.approx((100, 50), rel=0.02)


def test_a_request_rate_is_that_of_answers():
    assert judged("requests>=1req/s", run_of([20] * 300)).estimate == pytest.approx(50, rel=0.02)


def paced(*blocks):
    """Return requests answered in 20 ms, one every so many ms, 4 s long each pace."""
    paces = np.concatenate([np.full(round(4000 / each), each) for each in blocks])
    return service(*(answer(20, sent_ms=at) for at in np.cumsum(paces).tolist()))


def test_a_rate_that_alternates_is_surer_than_one_that_wanders_by_as_much():
    alternating = judged("requests>=70req/s", paced(*[10, 16] * 10))
    wandering = judged("requests>=70req/s", paced(*[10, 10, 10, 16, 16, 16] * 3))
    assert alternating.estimate == pytest.approx(wandering.estimate, rel=0.02)
    assert wandering.high - wandering.estimate > 2 * (alternating.high - alternating.estimate)
    assert (alternating.verdict, wandering.verdict) == ("MET", "NOT PROVEN")
    assert wandering.num_independent < 10


def test_a_rate_that_goes_one_way_all_along_has_no_bounds():
    run = paced(*range(10, 30))
    found = judged("requests>=10req/s", run)
    assert (found.verdict, found.low, found.high) == ("NOT PROVEN", None, None)
    assert ("one way" in found.why, quantities_in(found.why)) == (True, ["5"])


def test_a_rate_says_how_much_longer_would_prove_it():
    found = judged("requests>=80req/s", paced(*[10, 14, 12, 10, 16] * 4))
    assert found.verdict == "NOT PROVEN"
    assert quantities_in(found.why) == ["20", "16"]


def test_independent_slices_mostly_have_nearly_the_bounds_of_independent_ones():
    rows = np.random.default_rng(1).standard_normal((400, 20))
    plain = 2.539 * rows.std(axis=1, ddof=1) / np.sqrt(20)
    reaches = np.array([reach_of([row]).reach for row in rows])
    assert 1 <= np.median(reaches / plain) < 1.5


def test_slices_that_wander_for_a_third_of_the_run_seldom_prove_what_is_not_so():
    rng, state, columns = (
        np.random.default_rng(2),
        np.random.default_rng(3).standard_normal(400),
        [],
    )
    for _ in range(20):
        columns.append(state)
        state = np.exp(-3 / 20) * state + np.sqrt(1 - np.exp(-6 / 20)) * rng.standard_normal(400)
    rows = np.array(columns).T
    plain = 2.539 * rows.std(axis=1, ddof=1) / np.sqrt(20)
    reaches = np.array([reach_of([row]).reach for row in rows])
    assert (np.abs(rows.mean(axis=1)) > plain).mean() > 0.4
    assert (np.abs(rows.mean(axis=1)) > reaches).mean() < 0.06


def test_runs_at_different_rates_are_not_as_sure_as_their_slices():
    alike = judged("requests>=60req/s", steady(), steady(), steady())
    apart = judged("requests>=60req/s", *(steady(every_ms=each) for each in (10, 12, 16)))
    assert (alike.verdict, apart.verdict) == ("MET", "NOT PROVEN")
    assert (apart.num_independent, apart.why_fewer) == (3, "runs differ")


def test_only_of_a_limit_below_the_measured_rate_a_longer_load_is_said_to_prove_it():
    run = paced(*[10, 14, 12, 10, 16] * 4)
    for limit, times in ((60, None), (70, "1.1"), (80, "16"), (90, None), (200, None)):
        found = judged(f"requests>={limit}req/s", run)
        # The number of slices is the last where nothing more is said.
        assert quantities_in(found.why)[-1] == (times or "20")
