"""The time that every share and every time per step of a trace refers to."""

from __future__ import annotations

from kprof.analyze.attribution.steps import IMBALANCE, Denominator, denominator, split_steps
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


def test_a_step_of_a_job_lasts_as_long_as_on_its_slowest_rank():
    kernels = {"start_ns": 0}, {"start_ns": 0, "rank": 1}
    trace = measured(trace_of(*kernels, ranges=[step(0, 0, 200), step(0, 0, 400, rank=1)]))
    assert denominator(trace) == Denominator(800, 2, imbalance_ns=200)
    split = split_steps(trace)
    assert split["time_ns"][split["part"] == IMBALANCE].tolist() == [200]
    assert split["time_ns"].sum() == 800


def test_of_ranks_with_other_numbers_of_steps_the_longest_mean_is_the_jobs():
    kernels = {"start_ns": 0}, {"start_ns": 0, "rank": 1}
    steps = [step(0, 0, 100), step(1, 100, 101), step(0, 0, 90, rank=1)]
    trace = measured(trace_of(*kernels, ranges=steps))
    # 100.5 ns a step, three times.
    assert denominator(trace) == Denominator(302, 3, imbalance_ns=302 - 201 - 100)


def test_without_steps_the_window_of_a_job_is_the_longest_of_its_ranks():
    kernels = {"start_ns": 0, "duration_ns": 50}, {"start_ns": 0, "duration_ns": 80, "rank": 1}
    assert denominator(measured(trace_of(*kernels))) == Denominator(160, 2, imbalance_ns=30)


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
