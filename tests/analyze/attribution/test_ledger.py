"""The ledger must balance to the nanosecond, on every trace."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kprof.analyze.attribution.attribute import add_attribution
from kprof.analyze.attribution.kinds import add_kind
from kprof.analyze.attribution.ledger import balance, truth_columns, union_ns
from kprof.analyze.idle.assign import add_idle
from kprof.trace import NOT_RECORDED
from tests.traces import trace_of

MOMENTS = st.integers(0, 10**9)
DURATIONS = st.integers(0, 10**6)
ACTIVITIES = st.lists(
    st.builds(
        lambda start, duration, stream, rank, correlation: {
            "start_ns": start,
            "duration_ns": duration,
            "stream": stream,
            "rank": rank,
            "correlation": correlation,
        },
        MOMENTS,
        DURATIONS,
        st.integers(0, 3),
        st.integers(0, 1),
        st.one_of(st.none(), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=40,
)
HOST_RANGES = st.lists(
    st.builds(
        lambda kind, start, duration, thread, rank, correlation: {
            "kind": kind,
            "name": "cudaGraphLaunch" if kind == "runtime" and start % 3 == 0 else "x",
            "start_ns": start,
            "duration_ns": duration,
            "thread": thread,
            "rank": rank,
            "correlation": correlation,
        },
        st.sampled_from(["op", "runtime", "range", "module", "step", "phase", "python"]),
        MOMENTS,
        DURATIONS,
        st.integers(1, 2),
        st.integers(0, 1),
        st.one_of(st.none(), st.integers(0, 20)),
    ),
    max_size=40,
)

# As many as find a wrong bucket, gap or column; each is a trace through several passes.
few = settings(max_examples=20)


def test_the_union_counts_overlapping_time_once():
    assert union_ns(np.array([0, 50, 300]), np.array([100, 120, 310])) == 130


def test_time_covered_by_an_earlier_long_activity_is_not_counted_again():
    assert union_ns(np.array([0, 10, 50]), np.array([100, 20, 60])) == 100


def test_idle_is_the_window_without_the_busy_time():
    trace = add_attribution(trace_of({"duration_ns": 100}, {"start_ns": 250}))
    ledger = balance(trace)
    assert (ledger.window_ns, ledger.busy_ns, ledger.idle_ns) == (350, 200, 150)


def test_an_activity_without_a_launch_record_is_an_orphan_and_unattributed():
    ledger = balance(add_attribution(trace_of({"correlation": 5, "duration_ns": 70})))
    assert (ledger.buckets, ledger.unattributed_ns) == ({"orphan": 70}, 70)


def test_activities_replayed_by_a_graph_have_a_bucket_of_their_own():
    launch = {"kind": "runtime", "name": "cudaGraphLaunch", "correlation": 1}
    trace = trace_of({"correlation": 1}, {"correlation": 1, "start_ns": 200}, ranges=[launch])
    ledger = balance(add_attribution(trace))
    assert (ledger.buckets, ledger.num_graph_activities) == ({"graph": 200}, 2)


def graphs_told(trace):
    truth = truth_columns(trace, balance(trace))
    return [truth[name] for name in ("graph_launches", "graph_kernels", "graph_sum_ns")]


def test_without_calls_of_the_host_the_launches_of_graphs_are_unknown():
    assert graphs_told(add_attribution(trace_of({"correlation": 1}))) == [None] * 3


def test_where_calls_were_recorded_and_none_launched_a_graph_there_is_none():
    launch = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": 1}
    trace = add_attribution(trace_of({"correlation": 1}, ranges=[launch]))
    assert graphs_told(trace) == [0, 0, 0]


def test_of_a_rank_without_calls_graphs_are_unknown_and_so_is_their_sum():
    launch = {"kind": "runtime", "name": "cudaGraphLaunch", "correlation": 1}
    trace = trace_of({"correlation": 1}, {"correlation": 1, "rank": 1}, ranges=[launch])
    assert graphs_told(add_attribution(trace)) == [None] * 3


def test_sums_without_a_timeline_stand_for_no_calls():
    sums = {"kind": "runtime", "name": "launches", "correlation": 1}
    trace = trace_of({"correlation": 1}, ranges=[sums], untimed="Only sums were recorded.")
    assert graphs_told(add_attribution(trace)) == [None] * 3


def test_a_kernel_that_starts_before_its_stream_is_free_is_a_same_stream_overlap():
    trace = trace_of({"duration_ns": 100}, {"start_ns": 90}, {"start_ns": 95, "stream": 8})
    assert balance(add_attribution(trace)).num_same_stream_overlaps == 1


def test_ranks_do_not_overlap_each_other():
    trace = trace_of({"rank": 0, "duration_ns": 100}, {"rank": 1, "duration_ns": 100})
    ledger = balance(add_attribution(trace))
    assert (ledger.overlapped_ns, ledger.window_ns) == (0, 200)


def test_a_gpu_is_idle_while_another_one_of_its_process_works():
    trace = trace_of({"duration_ns": 100}, {"start_ns": 100, "duration_ns": 100, "device": 1})
    ledger = balance(add_attribution(trace))
    assert (ledger.window_ns, ledger.busy_ns, ledger.idle_ns) == (400, 200, 200)


def test_gpus_of_one_process_do_not_overlap_each_other():
    ledger = balance(add_attribution(trace_of({}, {"device": 1})))
    assert (ledger.overlapped_ns, ledger.window_ns, ledger.idle_ns) == (0, 200, 0)


@few
@given(ACTIVITIES, HOST_RANGES)
def test_the_books_balance_whatever_was_recorded(activities, ranges):
    trace = add_attribution(trace_of(*activities, ranges=ranges))
    assert balance(trace).balances


@few
@given(ACTIVITIES, HOST_RANGES)
def test_the_gaps_before_activities_add_up_to_the_idle_time(activities, ranges):
    trace = add_idle(add_kind(add_attribution(trace_of(*activities, ranges=ranges))))
    assert trace.kernels["gap_before_ns"].sum() == balance(trace).idle_ns


@few
@given(ACTIVITIES)
def test_passes_leave_measured_columns_as_they_were(activities):
    measured = ["name", "start_ns", "duration_ns", "stream", "correlation"]
    before = trace_of(*activities)
    after = add_idle(add_kind(add_attribution(before)))
    assert after.kernels[measured].equals(before.kernels[measured])


def test_launches_that_left_no_activity_are_counted():
    calls = [
        {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": i, "start_ns": i}
        for i in range(3)
    ]
    trace = add_attribution(trace_of({"correlation": 1}, ranges=calls))
    assert balance(trace).num_lost == 2


def test_what_was_lost_is_unknown_where_no_launch_was_recorded():
    assert balance(add_attribution(trace_of({"correlation": 1}))).num_lost is None


def test_streams_are_not_counted_where_one_was_not_recorded():
    trace = add_attribution(trace_of({"stream": 7}, {"stream": NOT_RECORDED}))
    assert balance(trace).num_streams is None
