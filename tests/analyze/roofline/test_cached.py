"""What the cache before the memory serves and keeps, and how the roofline takes it."""

from dataclasses import replace

import numpy as np
import pytest

from kprof.analyze.roofline.agreement import as_recorded, by_work
from kprof.analyze.roofline.bound import BOUNDS, add_roofline, copy_ns, is_served, kept_bytes
from tests.analyze.calls import recorded, tensor
from tests.analyze.roofline.roofline_rows import CACHED
from tests.traces import ROUND_DEVICE, trace_of

HALF = tensor("bf16", 1000, 1000)
# 2 MB read and 2 MB written: 4 us at the bandwidth of the memory, 2 us within the cache.
COPY = {"name": "aten::copy_", **recorded(HALF, HALF, False)}
# 40 MB written, of which 6.7 MB stay in the cache.
FILL = {"name": "aten::fill_", **recorded(tensor("bf16", 5000, 4000), 0)}
PRODUCT = {"name": "aten::mm", **recorded(HALF, HALF)}


def measured(*kernels, ranges, device=CACHED):
    trace = trace_of(*kernels, ranges=ranges, passes=("attribute", "classify"), device=device)
    return add_roofline(trace).kernels


@pytest.mark.parametrize(
    ("num_bytes", "expected_ns"),
    [(0, 1000), (4_000_000, 2000), (6_000_000, 2500), (16_000_000, 5000)],
)
def test_copies_in_the_cache_lie_on_lines_through_the_measured_ones(num_bytes, expected_ns):
    assert copy_ns(CACHED, np.array([num_bytes]))[0] == pytest.approx(expected_ns)


def test_no_copy_larger_than_the_cache_stays_in_it():
    assert np.isnan(copy_ns(CACHED, np.array([16_000_001]))).all()


def test_the_speed_of_an_unmeasured_cache_is_unknown():
    assert np.isnan(copy_ns(replace(CACHED, cached_copies=()), np.array([1000]))).all()


@pytest.mark.parametrize(("time_ns", "expected"), [(3333, True), (3334, False)])
def test_what_reached_the_share_of_a_copy_in_the_cache_came_from_it(time_ns, expected):
    one = np.array([2_000_000]), np.array([4_000_000]), np.array([time_ns])
    assert is_served(CACHED, *one, share=0.6).tolist() == [expected]


def test_more_than_half_of_the_cache_cannot_have_been_left_in_it():
    one = np.array([8_000_001]), np.array([10_000_000]), np.array([1000])
    assert is_served(CACHED, *one, share=0.6).tolist() == [False]


@pytest.mark.parametrize(
    ("written", "moved", "kept"),
    [
        (1000, 1000, 1000),
        (20_000_000, 20_000_000, 6_720_000),
        (20_000_000, 40_000_000, 6_720_000),
        (10_000_000, 40_000_000, 3_600_000),
        (1000, 5000, 1000),
        (0, 0, 0),
    ],
)
def test_the_cache_holds_what_was_touched_last_and_so_much_unwritten_when_a_launch_ends(
    written, moved, kept
):
    assert kept_bytes(CACHED, np.array([written]), np.array([moved])).tolist() == [kept]
    assert kept_bytes(ROUND_DEVICE, np.array([written]), np.array([moved])).tolist() == [0]


def test_what_is_faster_than_the_memory_has_the_caches_ceiling_and_does_not_wait_for_memory():
    found = measured({"op_row": 0, "duration_ns": 2500}, ranges=[COPY])
    assert (found["limit_ns"][0], found["bound"][0]) == (2000, "latency")


def test_what_took_its_time_has_the_ceiling_of_the_memory():
    found = measured({"op_row": 0, "duration_ns": 5000}, ranges=[COPY])
    assert found["limit_ns"].tolist() == [4000]


# 20 MB read and 20 MB written, of which 8 MB can have been left in the cache.
LARGE_COPY = {
    "name": "aten::copy_",
    **recorded(tensor("bf16", 2500, 4000), tensor("bf16", 2500, 4000), False),
}


@pytest.mark.parametrize(
    ("time_ns", "limit_ns"), [(39_300, 40_000), (39_200, 32_000), (33_000, 32_000)]
)
def test_of_what_was_faster_than_the_memory_the_cache_served_all_that_it_can_hold(
    time_ns, limit_ns
):
    found = measured({"op_row": 0, "duration_ns": time_ns}, ranges=[LARGE_COPY])
    assert (found["limit_ns"][0], found["bound"][0]) == (limit_ns, "memory")


def test_the_cache_had_nothing_of_what_is_only_written():
    fill = {"name": "aten::fill_", **recorded(tensor("bf16", 4000, 4000), 0)}
    found = measured({"op_row": 0, "duration_ns": 30_000}, ranges=[fill])
    assert found["limit_ns"].tolist() == [32_000]


def test_no_help_of_the_cache_is_faster_than_a_copy_within_it():
    # 10 MB read, too much to be left whole: 2 us for the rest, 3.5 us in the cache.
    total = {"name": "aten::sum", **recorded(tensor("int8", 10_000, 1000), None)}
    found = measured({"op_row": 0, "duration_ns": 5000}, ranges=[total])
    assert found["limit_ns"].tolist() == [3500]


def test_what_beats_the_memory_keeps_its_ceiling_where_no_copy_in_the_cache_was_measured():
    unmeasured = replace(CACHED, cached_copies=())
    row = {"op_row": 0, "duration_ns": 33_000}
    found = measured(row, ranges=[LARGE_COPY], device=unmeasured)
    assert found["limit_ns"].tolist() == [40_000]


def test_what_adds_up_a_split_product_has_no_part_in_its_work():
    parts = (
        {"name": "nvjet_splitK_TNT", "op_row": 0, "duration_ns": 30_000},
        {"name": "cublasLt::splitKreduce_kernel<32>", "op_row": 0, "duration_ns": 30_000},
    )
    found = measured(*parts, ranges=[PRODUCT])
    assert found["flops"].tolist() == [2_000_000_000, 0]
    assert found["bytes"].tolist() == [6_000_000, 0]
    assert found["bound"].astype(object).fillna("unknown").tolist() == ["compute", "unknown"]


def test_what_finishes_alone_keeps_its_operators_work():
    alone = {"name": "splitKreduce_kernel", "op_row": 0, "duration_ns": 30_000}
    found = measured(alone, ranges=[PRODUCT])
    assert found["bytes"].tolist() == [6_000_000]


def test_the_counted_run_has_its_own_time_and_leaves_its_writes_in_the_cache():
    # At 60 % of the bandwidth the rest takes 55.5 us.
    row = {"op_row": 0, "duration_ns": 56_000, "counted_ns": 55_000, "work_from": "shapes"}
    found = measured(row, ranges=[FILL])
    assert (found["bound"].isna()[0], found["counted_bound"][0]) == (True, "memory")
    assert BOUNDS[by_work(found)[0]] == "memory"
    assert as_recorded(found).tolist() == [-1]


def test_what_was_not_counted_has_no_bound_of_a_counted_run():
    found = measured({"op_row": 0, "duration_ns": 2500}, ranges=[COPY])
    assert found["counted_bound"].isna().all()
