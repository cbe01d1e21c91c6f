"""Launches without an activity tell what the profiler lost."""

import pytest

from kprof.analyze.attribution.attribute import add_attribution, add_host_activity
from kprof.analyze.attribution.ledger import Launches, count_launches
from tests.traces import trace_of


def calls(*names, rank=0, first=1):
    """Runtime calls one after another, with the correlation ids 1, 2, 3 and so on."""
    return [
        {"kind": "runtime", "name": name, "rank": rank, "start_ns": 10 * i, "correlation": i}
        for i, name in enumerate(names, start=first)
    ]


def counted(*correlations, ranges, rank=0):
    kernels = [{"correlation": each, "rank": rank} for each in correlations]
    return count_launches(add_attribution(add_host_activity(trace_of(*kernels, ranges=ranges))))


def launches(number):
    return calls(*["cudaLaunchKernel"] * number)


def test_launches_that_all_left_an_activity_lost_nothing():
    assert counted(1, 2, 3, ranges=launches(3)) == [Launches(0, 3, 0, 0, 0)]


def test_what_was_lost_is_counted_by_its_place_in_the_recording():
    found = counted(3, 5, 6, ranges=launches(9))
    assert found == [
        Launches(0, 9, lost_at_start=2, lost_in_between=1, lost_at_end=3),
    ]
    assert found[0].num_lost == 6


def test_launches_of_which_none_left_an_activity_are_all_lost():
    host = [{"kind": "op", "name": "aten::mm", "duration_ns": 500}]
    assert counted(ranges=[*host, *launches(3)]) == [Launches(0, 3, 3, 0, 0)]


def test_activities_that_do_not_tell_their_launch_tell_nothing_of_launches():
    assert counted(None, None, ranges=launches(3)) == []


def test_a_recording_without_calls_tells_nothing_of_launches():
    assert counted(1, 2, ranges=[]) == []


def test_every_rank_is_counted_apart():
    ranges = [*launches(2), *calls("cudaLaunchKernel", "cudaLaunchKernel", rank=1)]
    kernels = [{"correlation": 1, "rank": 0}, {"correlation": 2, "rank": 1}]
    found = count_launches(add_attribution(trace_of(*kernels, ranges=ranges)))
    assert found == [Launches(0, 2, 0, 0, 1), Launches(1, 2, 1, 0, 0)]


@pytest.mark.parametrize(
    "name",
    [
        *("cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaLaunchCooperativeKernel"),
        *("cudaGraphLaunch", "hipExtModuleLaunchKernel", "hipGraphLaunch"),
    ],
)
def test_a_launch_counts_under_all_its_names(name):
    assert counted(1, ranges=calls("cudaLaunchKernel", name))[0].lost_at_end == 1


@pytest.mark.parametrize(
    "name", ["cudaMemsetAsync", "cudaMemcpyAsync", "cudaLaunchHostFunc", "cudaStreamSynchronize"]
)
def test_calls_that_may_leave_no_activity_are_not_missed(name):
    assert counted(1, ranges=calls("cudaLaunchKernel", name))[0].num_lost == 0


def test_launches_into_a_captured_graph_run_nothing():
    begin, end = "cudaStreamBeginCapture", "cudaStreamEndCapture"
    ranges = calls("cudaLaunchKernel", begin, *["cudaLaunchKernel"] * 3, end, "cudaLaunchKernel")
    assert counted(1, 7, ranges=ranges) == [Launches(0, 2, 0, 0, 0)]


def test_a_launch_beside_a_capture_counts_as_what_it_is():
    begin, end = "cudaStreamBeginCapture", "cudaStreamEndCapture"
    ranges = calls(begin, "cudaLaunchKernel", "cudaLaunchKernel", end, "cudaLaunchKernel")
    assert counted(2, ranges=ranges) == [Launches(0, 2, 0, 0, 1)]


def test_a_capture_that_began_before_the_recording_is_known_by_its_end():
    ranges = calls("cudaLaunchKernel", "cudaStreamEndCapture", "cudaLaunchKernel")
    assert counted(3, ranges=ranges) == [Launches(0, 1, 0, 0, 0)]


def test_a_capture_that_goes_on_after_the_recording_is_known_by_its_begin():
    ranges = calls("cudaLaunchKernel", "cudaStreamBeginCapture", "cudaLaunchKernel")
    assert counted(1, ranges=ranges) == [Launches(0, 1, 0, 0, 0)]
