"""What recording cost, told by steps with and without it."""

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.report.result import result_of
from kprof.trace import Recording
from tests.traces import analyzed_trace_of, trace_of


def recording(**values):
    return Recording("a rule", 9, (5,), **{"step_clock": "device", **values})


def test_the_cost_compares_median_steps():
    trace = trace_of(
        {}, recording=recording(recorded_step_ns=(150, 90, 160), unrecorded_step_ns=(100, 90, 400))
    )
    cost = measure_cost(trace)
    assert (cost.recorded_ns, cost.unrecorded_ns, cost.slowdown) == (150, 100, 0.5)
    assert cost.difference == "50.0 % longer"


def cost_of(recorded_ns, unrecorded_ns):
    values = {"recorded_step_ns": recorded_ns, "unrecorded_step_ns": unrecorded_ns}
    return measure_cost(trace_of({}, recording=recording(**values)))


def test_steps_that_overlap_do_not_tell_what_recording_costs():
    # The middle half of the unrecorded steps reaches from 70 to 90, the medians are 10 apart.
    scattered = cost_of((80, 90, 92), (20, 70, 75, 80, 85, 90, 93))
    assert (scattered.spread_ns, scattered.slowdown > 0.05) == (20, True)
    assert not scattered.is_known
    assert not scattered.is_noticeable


def test_a_difference_beyond_the_spread_of_steps_is_known():
    apart = cost_of((110, 115, 120), (90, 95, 100, 105, 160))
    assert apart.spread_ns == 40
    assert not apart.is_known
    clear = cost_of((150, 155, 160), (90, 95, 100, 105, 160))
    assert clear.is_known
    assert clear.is_noticeable


def test_a_difference_that_is_unnoticeable_even_with_the_spread_is_known():
    assert cost_of((1000, 1010, 1020), (990, 1000, 1010)).is_known
    assert not cost_of((1000, 1010, 1020), (990, 1000, 1010)).is_noticeable
    assert not cost_of((1000, 1010, 1020), (970, 1000, 1030)).is_known


def test_recorded_steps_that_are_much_shorter_did_other_work():
    other = cost_of((10, 10, 10), (100, 100, 101))
    assert (other.is_of_like_steps, other.is_known) == (False, False)
    alike = cost_of((96, 96, 96), (100, 100, 100))
    assert (alike.is_of_like_steps, alike.is_known) == (True, True)


def test_a_single_step_may_be_any_of_its_kind():
    assert cost_of((829,), (380, 384, 390)).is_known
    assert not cost_of((395,), (370, 380, 390)).is_known


def test_one_step_of_each_kind_does_not_tell_how_much_steps_differ():
    assert cost_of((300,), (100,)).spread_ns is None
    assert not cost_of((300,), (100,)).is_known


def test_the_summary_has_an_overhead_only_where_it_is_known():
    def overhead_of(*unrecorded_ns):
        steps = recording(recorded_step_ns=(150,), unrecorded_step_ns=unrecorded_ns)
        trace = analyzed_trace_of({}, recording=steps)
        return result_of(trace, balance(trace))["recording"]["overhead"]

    assert overhead_of(100, 100) == 0.5
    assert overhead_of(100) is None


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
