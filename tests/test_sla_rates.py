"""Rates: from the steady state alone, per GPU, with bounds."""

from dataclasses import replace

import pytest

from kprof.analyze.sla.judge import judge
from kprof.analyze.sla.rates import find_window
from kprof.analyze.sla.targets import parse_target
from tests.responses import MS, answer, judged, run_of, service, verdict


def steady(num=400, tokens=10, every_ms=10):
    """Return requests at a constant pace, answered in 20 ms at once with so many tokens."""
    rows = (answer(20, sent_ms=every_ms * i, tokens=[tokens]) for i in range(num))
    return service(*rows)


def test_the_steady_state_begins_with_an_answer_and_ends_with_the_last_request():
    window = find_window(steady())
    assert (window.start_ns, window.end_ns) == (20 * MS, 3990 * MS)


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
    goodput = judge([service(*rows)], targets)[1]
    assert goodput.estimate == pytest.approx(75, rel=0.02)
    assert goodput.verdict == "MET"


def test_what_came_between_the_first_chunk_and_the_last_widens_the_bounds():
    exact = [answer(20, sent_ms=10 * i, gaps_ms=[10] * 9) for i in range(400)]
    blind = [
        replace(row, chunk_ns=row.chunk_ns[[0, -1]], num_chunks=10, tokens=None) for row in exact
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
