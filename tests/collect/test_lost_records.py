"""A record whose times cannot be right is in no window, and its time is told."""

import pandas as pd
import pytest

from kprof.analyze.capture_quality.audit import audit
from kprof.collect.lost_records import launch_rows, without_lost_records
from tests.quantities import quantities_in
from tests.traces import measured, trace_of

S = 1_000_000_000


def launch(number, start_ns=0, thread=1):
    name = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": number}
    return {**name, "start_ns": start_ns, "duration_ns": 5, "thread": thread}


def starts_of(*kernels, ranges=()):
    return without_lost_records(trace_of(*kernels, ranges=ranges)).kernels["start_ns"].tolist()


SOUND = [{"correlation": n, "start_ns": 100 * S + n * 200} for n in range(1, 4)]
LAUNCHES = [launch(n, 100 * S + n * 200 - 50) for n in range(1, 4)]
RIGHT = [100 * S + n * 200 for n in range(1, 4)]


@pytest.mark.parametrize(
    "lost", [{"start_ns": 0}, {"start_ns": 0, "duration_ns": 0}, {"start_ns": 5}]
)
def test_an_activity_long_before_its_launch_is_lost(lost):
    ranges = *LAUNCHES, launch(9, 100 * S + 900)
    assert starts_of({**lost, "correlation": 9}, *SOUND, ranges=ranges) == RIGHT


def test_an_activity_at_time_zero_far_from_all_else_is_lost_without_a_launch_too():
    assert starts_of({"start_ns": 0}, *SOUND) == RIGHT


def test_an_activity_at_the_zero_of_its_trace_is_none_of_these():
    assert starts_of({"start_ns": 0}, {"start_ns": 150}, {"start_ns": 900}) == [0, 150, 900]


def test_an_operator_at_time_zero_is_left_out_and_a_call_of_a_capture_stays():
    ranges = {"name": "aten::lost"}, launch(9), *LAUNCHES
    found = without_lost_records(trace_of(*SOUND, ranges=ranges))
    assert found.ranges["kind"].tolist() == ["runtime"] * 4
    assert found.meta.counts == {"damaged_events": 1}


def test_an_activity_long_after_all_else_that_waited_for_nothing_is_misplaced():
    ranges = *LAUNCHES, launch(9, 100 * S + 900)
    assert starts_of(*SOUND, {"start_ns": 10**6 * S, "correlation": 9}, ranges=ranges) == RIGHT


def test_activities_that_wait_for_those_before_them_are_right():
    kernels = [{"correlation": n, "start_ns": n * 3 * S, "duration_ns": 3 * S} for n in range(4)]
    found = starts_of(*kernels, ranges=[launch(n, n) for n in range(4)])
    assert found == [0, 3 * S, 6 * S, 9 * S]


def test_two_recordings_far_apart_are_both_right():
    later = [{"correlation": n, "start_ns": 900 * S + n * 200} for n in range(11, 14)]
    ranges = *LAUNCHES, *(launch(n, 900 * S + n * 200 - 50) for n in range(11, 14))
    assert len(starts_of(*SOUND, *later, ranges=ranges)) == 6


def test_where_most_begin_before_their_launches_the_clock_is_off_and_no_record():
    ranges = [launch(n, 200 * S + n) for n in range(1, 4)]
    assert starts_of(*SOUND, ranges=ranges) == RIGHT


def test_an_activity_that_outlasts_others_of_its_stream_is_damaged():
    trace = trace_of(
        {"start_ns": 0, "duration_ns": 1_600_000, "name": "long", "correlation": 1},
        *({"start_ns": 200 * n, "correlation": n + 1} for n in range(1, 4)),
        ranges=[launch(n, 0) for n in range(1, 5)],
    )
    found = without_lost_records(trace)
    assert "long" not in found.kernels["name"].tolist()
    assert found.meta.counts == {"lost_ns": 1_600_000, "overrun_activities": 1}


def test_one_later_activity_is_enough():
    assert starts_of({"start_ns": 0, "duration_ns": 9_000}, {"start_ns": 200}) == [200]


@pytest.mark.parametrize(
    "other",
    [
        {"start_ns": 80},  # the next begins a little early, as programmatic launches do
        {"start_ns": 20, "duration_ns": 20, "stream": 8},
        {"start_ns": 20, "duration_ns": 20, "device": 1},
        {"start_ns": 20, "duration_ns": 20, "rank": 1},
        {"start_ns": 20, "duration_ns": 20, "correlation": 1},  # of the same graph
        {"start_ns": 80, "duration_ns": 15},  # most of the first lies before it
        {"start_ns": 20, "duration_ns": 0},
    ],
)
def test_an_overlap_that_can_be_is_no_damage(other):
    kernels = {"start_ns": 0, "correlation": 1}, {"correlation": 2, **other}
    assert starts_of(*kernels, ranges=[launch(1), launch(2)]) == [0, other["start_ns"]]


def test_streams_of_the_same_number_in_two_threads_tell_nothing():
    kernels = (
        {"start_ns": 0, "correlation": 1, "duration_ns": 900},
        {"start_ns": 9, "correlation": 2},
    )
    assert starts_of(*kernels, ranges=[launch(1), launch(2, thread=2)]) == [0, 9]


def test_damage_is_graded_bad_with_its_time():
    trace = trace_of({"start_ns": 0, "duration_ns": 9_000_000}, {"start_ns": 200})
    (check,) = [
        c for c in audit(measured(without_lost_records(trace))) if c.name == "Damaged records"
    ]
    assert check.verdict == "bad"
    assert quantities_in(check.evidence) == ["1", "9.000 ms"]


def test_a_sound_trace_has_no_such_grade():
    trace = measured(without_lost_records(trace_of({"start_ns": 0}, {"start_ns": 200})))
    assert "Damaged records" not in [check.name for check in audit(trace)]


def test_launches_are_found_by_rank_and_number_however_large_the_numbers_are():
    calls = [(0, 2**62), (1, 2**62), (1, 2**63 - 1), (1, 7), (1, 7)]
    activities = [(1, 2**63 - 1), (0, 2**62), (1, 2**62), (0, 2**63 - 1), (1, None), (1, 7)]
    kernels, ranges = (
        pd.DataFrame(
            {
                "rank": [rank for rank, _ in rows],
                "correlation": pd.array([number for _, number in rows], dtype="Int64"),
                "kind": "runtime",
            }
        )
        for rows in (activities, calls)
    )
    assert launch_rows(kernels, ranges).tolist() == [2, 0, 1, -1, -1, -1]
