"""Of marks that overlap, those of one kind and one thread are the steps, and all go by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.attribution.steps import CROSSING_NS, find_steps, sort_out, time_steps
from kprof.analyze.capture_quality.audit import audit
from kprof.analyze.diff.alignment import find_differences
from kprof.analyze.findings.queries import count_steps
from kprof.trace import Trace
from tests.quantities import quantities_in
from tests.traces import measured, trace_of

MS = 1_000_000


def mark(number, start_ns, duration_ns=990_000, *, thread=1, of_torch=False, rank=0):
    """Return a step's mark: kprof's own, or one of torch's schedule."""
    name = f"ProfilerStep#{number}" if of_torch else str(number)
    times = {"start_ns": start_ns, "duration_ns": duration_ns}
    return {"kind": "step", "name": name, "thread": thread, "rank": rank, **times}


FOUR = [mark(i, i * MS) for i in range(4)]


def run_of(*marks) -> Trace:
    """Analyze a run whose host launches a kernel of 0.9 ms at the begin of every ms, four times."""
    kernels = [
        {"start_ns": i * MS + 20_000, "duration_ns": 900_000, "correlation": i} for i in range(4)
    ]
    calls = [
        {
            "kind": "runtime",
            "name": "cudaLaunchKernel",
            "start_ns": i * MS + 10_000,
            "duration_ns": 5,
        }
        | {"correlation": i}
        for i in range(4)
    ]
    return measured(trace_of(*kernels, ranges=[*calls, *marks]))


BESIDE = {
    "torch's own schedule": [mark(i + 1, i * MS + 960_000, of_torch=True) for i in range(4)],
    "the same marks inside": [mark(i, i * MS + 1_000, 980_000) for i in range(4)],
    "another thread's marks": [mark(i, i * MS, thread=2) for i in range(4)],
    "a mark around all of them": [mark(0, 0, 3_990_000)],
    "marks that cross them": [mark(i, i * MS + 500_000) for i in range(3)],
}


@pytest.mark.parametrize("more", BESIDE.values(), ids=BESIDE)
def test_marks_beside_the_steps_change_nothing(more):
    plain, marked = run_of(*FOUR), run_of(*FOUR, *more)
    assert find_steps(marked) == find_steps(plain)
    assert time_steps(marked) == time_steps(plain)
    assert marked.kernels["step"].tolist() == [0, 1, 2, 3]
    assert count_steps(marked) == 4
    assert find_differences(plain, marked).difference_ns == 0
    assert marked.idle.drop(columns="evidence_row").equals(plain.idle.drop(columns="evidence_row"))


def check(trace):
    return [one for one in audit(trace) if one.name == "Marks of steps"]


def test_marks_of_torch_beside_kprofs_own_are_known_to_be_no_steps():
    (found,) = check(run_of(*FOUR, *BESIDE["torch's own schedule"]))
    assert (found.verdict, quantities_in(found.evidence)) == ("good", ["4"])


@pytest.mark.parametrize("more", list(BESIDE.values())[1:], ids=list(BESIDE)[1:])
def test_where_nothing_sets_marks_apart_the_audit_says_so(more):
    (found,) = check(run_of(*FOUR, *more))
    assert (found.verdict, quantities_in(found.evidence)) == ("limited", [str(len(more))])


def test_marks_that_do_not_overlap_need_no_check():
    assert check(run_of(*FOUR)) == []


def test_where_kprof_marks_nothing_the_steps_of_torchs_schedule_are_the_steps():
    trace = run_of(*(mark(i + 3, i * MS, of_torch=True) for i in range(4)))
    assert [step.number for step in find_steps(trace)] == [3, 4, 5, 6]
    assert trace.kernels["step"].tolist() == [3, 4, 5, 6]


def test_each_rank_has_steps_of_its_own():
    trace = run_of(*FOUR, *(mark(i, i * MS + 300_000, rank=1) for i in range(4)))
    assert len(find_steps(trace)) == 8


def test_threads_that_take_turns_mark_steps_together():
    trace = run_of(*(mark(i, i * MS, thread=i % 2) for i in range(4)))
    assert [step.number for step in find_steps(trace)] == [0, 1, 2, 3]


def test_marks_that_cross_by_less_than_their_clock_tells_are_steps():
    trace = run_of(*(mark(i, i * MS, MS + CROSSING_NS) for i in range(4)))
    assert len(find_steps(trace)) == 4


MARKS = st.builds(
    mark,
    st.integers(0, 5),
    st.integers(0, 20).map(lambda n: n * 10_000),
    st.integers(0, 9).map(lambda n: n * 10_000),
    thread=st.integers(1, 2),
    of_torch=st.booleans(),
    rank=st.integers(0, 1),
)


@given(st.lists(MARKS, max_size=12))
def test_the_steps_of_a_rank_never_overlap_and_no_mark_is_lost(marks):
    ranges = trace_of(ranges=marks).ranges
    found = sort_out(ranges)
    for rank in (0, 1):
        mine = ranges.iloc[found.steps]
        mine = mine[mine["rank"] == rank]
        ends = (mine["start_ns"] + mine["duration_ns"]).to_numpy()
        assert (mine["start_ns"].to_numpy()[1:] >= ends[:-1]).all()
        assert len(mine) > 0 or rank not in ranges["rank"].tolist()
    parts = [*found.steps.tolist(), *found.of_torch.tolist(), *found.doubtful.tolist()]
    assert sorted(parts) == list(range(len(marks)))
