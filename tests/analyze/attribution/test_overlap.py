"""An instant at which several activities run belongs to the one that the step waits for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.attribution.overlap import allot_busy_time
from kprof.analyze.attribution.steps import Communication, measure_communication
from kprof.analyze.diff.alignment import find_differences
from kprof.analyze.groupings import split_window
from kprof.analyze.whatif.baseline import Baseline
from kprof.analyze.whatif.changes import Change, Target
from kprof.analyze.whatif.predict import predict
from kprof.report.result import result_of
from kprof.report.sections import time
from tests.traces import analyzed_trace_of

US = 1_000
ORDER = {"collective": 1, "copy": 2, "set": 3}


def beside(kind, other, start_ns=50):
    """Return what each of two activities of 100 ns gets; the second begins later by default."""
    trace = analyzed_trace_of({"kind": kind}, {"kind": other, "start_ns": start_ns, "stream": 9})
    return allot_busy_time(trace.kernels).tolist()


@pytest.mark.parametrize("kind", ["gemm", "norm", "other", None])
def test_computation_comes_before_a_collective_whichever_began_first(kind):
    assert beside("collective", kind) == [50, 100]
    assert beside(kind, "collective") == [100, 50]


@pytest.mark.parametrize(("before", "after"), [("collective", "copy"), ("copy", "set")])
def test_a_collective_comes_before_a_copy_and_a_copy_before_a_set(before, after):
    assert beside(after, before) == [50, 100]
    assert beside(before, after) == [100, 50]


def test_of_two_computations_the_instant_belongs_to_the_one_that_ends_last():
    assert beside("gemm", "norm") == [50, 100]
    assert beside("norm", "gemm") == [50, 100]


def test_of_two_that_end_together_the_kind_first_in_the_alphabet_gets_the_instant():
    assert beside("norm", "gemm", start_ns=0) == [0, 100]
    assert beside("gemm", "norm", start_ns=0) == [100, 0]


def test_an_activity_inside_another_of_its_class_gets_nothing():
    outer, inner = {"duration_ns": 100}, {"start_ns": 10, "duration_ns": 20, "stream": 9}
    assert allot_busy_time(analyzed_trace_of(inner, outer).kernels).tolist() == [0, 100]


def test_a_short_computation_inside_a_collective_keeps_its_time():
    trace = analyzed_trace_of(
        {"kind": "collective", "duration_ns": 100},
        {"kind": "gemm", "start_ns": 10, "duration_ns": 20, "stream": 9},
    )
    assert allot_busy_time(trace.kernels).tolist() == [80, 20]
    assert measure_communication(trace) == Communication(100, 20, 80)


def test_two_collectives_at_once_communicate_once():
    trace = analyzed_trace_of(
        {"kind": "collective"}, {"kind": "collective", "start_ns": 50, "stream": 9}
    )
    assert measure_communication(trace) == Communication(150, 0, 150)


def test_a_copy_beside_a_collective_hides_nothing():
    trace = analyzed_trace_of({"kind": "collective"}, {"kind": "copy", "stream": 9})
    assert measure_communication(trace) == Communication(100, 0, 100)


def test_without_a_timeline_hidden_and_exposed_communication_are_unknown():
    trace = analyzed_trace_of({"kind": "collective"}, untimed="only sums were recorded")
    assert measure_communication(trace) == Communication(100, None, None)


def hidden_collective():
    """Return a collective of 10 µs, beside GEMMs of 9.6 µs that begin after it."""
    products = [
        {"kind": "gemm", "name": "mm", "start_ns": 200 + 960 * i, "duration_ns": 960}
        for i in range(10)
    ]
    reduce = {"kind": "collective", "name": "nccl", "stream": 20, "duration_ns": 10 * US}
    return analyzed_trace_of(reduce, *products)


def test_report_and_json_show_total_hidden_and_exposed_communication():
    trace = hidden_collective()
    told = {"total_ns": 10_000, "hidden_ns": 9_600, "exposed_ns": 400}
    assert result_of(trace, balance(trace))["communication"] == told
    tables = [part for part in time.render(trace).parts if hasattr(part, "rows")]
    shown = [row for table in tables for row in table.rows if row[0] in ("total", "hidden")]
    assert [row[1] for row in shown] == ["100.0 %", "96.0 %"]


def test_diff_does_not_count_hidden_communication_as_time_of_the_step():
    alone = analyzed_trace_of({"kind": "gemm", "name": "mm", "duration_ns": 10 * US})
    rows = find_differences(alone, hidden_collective()).layouts["part"]
    assert {row.names[1]: row.b.step_ns for row in rows} == {("gemm",): 9_600, ("collective",): 400}


@pytest.mark.parametrize(
    ("target", "what", "step_ns"),
    [
        # Only what nothing else runs beside is saved.
        ("kind:collective", "removed", 9_600),
        ("kind:gemm", "removed", 10_000),
        ("kind:gemm", "faster", 10_000),
    ],
)
def test_amdahl_saves_the_union_and_not_the_sum_of_durations(target, what, step_ns):
    trace = hidden_collective()
    baseline = Baseline(trace, None, 1, 10 * US, 10 * US, 0)
    change = Change(what, Target(*target.split(":")), *((2.0,) if what == "faster" else ()))
    assert predict([change], baseline).amdahl_step_ns == step_ns


def test_amdahl_of_activities_one_after_another_is_exact():
    trace = analyzed_trace_of({"kind": "gemm", "duration_ns": 700}, {"start_ns": 700})
    baseline = Baseline(trace, None, 1, 800, 800, 0)
    removed = Change("removed", Target("kind", "gemm"))
    assert predict([removed], baseline).amdahl_step_ns == 100


ACTIVITY = st.fixed_dictionaries(
    {
        "start_ns": st.integers(0, 60),
        "duration_ns": st.integers(0, 30),
        "stream": st.integers(0, 3),
        "device": st.integers(0, 1),
        "kind": st.sampled_from(["gemm", "norm", "collective", "copy", "set", None]),
        "name": st.sampled_from(["a", "b"]),
    }
)
ACTIVITIES = st.lists(ACTIVITY, min_size=1, max_size=12)


def split(rows):
    """Return the window's split by kind, with the time by kernel."""
    trace = analyzed_trace_of(*rows)
    by_name = trace.kernels.assign(ns=allot_busy_time(trace.kernels)).groupby("name", observed=True)
    parts = split_window(trace).fillna("?")
    keys = zip(parts["part"], parts["is_idle"], strict=True)
    return dict(zip(keys, parts["time_ns"], strict=True)), by_name["ns"].sum().to_dict()


