"""Why the device was idle before an activity."""

from kprof.analyze.attribute import add_attribution
from kprof.analyze.idle import add_idle
from tests.traces import trace_of


def cause(*ranges, launched_at=900, call_ns=5):
    launch = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": 1}
    trace = trace_of(
        {"start_ns": 0, "duration_ns": 100},
        {"start_ns": 1000, "correlation": 1},
        ranges=[{**launch, "start_ns": launched_at, "duration_ns": call_ns}, *ranges],
    )
    kernels = add_idle(add_attribution(trace)).kernels
    assert kernels["gap_before_ns"][1] == 900
    return kernels["gap_cause"][1]


def test_a_kernel_launched_after_the_device_went_idle_was_late_on_the_host():
    assert cause() == "host"


def test_a_kernel_launched_while_the_device_was_busy_was_queued():
    assert cause(launched_at=50) == "queued"


def test_a_launch_whose_call_was_not_over_when_the_device_went_idle_was_late():
    assert cause(launched_at=50, call_ns=900) == "host"


def test_what_a_graph_launched_was_queued_once_its_first_kernel_ran():
    launch = {"kind": "runtime", "name": "cudaGraphLaunch", "correlation": 1, "duration_ns": 900}
    graph = [{"start_ns": start, "correlation": 1} for start in (100, 300)]
    kernels = add_idle(add_attribution(trace_of({"duration_ns": 20}, *graph, ranges=[launch])))
    assert kernels.kernels["gap_cause"].tolist()[1:] == ["host", "queued"]


def test_a_wait_for_the_device_caused_the_gap_that_begins_in_it():
    wait = {"kind": "runtime", "name": "cudaStreamSynchronize", "start_ns": 50, "duration_ns": 60}
    assert cause(wait) == "synchronization"
    assert cause({**wait, "duration_ns": 40}) == "host"
    assert cause({**wait, "rank": 1}) == "host"


def test_a_wait_long_before_the_launch_did_not_cause_the_gap():
    wait = {"kind": "runtime", "name": "cudaStreamSynchronize", "start_ns": 50, "duration_ns": 60}
    launch = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": 1, "duration_ns": 5}
    for launched_at, expected in ((400_000, "synchronization"), (9_000_000, "host")):
        trace = trace_of(
            {"start_ns": 0, "duration_ns": 100},
            {"start_ns": launched_at + 50, "correlation": 1},
            ranges=[{**launch, "start_ns": launched_at}, wait],
        )
        assert add_idle(add_attribution(trace)).kernels["gap_cause"][1] == expected


def test_data_loading_after_a_wait_caused_the_gap_that_it_covers():
    wait = {"kind": "runtime", "name": "cudaStreamSynchronize", "start_ns": 50, "duration_ns": 60}
    load = {"kind": "phase", "name": "data", "start_ns": 150, "duration_ns": 700}
    assert cause(wait, load) == "data"


def test_a_synchronization_that_covers_most_of_the_gap_caused_it():
    wait = {"kind": "runtime", "name": "cudaStreamSynchronize", "start_ns": 50, "duration_ns": 700}
    assert cause(wait) == "synchronization"


def test_a_short_synchronization_did_not_cause_a_long_gap():
    wait = {"kind": "runtime", "name": "cudaStreamSynchronize", "start_ns": 120, "duration_ns": 100}
    assert cause(wait) == "host"


def test_data_loading_that_covers_the_gap_caused_it():
    load = {"kind": "phase", "name": "data", "start_ns": 100, "duration_ns": 700, "thread": 1}
    assert cause(load) == "data"


def test_an_allocation_that_covers_the_gap_caused_it():
    call = {"kind": "runtime", "name": "cudaMalloc", "start_ns": 150, "duration_ns": 600}
    assert cause(call) == "allocation"


def test_the_gap_before_an_orphan_has_no_known_cause():
    trace = trace_of({"duration_ns": 100}, {"start_ns": 250})
    kernels = add_idle(add_attribution(trace)).kernels
    assert kernels["gap_before_ns"][1] == 150
    assert kernels["gap_cause"].isna().all()


def test_the_gap_before_the_first_activity_is_unknown():
    kernels = add_idle(add_attribution(trace_of({"stream": 7}))).kernels
    assert kernels["gap_before_ns"].isna().all()
