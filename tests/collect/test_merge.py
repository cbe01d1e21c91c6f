"""Traces of several processes become one."""

from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprof.collect.merge import merge
from kprof.errors import TraceError
from kprof.trace import Gpu
from tests.collectives import MS, recordings
from tests.quantities import quantities_in
from tests.traces import trace_of


def test_one_trace_is_returned_as_it_is():
    trace = trace_of({})
    assert merge([trace], "folder") is trace


def test_ranks_keep_their_numbers_and_their_rows():
    merged = merge([trace_of({"rank": 3}), trace_of({"rank": 1}, {"rank": 1})], "folder")
    assert merged.kernels["rank"].tolist() == [1, 1, 3]
    assert merged.meta.num_ranks == 2


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(4)))
def test_the_order_of_the_files_changes_neither_a_row_nor_what_is_said(order):
    parts = recordings([[0, 1, 2, 3]], [0, 0, 5 * MS, -2 * MS])
    merged = merge([parts[place] for place in order], "folder")
    usual = merge(parts, "folder")
    pd.testing.assert_frame_equal(merged.kernels, usual.kernels)
    assert merged.meta == usual.meta


def test_files_with_the_same_rank_are_numbered_and_a_caveat_says_so():
    merged = merge([trace_of({}), trace_of({})], "folder")
    assert merged.kernels["rank"].tolist() == [0, 1]
    (caveat,) = merged.meta.caveats
    assert caveat.id == "ranks_by_order"


@pytest.mark.parametrize(("size", "said"), [(2, []), (8, [["8", "6"]]), (None, [])])
def test_ranks_of_the_job_that_are_in_no_file_are_counted(size, said):
    merged = merge([trace_of({"rank": rank}, world_size=size) for rank in (0, 5)], "folder")
    told = [one.text for one in merged.meta.caveats if one.id == "ranks_missing"]
    assert [quantities_in(text) for text in told] == said


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
    assert merged.meta.caveats[0].id == "clocks_not_aligned"


def test_every_rank_counts_the_gpus_that_it_used():
    gpus = (Gpu(0, "H200"), Gpu(1, "H200"))
    parts = [trace_of({"rank": rank, "device": rank}, gpus=gpus) for rank in (0, 1)]
    merged = merge(parts, "folder")
    assert merged.gpus == (Gpu(0, "H200", rank=0), Gpu(1, "H200", rank=1))


def test_the_gpu_0_of_two_ranks_may_be_two_gpus():
    parts = [
        trace_of({"rank": 0}, gpus=(Gpu(0, "H200"),)),
        trace_of({"rank": 1}, gpus=(Gpu(0, "H100"),)),
    ]
    merged = merge(parts, "folder")
    assert [gpu.name for gpu in merged.gpus] == ["H200", "H100"]
    assert "H200, H100" in merged.meta.caveats[0].text


def test_gpus_that_no_rank_used_are_listed_once():
    parts = [trace_of(ranges=[{"rank": rank}], gpus=(Gpu(0, "H200"),)) for rank in (0, 1)]
    assert merge(parts, "folder").gpus == (Gpu(0, "H200"),)


def test_a_merged_run_merges_with_another_one():
    parts = [trace_of({"rank": rank}, gpus=(Gpu(0, "H200"),)) for rank in range(4)]
    merged = merge([merge(parts[:2], "a"), merge(parts[2:], "b")], "both")
    assert [gpu.rank for gpu in merged.gpus] == [0, 1, 2, 3]


def test_collectives_mend_a_wrong_wall_clock():
    first, second = recordings([[0, 1]], [0, 40 * MS])
    merged = merge([with_base(first, 5_000), with_base(second, 5_000)], "folder")
    start = merged.kernels.groupby("rank")["start_ns"].min()
    assert abs(start[0] - start[1]) < MS
    assert merged.meta.base_time_ns == 5_000
    assert quantities_in(merged.meta.caveats[0].text)[:2] == ["1", "-40.0 ms"]
    assert merged.meta.clocks.startswith("By wall time.")
    assert merged.meta.caveats[0].text in merged.meta.clocks


def test_a_clock_without_wall_time_comes_onto_that_of_one_that_has_it():
    first, second = recordings([[0, 1]], [0, 40 * MS])
    merged = merge([first, with_base(second, 5_000)], "folder")
    assert merged.kernels["start_ns"].iloc[-1] == second.kernels["start_ns"].iloc[-1]
    assert abs(merged.kernels["start_ns"].iloc[0] - second.kernels["start_ns"].iloc[0]) < MS
    assert merged.meta.base_time_ns == 5_000
    assert not any(one.id == "clocks_not_aligned" for one in merged.meta.caveats)


def test_recordings_of_one_rank_are_not_aligned_by_collectives():
    first, _ = recordings([[0, 1]], [0, 0])
    later, _ = recordings([[0, 1]], [40 * MS, 0])
    merged = merge([first, later], "folder")
    assert merged.meta.clocks is None
    assert merged.kernels["start_ns"].max() == later.kernels["start_ns"].max()


def with_base(trace, base_time_ns):
    return replace(trace, meta=replace(trace.meta, base_time_ns=base_time_ns))


def test_a_gpu_counts_only_for_the_rank_that_calls_it_so():
    gpus = (Gpu(0, "H200", rank=0), Gpu(0, "H100", rank=1))
    assert trace_of({"rank": 1}, gpus=gpus).gpus == gpus[1:]
