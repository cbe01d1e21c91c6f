"""The time that every share and every time per step of a trace refers to."""

from __future__ import annotations

from kprof.analyze.attribution.steps import Denominator, denominator, split_steps
from tests.traces import measured, trace_of


def step(number, start_ns, duration_ns, **more):
    times = {"start_ns": start_ns, "duration_ns": duration_ns}
    return {"kind": "step", "name": f"ProfilerStep#{number}", **times, **more}


def idle_ns(trace):
    split = split_steps(trace)
    return int(split["time_ns"][split["is_idle"].astype(bool)].sum())


def test_without_steps_it_is_the_window():
    trace = measured(trace_of({"start_ns": 40}, {"start_ns": 300}))
    assert denominator(trace) == Denominator(360, 1)


def test_a_step_lasts_from_the_hosts_entry_to_the_devices_end():
    trace = measured(trace_of({"start_ns": 400}, ranges=[step(0, 100, 350)]))
    assert denominator(trace) == Denominator(400, 1)
    assert idle_ns(trace) == 300


def test_a_step_that_ends_on_the_host_lasts_until_then():
    trace = measured(trace_of({"start_ns": 100}, ranges=[step(0, 100, 350)]))
    assert denominator(trace) == Denominator(350, 1)
    assert idle_ns(trace) == 250


def test_several_steps_share_the_time_from_the_first_to_the_last():
    trace = measured(
        trace_of({"start_ns": 50}, {"start_ns": 550}, ranges=[step(0, 0, 200), step(1, 500, 201)])
    )
    assert denominator(trace) == Denominator(701, 2)
    assert denominator(trace).step_ns == 351


def test_every_gpu_of_a_rank_has_the_steps_of_its_rank():
    kernels = {"start_ns": 50}, {"start_ns": 200, "device": 1}
    trace = measured(trace_of(*kernels, ranges=[step(0, 0, 400)]))
    assert denominator(trace) == Denominator(800, 2)
    assert idle_ns(trace) == 600


def test_the_mean_is_over_the_steps_of_all_ranks():
    kernels = {"start_ns": 0}, {"start_ns": 0, "rank": 1}
    trace = measured(trace_of(*kernels, ranges=[step(0, 0, 200), step(0, 0, 400, rank=1)]))
    assert denominator(trace) == Denominator(600, 2)


def test_operators_outside_the_steps_of_a_host_are_in_none():
    operators = (
        {"name": "before", "start_ns": 0, "duration_ns": 50},
        {"name": "inside", "start_ns": 150, "duration_ns": 30},
        {"name": "after", "start_ns": 900, "duration_ns": 40},
    )
    trace = measured(trace_of(ranges=[step(0, 100, 200), *operators]))
    assert trace.is_host_only
    assert denominator(trace) == Denominator(200, 1)
    assert idle_ns(trace) == 170
