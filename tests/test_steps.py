"""Steps are found with the device time that belongs to them."""

from __future__ import annotations

from kprof.analyze.steps import Step, find_steps, median_step
from tests.traces import analyzed_trace_of


def test_a_step_lasts_on_the_device_until_its_last_activity_ends():
    trace = analyzed_trace_of(
        {"start_ns": 900, "duration_ns": 300, "step": 4},
        {"start_ns": 5000, "step": 5},
        ranges=[{"kind": "step", "name": "4", "start_ns": 10, "duration_ns": 1000}],
    )
    assert find_steps(trace) == [
        Step(number=4, rank=0, start_ns=10, duration_ns=1000, device_end_ns=1200)
    ]


def test_a_trace_without_step_ranges_has_no_steps():
    assert find_steps(analyzed_trace_of({"step": 1})) == []


def test_the_median_of_two_steps_is_the_shorter():
    trace = analyzed_trace_of(
        ranges=[
            {"kind": "step", "name": "0", "duration_ns": 30},
            {"kind": "step", "name": "1", "start_ns": 30, "duration_ns": 20},
        ]
    )
    assert median_step(find_steps(trace)).number == 1
