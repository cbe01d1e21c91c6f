"""Steps are found with the device time that belongs to them."""

from __future__ import annotations

from kprof.analyze.attribution.steps import Step, find_steps, median_step, time_steps
from kprof.trace import Recording
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


TWO_STEPS = [
    {"kind": "step", "name": "0", "duration_ns": 30},
    {"kind": "step", "name": "1", "start_ns": 30, "duration_ns": 20},
]


def test_on_a_device_a_step_takes_from_the_end_of_the_one_before_to_its_own():
    trace = analyzed_trace_of(
        {"step": 0, "start_ns": 10, "duration_ns": 190},
        {"step": 1, "start_ns": 200, "duration_ns": 150},
        ranges=TWO_STEPS,
    )
    assert time_steps(trace).recorded_ns == (200, 150)


def test_steps_are_timed_on_the_first_rank_that_has_any():
    ranks = [{**step, "rank": rank} for rank in (2, 5) for step in TWO_STEPS]
    assert len(time_steps(analyzed_trace_of({}, ranges=ranks)).recorded_ns) == 2


def test_on_the_host_a_step_takes_as_long_as_its_range():
    trace = analyzed_trace_of({"activity": "host", "duration_ns": 900}, ranges=TWO_STEPS)
    assert time_steps(trace).recorded_ns == (30, 20)


def test_what_the_recorder_timed_by_the_devices_clock_comes_first():
    recording = Recording("Training.", 9, (0,), "device", (77,), (70, 71))
    times = time_steps(analyzed_trace_of({"step": 0}, ranges=TWO_STEPS, recording=recording))
    assert (times.recorded_ns, times.unrecorded_ns) == ((77,), (70, 71))


def test_the_hosts_clock_does_not_time_the_steps_of_a_device():
    recording = Recording("Training.", 9, (0,), "host", (77,), (70, 71))
    times = time_steps(analyzed_trace_of({"step": 0}, ranges=TWO_STEPS, recording=recording))
    assert (times.recorded_ns, times.unrecorded_ns) == ((100, 0), ())
