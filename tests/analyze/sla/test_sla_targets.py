"""Targets as text: what they mean, and what is said of those that mean nothing."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.sla.percentiles import least_samples
from kprof.analyze.sla.targets import (
    METRICS,
    PRESETS,
    TIME_NS,
    TargetError,
    parse_target,
    targets_of,
)


def test_a_limit_is_read_with_its_unit():
    expected = {
        "ttft_p95<=200ms": 200_000_000,
        "ttft_p95 <= 0.2 s": 200_000_000,
        "TTFT_P95<=1min": 60_000_000_000,
        "ttft_p95≤250µs": 250_000,
        "ttft_p95<=250us": 250_000,
        "ttft_p95<=1_500ns": 1_500,
        "ttft_p95<=2e3ms": 2_000_000_000,
    }
    assert {text: parse_target(text).limit for text in expected} == expected


def test_any_number_of_first_tokens_can_be_promised():
    target = parse_target("ttf64_p99<=100ms")
    assert (target.metric.name, target.num_tokens) == ("ttf", 64)


def test_any_percentile_can_be_promised_and_is_exact():
    assert parse_target("e2e_p99.9<=2s").quantile == Fraction(999, 1000)


def test_a_rate_may_be_per_gpu():
    assert parse_target("throughput>=2,000tok/s/gpu").is_per_gpu
    assert not parse_target("throughput>=2000tok/s").is_per_gpu


def test_a_rate_is_kept_per_second():
    assert parse_target("requests>=120req/min").limit == 2


def test_a_share_may_be_given_in_percent_or_of_one():
    assert parse_target("attainment>=99%").limit == parse_target("attainment>=0.99").limit == 0.99


def test_the_example_of_a_metric_is_a_target_of_it():
    metrics = METRICS.values()
    assert [one for one in metrics if parse_target(one.example).metric is not one] == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_holds_targets_and_says_where_they_are_from(name):
    assert targets_of(name)
    assert PRESETS[name].source


HINTS = {
    "tftt_p99<=1ms": "'ttft'",
    "ttft<=1ms": "ttft_p95<=200ms",
    "ttft_mean<=1ms": "ttft_p95<=200ms",
    "ttft_p100<=1ms": "ttft_p95<=200ms",
    "ttft_p99<1ms": "'ttft_p99<=1ms'",
    "ttft_p99>=1ms": "'ttft_p99<=1ms'",
    "step_p50<60": "'step_p50<=60ms'",
    "step_p50>=60": "'step_p50<=60ms'",
    "ttft>=1ms": "'ttft_p95<=200ms'",
    "ttft_p99<=100": "ttft_p95<=200ms",
    "ttft_p99<=0ms": "ttft_p95<=200ms",
    "ttf_p99<=1ms": "ttf64",
    "ttf0_p99<=1ms": "ttf64",
    "throughput>=10req/s": "throughput>=2000tok/s/gpu",
    "throughput_p50>=10tok/s": "throughput>=2000tok/s/gpu",
    "attainment>=101%": "attainment>=99%",
    "errors>=1%": "'errors<=1%'",
    "ttft_p95<=1e400ms": "ttft_p95<=200ms",
    "requests>=1e400req/s": "requests>=10req/s",
    f"ttft_p95<={'9' * 5000}ms": "ttft_p95<=200ms",
    "ttft_p99.99999999999999999999<=1ms": "p99.99999",
    "ttft_p0.00000000000000000001<=1ms": "p0.00001",
    f"ttft_p99.{'9' * 5000}<=1ms": "ttft_p95<=200ms",
    f"ttf{'9' * 5000}_p99<=1ms": "ttf64",
    "fast enough": "ttf64_p99<=100ms",
    "": "ttf64_p99<=100ms",
}


def refusal_of(text):
    with pytest.raises(TargetError) as refused:
        parse_target(text)
    return refused.value


def test_a_malformed_target_is_refused_with_a_valid_spelling():
    refusals = {text: refusal_of(text) for text in HINTS}
    assert [text for text, hint in HINTS.items() if hint not in str(refusals[text])] == []
    assert [text for text, refused in refusals.items() if "\n" in refused.problem] == []


def test_the_highest_percentile_that_is_taken_has_a_least_number_of_samples():
    assert least_samples(parse_target("ttft_p99.99999<=1ms").quantile) == 46_051_700


def test_an_unknown_metric_is_refused_with_the_list_of_metrics():
    with pytest.raises(TargetError, match=r"ttf64_p99<=100ms.*attainment>=99%"):
        parse_target("happiness_p99<=1ms")


@given(
    st.sampled_from([*METRICS, "ttf64"]),
    st.sampled_from(["", "_p50", "_p99"]),
    st.sampled_from(["<", ">", "<=", ">="]),
    st.sampled_from(["60", "60ms", "10tok/s", "10req/s", "1%"]),
)
def test_what_a_refused_target_is_to_be_written_as_is_a_target(name, statistic, relation, limit):
    try:
        parse_target(f"{name}{statistic}{relation}{limit}")
    except TargetError as error:
        for written in re.findall(r"write '([^']*)'", error.fix):
            parse_target(written)


@given(st.text(max_size=30))
def test_whatever_is_typed_is_a_target_or_one_clear_error(text):
    try:
        assert parse_target(text).limit >= 0
    except TargetError as error:
        assert error.fix


@given(
    st.sampled_from(sorted(TIME_NS)),
    st.sampled_from(sorted(TIME_NS)),
    st.integers(min_value=1, max_value=10**6),
)
def test_the_same_time_in_another_unit_is_the_same_limit(unit, other, number):
    same = Fraction(number) * TIME_NS[unit] / TIME_NS[other]
    if same.denominator == 1:
        first = parse_target(f"ttft_p50<={number}{unit}")
        assert first.limit == parse_target(f"ttft_p50<={same}{other}").limit
