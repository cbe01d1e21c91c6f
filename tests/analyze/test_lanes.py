"""Lanes keep what can be seen and merge what cannot."""

from __future__ import annotations

from kprof.analyze.lanes import device_rows, host_rows, merge_small
from kprof.trace import NOT_RECORDED
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of


def test_every_stream_has_its_lane():
    trace = analyzed_trace_of(
        {"stream": 7}, {"stream": 13, "start_ns": 50}, {"stream": 7, "rank": 1}
    )
    rows = device_rows(trace, 0, 0, 1000)
    assert rows["lane"].tolist() == ["GPU 0 stream 7", "GPU 0 stream 13"]


def test_a_lane_names_no_stream_that_was_not_recorded():
    trace = analyzed_trace_of({"stream": NOT_RECORDED, "device": NOT_RECORDED})
    assert device_rows(trace, 0, 0, 1000)["lane"].tolist() == ["GPU"]


def test_what_lies_outside_the_moments_is_left_out():
    trace = analyzed_trace_of({}, {"start_ns": 100}, {"start_ns": 300})
    assert device_rows(trace, 0, 100, 300)["row"].tolist() == [1]


def test_nested_ranges_lie_on_deeper_levels():
    trace = analyzed_trace_of(
        ranges=[
            {"kind": "module", "start_ns": 10, "duration_ns": 20},
            {"kind": "phase", "duration_ns": 100},
            {"kind": "module", "start_ns": 30, "duration_ns": 20},
            {"kind": "op", "start_ns": 12, "duration_ns": 5},
        ]
    )
    rows = host_rows(trace, 0, 0, 1000)
    lanes = dict(zip(rows["row"], map(quantities_in, rows["lane"]), strict=True))
    assert lanes == {1: ["1", "1"], 0: ["1", "2"], 2: ["1", "2"]}


def test_ranges_nested_too_deep_are_left_out():
    ranges = [{"kind": "module", "start_ns": i, "duration_ns": 100 - 2 * i} for i in range(8)]
    assert len(host_rows(analyzed_trace_of(ranges=ranges), 0, 0, 100)) == 6


def test_few_rows_are_left_as_they_are():
    rows = device_rows(analyzed_trace_of({"duration_ns": 1}, {"start_ns": 2}), 0, 0, 10**9)
    assert merge_small(rows, 10**9, most=2) is rows


def test_merged_rows_are_counted_and_named_after_their_longest():
    trace = analyzed_trace_of(
        {"duration_ns": 1},
        {"start_ns": 2, "duration_ns": 3},
        {"start_ns": 500_000, "duration_ns": 400_000},
    )
    merged = merge_small(device_rows(trace, 0, 0, 1_000_000), 1_000_000, most=2)
    columns = ["row", "start_ns", "end_ns", "merged"]
    assert merged[columns].to_numpy().tolist() == [[2, 500_000, 900_000, 1], [1, 0, 5, 2]]


def test_no_more_than_most_remain_however_they_lie():
    trace = analyzed_trace_of(*({"start_ns": 1000 * i, "duration_ns": 900} for i in range(50)))
    merged = merge_small(device_rows(trace, 0, 0, 50_000), 50_000, most=10)
    assert len(merged) == 10
