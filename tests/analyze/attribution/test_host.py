"""Host mode: the self time of operators, piece by piece."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kprof.analyze.attribution.attribute import add_attribution, add_host_activity
from kprof.analyze.attribution.ledger import balance
from tests.traces import trace_of


def pieces(*ranges):
    kernels = add_host_activity(trace_of(ranges=ranges)).kernels
    return list(zip(kernels["name"], kernels["start_ns"], kernels["duration_ns"], strict=True))


def test_an_operators_self_time_is_what_its_children_leave():
    assert pieces(
        {"name": "outer", "start_ns": 0, "duration_ns": 100},
        {"name": "inner", "start_ns": 30, "duration_ns": 20},
    ) == [("outer", 0, 30), ("inner", 30, 20), ("outer", 50, 50)]


def test_operators_of_two_threads_are_counted_apart():
    trace = trace_of(ranges=[{"thread": 1, "duration_ns": 100}, {"thread": 2, "duration_ns": 60}])
    ledger = balance(add_attribution(add_host_activity(trace)))
    assert (ledger.sum_ns, ledger.busy_ns, ledger.overlapped_ns) == (160, 100, 60)


def test_a_trace_with_device_rows_is_left_alone():
    trace = trace_of({}, ranges=[{}])
    assert add_host_activity(trace) is trace


def test_every_piece_is_attributed_to_its_operator():
    trace = add_attribution(add_host_activity(trace_of(ranges=[{"name": "aten::mm"}])))
    assert trace.kernels["op"].tolist() == ["aten::mm"]
    assert trace.kernels["bucket"].tolist() == ["attributed"]


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.integers(0, 300), st.integers(1, 2)),
        min_size=1,
        max_size=30,
    )
)
def test_pieces_of_a_thread_never_overlap_and_the_books_balance(intervals):
    ranges = [{"start_ns": s, "duration_ns": d, "thread": t} for s, d, t in intervals]
    trace = add_attribution(add_host_activity(trace_of(ranges=ranges)))
    by_thread = trace.kernels.sort_values(["stream", "start_ns"])
    ends = by_thread["start_ns"] + by_thread["duration_ns"]
    same = by_thread["stream"].diff() == 0
    assert (by_thread["start_ns"][same] >= ends.shift()[same]).all()
    assert len(trace.kernels) == 0 or balance(trace).balances