@given(ACTIVITIES)
def test_every_instant_belongs_to_the_first_class_and_there_to_what_ends_last(rows):
    trace = analyzed_trace_of(*rows)
    expected = {}
    for device in (0, 1):
        for instant in range(90):
            running = [
                (ORDER.get(row["kind"], 0), -(row["start_ns"] + row["duration_ns"]), row["kind"])
                for row in rows
                if row["device"] == device
                and row["start_ns"] <= instant < row["start_ns"] + row["duration_ns"]
            ]
            if running:
                owner = min(running, key=lambda one: (*one[:2], one[2] or "~"))[2]
                expected[owner] = expected.get(owner, 0) + 1
    found = trace.kernels.assign(ns=allot_busy_time(trace.kernels)).groupby("kind", dropna=False)
    sums = {(k if isinstance(k, str) else None): ns for k, ns in found["ns"].sum().items() if ns}
    assert sums == expected


@given(
    ACTIVITIES,
    st.randoms(use_true_random=False),
    st.sampled_from([1, 10, 10**6, 10**12]),
    st.integers(-(10**18), 10**18),
)
def test_order_streams_another_zero_of_the_clock_and_longer_times_change_no_share(
    rows, chance: random.Random, factor, shift_ns
):
    numbers = chance.sample(range(100), 4)
    other = [
        {
            **row,
            "stream": numbers[row["stream"]],
            "start_ns": row["start_ns"] * factor + shift_ns,
            "duration_ns": row["duration_ns"] * factor,
        }
        for row in rows
    ]
    chance.shuffle(other)
    scaled = [{name: ns * factor for name, ns in part.items()} for part in split(rows)]
    assert split(other) == tuple(scaled)
