"""Traces of several processes become one."""

import pytest

from kprof.collect.merge import merge
from kprof.errors import TraceError
from tests.traces import trace_of


def test_one_trace_is_returned_as_it_is():
    trace = trace_of({})
    assert merge([trace], "folder") is trace


def test_ranks_keep_their_numbers_and_their_rows():
    merged = merge([trace_of({"rank": 3}), trace_of({"rank": 1}, {"rank": 1})], "folder")
    assert merged.kernels["rank"].tolist() == [3, 1, 1]
    assert merged.meta.num_ranks == 2


def test_files_with_the_same_rank_are_numbered_and_a_caveat_says_so():
    merged = merge([trace_of({}), trace_of({})], "folder")
    assert merged.kernels["rank"].tolist() == [0, 1]
    assert "each counts as a rank of its own" in merged.meta.caveats[0]


def test_clocks_are_aligned_by_wall_time():
    early = trace_of({"rank": 0, "start_ns": 10}, base_time_ns=1_000)
    late = trace_of({"rank": 1, "start_ns": 10}, base_time_ns=1_500)
    assert merge([early, late], "folder").kernels["start_ns"].tolist() == [10, 510]


def test_names_of_all_files_stay_what_they_were():
    merged = merge([trace_of({"rank": 0, "name": "a"}), trace_of({"rank": 1, "name": "b"})], "x")
    assert merged.kernels["name"].tolist() == ["a", "b"]


def test_counts_add_up():
    parts = [trace_of({"rank": r}, counts={"events": 5}) for r in (0, 1)]
    assert merge(parts, "x").meta.counts == {"events": 10}


def test_a_host_only_file_among_device_traces_is_refused():
    with pytest.raises(TraceError, match="no GPU activity"):
        merge([trace_of({}), trace_of(ranges=[{}])], "folder")


def test_clocks_that_lie_decades_apart_are_not_aligned():
    parts = [trace_of({"rank": r, "start_ns": 10}, base_time_ns=r * 2**62) for r in (0, 1)]
    merged = merge(parts, "folder")
    assert merged.kernels["start_ns"].tolist() == [10, 10]
    assert "decades apart" in merged.meta.caveats[0]
