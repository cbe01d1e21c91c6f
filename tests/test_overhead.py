"""What recording cost, told by steps with and without it."""

from kprof.analyze.overhead import measure_cost
from kprof.trace import Recording
from tests.traces import trace_of


def recording(**values):
    return Recording("a rule", 9, (5,), **{"step_clock": "device", **values})


def test_the_cost_compares_median_steps():
    trace = trace_of(
        {}, recording=recording(recorded_step_ns=(150, 90, 160), unrecorded_step_ns=(100, 90, 400))
    )
    cost = measure_cost(trace)
    assert (cost.recorded_ns, cost.unrecorded_ns, cost.slowdown) == (150, 100, 0.5)
    assert cost.difference == "50.0 % longer"


def test_without_unrecorded_steps_the_cost_is_unknown():
    assert measure_cost(trace_of({}, recording=recording(recorded_step_ns=(150,)))) is None


def test_a_trace_of_another_recorder_has_no_known_cost():
    assert measure_cost(trace_of({})) is None


def test_a_share_of_a_slowed_step_is_larger_in_an_unrecorded_one():
    values = {"recorded_step_ns": (200,), "unrecorded_step_ns": (100,)}
    assert measure_cost(trace_of({}, recording=recording(**values))).without_recording(0.25) == 0.5


def test_the_hosts_clock_cannot_time_the_steps_of_a_device():
    values = {"recorded_step_ns": (200,), "unrecorded_step_ns": (100,), "step_clock": "host"}
    assert measure_cost(trace_of({}, recording=recording(**values))) is None
    assert measure_cost(trace_of({"activity": "host"}, recording=recording(**values))) is not None
